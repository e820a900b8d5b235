"""Scope: which reentrant calls have a backward in two halves, and their handles. Must never hold a frame.

scope opened  ->  a call inside: asks once for the parameters, gets a trigger of its own, gives the scope a handle
handle        ->  says which half backward is in, and names the trigger among the targets of the second one
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any

import torch

from regrow import errors
from regrow._core.frame import Frame, Handle

Source = Iterable[torch.Tensor] | Callable[[], Iterable[torch.Tensor]]


class Phase(Enum):
    """Which half of a split backward runs."""

    DX = "dx"
    DW = "dw"


class SplitFrame(Frame):
    """A call whose backward can run in two halves.

    Attributes:
        split: whether its backward may be cut.
        phase: the half that its handle said; None if it said none.
        released: whether it was let go for good.
        trigger: what the second half names among its targets.
    """

    learns = False
    split: bool = False
    phase: Phase | None = None
    released: bool = False
    trigger: torch.Tensor

    @abstractmethod
    def recompute(self) -> None:
        """Replay now, for the next backward that no session holds."""

    @abstractmethod
    def let_go(self) -> None:
        """Drop everything, the inputs too: no replay is possible any more."""


class ReentrantHandle(Handle):
    """A reentrant call as a scheduler sees it.

    Memory: keeps neither the call nor any tensor alive.

    Threads: any, while no backward of the call runs.
    """

    __slots__ = ()

    @property
    def split(self) -> bool:
        """Whether the call was made in a scope or a session, so that its backward may be cut in two."""
        frame = self._alive()
        return frame is not None and frame.split

    @property
    def phase(self) -> str | None:
        """What `set_phase` said last; None if nothing."""
        frame = self._alive()
        return None if frame is None or frame.phase is None else frame.phase.value

    @property
    def released(self) -> bool:
        """Whether the call can be replayed no more: released, consumed by its backward, or its graph has died."""
        frame = self._alive()
        return frame is None or frame.released

    @property
    def backward_trigger(self) -> torch.Tensor | None:
        """A tensor without elements to name among the targets of dw; None for a call that is not split.

        It reaches calls whose parameters are only captured: autograd knows no other way from their output to them.
        """
        frame = self._alive()
        return frame.trigger if frame is not None and frame.split else None

    def set_phase(self, phase: str) -> None:
        """Say which half of backward comes next.

        Args:
            phase: "dx" for the gradients of activations, "dw" for those of parameters.

        Raises:
            ValueError: another phase, or the call is not split.
            RuntimeError: the call was released, or its graph has died.
        """
        wanted = next((known for known in Phase if known.value == phase), None)
        if wanted is None:
            raise ValueError(f'phase must be "dx" or "dw", got {phase!r}.')
        frame = self._usable()
        if not frame.split:
            raise ValueError(
                f'{self._label}: phase "{phase}" on a call that is not split. '
                "Make the call inside regrow.reentrant_checkpoint_scope(parameters)."
            )
        frame.phase = wanted

    def recompute(self) -> None:
        """Replay now, so that the next backward outside a session finds the replay. Again it does nothing.

        Raises:
            RuntimeError: the call was released, its graph has died, or its forward has not returned.
            regrow.CheckpointError: it cannot be replayed as it was.

        Memory: the call holds the graph of the replay until its backward has used it, `release`, or its graph dies.
        """
        self._usable().recompute()

    def release(self) -> None:
        """Let the call go for good, whatever it holds; its backward raises then. Again it does nothing."""
        frame = self._alive()
        if frame is not None:
            frame.let_go()

    def _alive(self) -> SplitFrame | None:
        frame = self._frame()
        assert frame is None or isinstance(frame, SplitFrame)
        return frame

    def _usable(self) -> SplitFrame:
        frame = self._alive()
        if frame is None:
            raise RuntimeError(errors.released_frame(self._label))
        if frame.released:
            raise RuntimeError(errors.let_go_frame(self._label))
        return frame


class Scope:
    """What one open scope knows.

    Attributes:
        handles: of the calls made inside, in forward order.
        automatic: phases are found from what backward asks for, and whoever opened it brings no gradient twice: the
            scope of a pipeline stage.

    Memory: holds the parameters while it is open.
    """

    __slots__ = ("_known", "_source", "automatic", "handles")

    def __init__(self, source: Source, *, automatic: bool = False) -> None:
        self.handles: list[Handle] = []
        self.automatic = automatic
        self._source: Source | None = source
        self._known: dict[int, torch.Tensor] = {}

    def are_parameters(self, tensors: list[torch.Tensor]) -> frozenset[int]:
        """Which of the inputs of a call are parameters, by place. The first call asks the source."""
        source, self._source = self._source, None
        if source is not None:
            self._known = _checked(source() if callable(source) else source)
        return frozenset(index for index, tensor in enumerate(tensors) if id(tensor) in self._known)


innermost: ContextVar[Scope | None] = ContextVar("regrow_scope", default=None)


@contextmanager
def opened(scope: Scope) -> Iterator[Scope]:
    """Calls made inside belong to the scope."""
    if innermost.get() is not None:
        raise ValueError(
            "reentrant_checkpoint_scope inside another one: a call belongs to one scope. Leave the outer scope first; "
            "a pipeline stage opens one around its forward by itself."
        )
    token = innermost.set(scope)
    try:
        yield scope
    finally:
        innermost.reset(token)


def check_source(source: Any) -> Source:
    """Refuse what gives no tensors, as far as it can be seen without asking for them."""
    if callable(source) and not isinstance(source, torch.nn.Module):
        return source  # type: ignore[no-any-return]
    return list(_checked(source).values())


def _checked(source: Any) -> dict[int, torch.Tensor]:
    if isinstance(source, torch.Tensor) or not isinstance(source, Iterable):
        raise ValueError(
            "parameters must be an iterable of tensors, such as model.parameters(), or a function that returns one; "
            f"got {type(source).__name__}."
        )
    found: dict[int, torch.Tensor] = {}
    for index, tensor in enumerate(source):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"parameters must hold tensors, item {index} is {tensor!r} of {type(tensor).__name__}.")
        if tensor.requires_grad:
            found[id(tensor)] = tensor
    return found
