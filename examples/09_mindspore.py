"""The scheduling verbs on MindSpore: a small network, trained with prefire and a backward cut in two.

    forward    block 0 -> block 1 -> block 2     three checkpointed calls, three handles
    prefire    block 2, block 1, block 0         each runs once more, before backward asks
    dx         the gradient of the input         reads what was regrown, and keeps it
    dw         the gradients of the weights      reads it again, and lets it go
    clear

It trains the network three ways, on the same data and from the same weights: plain, checkpointed with the whole
backward at once, and checkpointed with prefire, dx and dw apart. Losses are equal bit for bit, and a checkpointed block
runs twice per step, however many pieces backward is cut into.

Needs MindSpore 2.10 instead of torch:

    pip install 'mindspore==2.10.0' 'numpy<2'
    PYTHONPATH=src python examples/09_mindspore.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import mint, nn, ops
from mindspore._c_expression import run_backward  # MindSpore has no public backward for chosen inputs
from mindspore.graph.api import _pynative_executor

from regrow.platform import get_platform

mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
mindspore.set_device("CPU")
platform = get_platform("mindspore")

N_BLOCKS, WIDTH, STEPS = 3, 16, 8


class Block(nn.Cell):
    """Two layers with dropout between them, around which the input goes."""

    def __init__(self, random: np.random.RandomState) -> None:
        super().__init__()
        self.up = nn.Dense(WIDTH, 4 * WIDTH, weight_init=tensor(random.randn(4 * WIDTH, WIDTH) / 4))
        self.down = nn.Dense(4 * WIDTH, WIDTH, weight_init=tensor(random.randn(WIDTH, 4 * WIDTH) / 8))
        self.runs = 0

    def construct(self, x: Any) -> Any:
        """Dropout is the function: the cell's random numbers cannot be drawn again on CPU."""
        self.runs += 1
        return x + self.down(ops.dropout(ops.gelu(self.up(x)), 0.1))


def tensor(array: Any) -> Any:
    """A tensor of single precision."""
    return mindspore.Tensor(np.asarray(array, np.float32))


@contextmanager
def recorded() -> Iterator[None]:
    """Operators outside of mindspore.grad are recorded for a backward that is run by hand."""
    before = _pynative_executor.grad_flag()
    _pynative_executor.set_grad_flag(True)
    try:
        yield
    finally:
        _pynative_executor.set_grad_flag(before)


def backward(loss: Any, inputs: list[Any], *, keep_graph: bool) -> list[Any]:
    """The gradients of a loss for chosen inputs."""
    one = tensor(1.0)
    return list(
        run_backward((loss,), (one,), keep_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False)
    )


def forward(blocks: list[Block], x: Any, y: Any, call: Callable[..., Any]) -> Any:
    """The loss, with each block called through ``call``."""
    for block in blocks:
        x = call(block, x)
    return mint.mean((x - y) * (x - y))


def at_once(blocks: list[Block], x: Any, y: Any, step: int, call: Callable[..., Any]) -> tuple[Any, list[Any]]:
    """The loss and the gradients of the weights, in one backward."""
    with recorded():
        loss = forward(blocks, x, y, call)
    return loss, backward(loss, weights_of(blocks), keep_graph=False)


def plain(blocks: list[Block], x: Any, y: Any, step: int) -> tuple[Any, list[Any]]:
    """Without a checkpoint: every activation is kept."""
    return at_once(blocks, x, y, step, lambda block, x: block(x))


def lazily(blocks: list[Block], x: Any, y: Any, step: int) -> tuple[Any, list[Any]]:
    """Checkpointed: backward replays each block when it gets there."""
    return at_once(blocks, x, y, step, platform.checkpoint)


def prefired(blocks: list[Block], x: Any, y: Any, step: int) -> tuple[Any, list[Any]]:
    """Checkpointed, and the scheduler decides: replays first, then dx, then dw."""
    with recorded(), platform.recompute_handle_collector_ctx() as handles:
        loss = forward(blocks, x, y, platform.checkpoint)
    session_id = ("step", step)
    try:
        for handle in reversed(handles):
            platform.recompute_handle(handle, session_id)
        with platform.recompute_session_ctx(session_id, retain_on_unpack=True):
            backward(loss, [x], keep_graph=True)  # dx: a pipeline stage would send it to the stage before
        with platform.recompute_session_ctx(session_id, retain_on_unpack=False):
            return loss, backward(loss, weights_of(blocks), keep_graph=False)
    finally:
        platform.clear_recompute_session(session_id)


def weights_of(blocks: list[Block]) -> list[Any]:
    """The parameters of the network."""
    return [weight for block in blocks for weight in block.trainable_params()]


def train(one_step: Callable[..., tuple[Any, list[Any]]]) -> tuple[list[float], int]:
    """The loss of each step, and how often a block ran per step."""
    random = np.random.RandomState(0)
    mindspore.set_seed(1)
    blocks = [Block(random).set_train(True) for _ in range(N_BLOCKS)]
    weights = weights_of(blocks)
    for index, weight in enumerate(weights):
        weight.name = f"{index}.{weight.name}"
    optimizer = nn.Adam(weights, learning_rate=0.01)
    target = random.randn(WIDTH, WIDTH)
    losses = []
    for step in range(STEPS):
        batch = random.randn(32, WIDTH)
        x = tensor(batch)
        x.requires_grad_()
        loss, gradients = one_step(blocks, x, tensor(batch @ target), step)
        optimizer(tuple(gradients))
        losses.append(float(loss.asnumpy()))
    return losses, sum(block.runs for block in blocks) // (N_BLOCKS * STEPS)


def main() -> None:
    """Train three ways and compare."""
    results = {way.__name__: train(way) for way in (plain, lazily, prefired)}
    for name, (losses, runs) in results.items():
        print(f"{name:9} loss {losses[0]:.6f} -> {losses[-1]:.6f}, {runs} runs of a block per step")
    expected = results["plain"][0]
    if any(losses != expected for losses, _ in results.values()):
        raise SystemExit("the losses differ")
    print("losses are equal bit for bit")


if __name__ == "__main__":
    main()
