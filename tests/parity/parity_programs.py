"""Small programs of many kinds. Each says what to call, with which arguments, and which leaves get gradients.

A program never checkpoints by itself: it is given ``ckpt``, which calls a function plainly or checkpoints it, and uses
it wherever it wants to nest.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Ckpt = Callable[..., Any]
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Case:
    """One program, ready to run once.

    Attributes:
        function: what is checkpointed.
        args: its arguments.
        kwargs: its keyword arguments.
        leaves: what gradients are asked for, besides the parameters of ``module``.
        autocast: the dtype to autocast to, if any.
        second_order: take a gradient of the gradient.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    leaves: list[torch.Tensor] = field(default_factory=list)
    autocast: torch.dtype | None = None
    second_order: bool = False


PROGRAMS: dict[str, Callable[[Ckpt], Case]] = {}


def program(build: Callable[[Ckpt], Case]) -> Callable[[Ckpt], Case]:
    """Put a program on the list."""
    PROGRAMS[build.__name__] = build
    return build


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A random leaf that gets a gradient."""
    return torch.randn(shape, dtype=dtype).requires_grad_()


def of_module(module: nn.Module, *args: torch.Tensor, **kwargs: Any) -> Case:
    """A case that calls a module."""
    leaves = [*(arg for arg in args if arg.requires_grad), *(p for p in module.parameters() if p.requires_grad)]
    return Case(module, args, kwargs, leaves)


@program
def mlp(ckpt):
    return of_module(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 4)), leaf(3, 6))


@program
def attention_by_hand(ckpt):
    q, k, v = leaf(2, 3, 5, 4), leaf(2, 3, 5, 4), leaf(2, 3, 5, 4)
    mask = torch.ones(5, 5).tril().bool()

    def function(q, k, v, mask):
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~mask, float("-inf"))
        return functional.dropout(scores.softmax(-1), 0.3) @ v

    return Case(function, (q, k, v, mask), leaves=[q, k, v])


@program
def scaled_dot_product_attention(ckpt):
    q, k, v = leaf(2, 3, 5, 4), leaf(2, 3, 5, 4), leaf(2, 3, 5, 4)
    return Case(functional.scaled_dot_product_attention, (q, k, v), {"is_causal": True}, [q, k, v])


@program
def transformer_layer(ckpt):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return of_module(layer, leaf(2, 5, 8))


@program
def convolution_and_group_norm(ckpt):
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten())
    return of_module(module, leaf(2, 3, 6, 6))


@program
def convolution_on_channels_last(ckpt):
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    return of_module(nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.AvgPool2d(2)), x)


@program
def batch_norm_without_running_statistics(ckpt):
    return of_module(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.ELU()), leaf(5, 4))


@program
def embedding_and_loss(ckpt):
    module = nn.Sequential(nn.Embedding(10, 6, padding_idx=0), nn.Linear(6, 10))
    tokens, targets = torch.randint(10, (4, 5)), torch.randint(10, (20,))

    def function(tokens, targets):
        return functional.cross_entropy(module(tokens).flatten(0, 1), targets, label_smoothing=0.1)

    return Case(function, (tokens, targets), leaves=list(module.parameters()))


@program
def lstm_cell_in_a_loop(ckpt):
    cell = nn.LSTMCell(4, 5)
    x, h, c = leaf(6, 2, 4), leaf(2, 5), leaf(2, 5)

    def function(x, state):
        for step in x:
            state = cell(step, state)
        return state

    return Case(function, (x, (h, c)), leaves=[x, h, c, *cell.parameters()])


@program
def gru_over_a_sequence(ckpt):
    return of_module(nn.GRU(4, 5, num_layers=2, dropout=0.3), leaf(6, 2, 4))


class Cube(torch.autograd.Function):
    """Saves an input and an output, and reads twice what it saved."""

    @staticmethod
    def forward(ctx, x, exponent):
        ctx.exponent = exponent
        y = x**exponent
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * ctx.exponent * x ** (ctx.exponent - 1) + 0 * y, None


@program
def custom_function(ckpt):
    x = leaf(3, 4)
    return Case(lambda x: Cube.apply(x.sin(), 3).cos(), (x,), leaves=[x])


@program
def custom_function_at_the_end(ckpt):
    x = leaf(3, 4)
    return Case(lambda x: Cube.apply(x.sin().cos(), 3), (x,), leaves=[x])


@program
def in_place_on_fresh_values(ckpt):
    x = leaf(3, 4)

    def function(x):
        y = x.clone()
        y.mul_(2).add_(x)
        y[1] = y[0].clone() * x[2]
        y.sigmoid_()
        z = torch.zeros_like(x)
        z.scatter_add_(0, torch.tensor([[0, 1, 2, 0]]), y[:1])
        return functional.relu(z + y, inplace=True) + 1

    return Case(function, (x,), leaves=[x])


@program
def in_place_through_views(ckpt):
    x = leaf(4, 4)

    def function(x):
        y = x * 1
        y.diagonal().mul_(x.sum())
        y.view(2, 8).narrow(1, 0, 4).add_(x[2].exp())
        y.t()[0].copy_(x[0].sin())
        return y.unfold(0, 2, 1).cos()

    return Case(function, (x,), leaves=[x])


@program
def views_and_strides(ckpt):
    x = leaf(4, 6)

    def function(x):
        y = x.t().reshape(4, 6).expand(2, 4, 6).permute(2, 0, 1)
        z = x.as_strided((3, 3), (6, 2)).exp()
        return y.flip(0).roll(1, 2).sin(), z, x.unsqueeze(1).squeeze().chunk(2, 1)[1].cos()

    return Case(function, (x,), leaves=[x])


@program
def output_is_a_view_of_the_input(ckpt):
    x = leaf(4, 6)
    return Case(lambda x: (x[1:3], x.t(), x.sin()), (x,), leaves=[x])


@program
def input_is_returned(ckpt):
    x = leaf(4, 6)
    return Case(lambda x: (x, x.exp()), (x,), leaves=[x])


@program
def dropout_of_every_kind(ckpt):
    x = leaf(2, 4, 6)

    def function(x):
        y = functional.dropout(x.sin(), 0.3)
        y = functional.feature_alpha_dropout(y, 0.2, training=True)
        y = y * torch.rand_like(y) + torch.randn(6)
        return functional.rrelu(y, 0.1, 0.4, training=True)[..., torch.randperm(6)]

    return Case(function, (x,), leaves=[x])


@program
def noise_is_the_last_thing_saved(ckpt):
    x = leaf(4, 6)
    return Case(lambda x: functional.rrelu(x.sin(), 0.1, 0.4, training=True), (x,), leaves=[x])


@program
def autocast_around(ckpt):
    module = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6), nn.Softmax(-1))
    case = of_module(module, leaf(3, 6))
    case.autocast = torch.bfloat16
    return case


@program
def autocast_inside(ckpt):
    weight, x = leaf(6, 6), leaf(3, 6)

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ weight
            with torch.autocast("cpu", enabled=False):
                y = y.float() @ weight
            return (y @ weight).float()

    return Case(function, (x,), leaves=[x, weight])


@program
def complex_numbers(ckpt):
    x, w = leaf(4, 4, dtype=torch.complex128), leaf(4, 4, dtype=torch.complex128)

    def function(x):
        y = torch.fft.fft(x @ w.conj()).angle() + (x * w).abs()
        return torch.view_as_real(x.exp() * y.exp()), torch.fft.irfft(x, n=6)

    return Case(function, (x,), leaves=[x, w])


@program
def double_backward(ckpt):
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    case = of_module(module, leaf(3, 4, dtype=torch.float64))
    case.second_order = True
    return case


@program
def gradient_inside_forward(ckpt):
    x, w = leaf(4), leaf(4)

    def function(x):
        energy = (x.sin() * w).exp().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force * w.tanh(), energy

    return Case(function, (x,), leaves=[x, w])


@program
def backward_inside_forward(ckpt):
    x, w = leaf(4), leaf(4)

    def function(x):
        inner = x.detach().requires_grad_()
        (inner.sin() * inner.exp()).sum().backward()
        return (x * w).cos() * inner.grad

    return Case(function, (x,), leaves=[x, w])


@program
def nested_checkpoints(ckpt):
    weights = [leaf(4, 4) for _ in range(3)]
    x = leaf(3, 4)

    def layer(x, weight):
        return functional.dropout((x @ weight).sin(), 0.2).cos()

    def pair(x):
        return ckpt(layer, ckpt(layer, x, weights[0]), weights[1]).tanh()

    return Case(lambda x: ckpt(pair, x).exp() @ weights[2], (x,), leaves=[x, *weights])


@program
def nested_checkpoint_with_keywords(ckpt):
    x, bias = leaf(3, 4), leaf(4)

    def layer(state, *, bias):
        return {"h": (state["h"] * bias).sin()}

    return Case(lambda s, bias: ckpt(layer, s, bias=bias)["h"].exp(), ({"h": x}, bias), leaves=[x, bias])


@program
def shared_parameters(ckpt):
    embedding, x = leaf(6, 4), leaf(3, 4)

    def function(x):
        logits = x @ embedding.t()
        return (logits.softmax(-1) @ embedding).tanh() @ embedding.t()

    return Case(function, (x,), leaves=[x, embedding])


@program
def keywords_and_containers(ckpt):
    x, y, z = leaf(3), leaf(3), leaf(3)

    def function(first, rest, *, table, scale=1.0, flag=None):
        left, (middle,) = rest
        assert flag is None
        return first * left.sin() + scale * middle.exp() * table["z"] + table["deep"][0].left

    args = (x, [y, (z,)])
    return Case(function, args, {"table": {"z": z, "deep": [Pair(x, y)]}, "scale": 2.5}, [x, y, z])


@program
def structured_outputs(ckpt):
    x = leaf(3, 4)

    def function(x):
        ordered = OrderedDict(a=x.sin(), b=[x.exp(), None, 3])
        return {"ordered": ordered, "pair": Pair(x.argmax(), x.cos()), "text": "text", "detached": x.detach() * 2}

    return Case(function, (x,), leaves=[x])


@program
def frozen_parameters(ckpt):
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    module[0].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    return of_module(module, leaf(3, 4))


@program
def inputs_that_need_no_gradient(ckpt):
    return of_module(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(3, 4))


@program
def indexing(ckpt):
    x, w = leaf(5, 4), leaf(5, 4)
    rows, mask = torch.tensor([3, 0, 3]), torch.tensor([True, False, True, True])

    def function(x, rows, mask):
        y = x[rows] * w[:, mask][rows][:, :1]
        z = x.gather(1, torch.tensor([[0], [1], [2], [3], [0]])) * w.index_select(1, rows)
        return y.index_put((torch.tensor([0]),), x[1]), z.take_along_dim(torch.zeros(5, 1, dtype=torch.long), 1)

    return Case(function, (x, rows, mask), leaves=[x, w])


@program
def einsum_and_reductions(ckpt):
    a, b = leaf(2, 3, 4), leaf(2, 4, 5)

    def function(a, b):
        c = torch.einsum("bij,bjk->bik", a, b)
        return c.logsumexp(1), c.prod(2), c.cumsum(1).var(0), c.norm(dim=2), c.amax((0, 1)), c.std()

    return Case(function, (a, b), leaves=[a, b])


@program
def loop_with_branches_on_data(ckpt):
    x, w = leaf(4), leaf(4)

    def function(x):
        for _ in range(5):
            x = (x * w).sin() if x.sum() > 0 else (x - w).cos()
        return torch.where(x > 0, x.exp(), w * x)

    return Case(function, (x,), leaves=[x, w])


@program
def inputs_that_are_not_contiguous(ckpt):
    base = leaf(4, 8)
    x, y = base.t(), base[:, ::2]
    return Case(lambda x, y: (x.sin().t() @ x, y.exp() * 2, functional.layer_norm(y, (4,))), (x, y), leaves=[base])


@program
def sorting_and_selecting(ckpt):
    x = leaf(4, 6)

    def function(x):
        values, indices = x.sort(1)
        top = x.topk(2).values
        return values.cumprod(1), indices, top.sin(), x.median(1).values, x.kthvalue(2).values

    return Case(function, (x,), leaves=[x])


@program
def linear_algebra(ckpt):
    a, b = leaf(4, 4, dtype=torch.float64), leaf(4, 2, dtype=torch.float64)

    def function(a, b):
        spd = a @ a.mT + 4 * torch.eye(4, dtype=a.dtype)
        return torch.linalg.cholesky(spd), torch.linalg.solve(spd, b), torch.linalg.slogdet(spd), torch.linalg.inv(spd)

    return Case(function, (a, b), leaves=[a, b])


@program
def one_tensor_twice(ckpt):
    x = leaf(3, 4)
    return Case(lambda a, b, *, c: (a * b).sin() * c.exp(), (x, x), {"c": x}, leaves=[x])


@program
def ends_with_what_saves_nothing(ckpt):
    x = leaf(3, 4)
    return Case(lambda x: (x.sin() + 1).reshape(-1)[::2] - 3, (x,), leaves=[x])


@program
def saves_nothing_at_all(ckpt):
    x, y = leaf(3, 4), leaf(3, 4)
    return Case(lambda x, y: (x + y).t() - 1, (x, y), leaves=[x, y])


@program
def scalars_and_broadcasting(ckpt):
    x, scale = leaf(3, 4), leaf()

    def function(x, scale, power):
        return (x * scale).abs().pow(power).clamp(0.1, 2.0) / (1 + scale**2), torch.lerp(x, x.sin(), scale)

    return Case(function, (x, scale, 2.5), leaves=[x, scale])


@program
def mixed_precision_by_hand(ckpt):
    x, w = leaf(3, 4), leaf(4, 4)

    def function(x):
        return (x.bfloat16() @ w.bfloat16()).float().square().to(torch.float64).sum(0)

    return Case(function, (x,), leaves=[x, w])


@program
def stop_gradients_inside(ckpt):
    x, w = leaf(3, 4), leaf(4, 4)

    def function(x):
        with torch.no_grad():
            scale = (x @ w).abs().amax()
        return (x / scale).detach().exp() * (x @ w) + functional.gumbel_softmax(x @ w, hard=True)

    return Case(function, (x,), leaves=[x, w])


@program
def hooks_on_intermediates(ckpt):
    x = leaf(3, 4)

    def function(x):
        y = x.sin()
        y.register_hook(lambda grad: grad * 2)
        return y.exp()

    return Case(function, (x,), leaves=[x])


@program
def hooks_of_the_function_itself(ckpt):
    x = leaf(3, 4)

    def function(x):
        y = x.sin()
        with torch.autograd.graph.save_on_cpu():
            y = y.exp() * y
        return y.cos()

    return Case(function, (x,), leaves=[x])


@program
def vmap_inside(ckpt):
    x, w = leaf(3, 4), leaf(4)

    def function(x):
        y = torch.func.vmap(lambda row: (row * w).sin())(x)
        return torch.func.vmap(lambda row: row.softmax(0) @ row)(y).exp()

    return Case(function, (x,), leaves=[x, w])


@program
def empty_tensors(ckpt):
    x, y = leaf(0, 4), leaf(3, 0)
    return Case(lambda x, y: (x.sin().exp() @ x.t(), y.exp().sum(1), (y * 2).sin()), (x, y), leaves=[x, y])


@program
def long_chain_of_small_operators(ckpt):
    x = leaf(2, 2)

    def function(x):
        for _ in range(60):
            x = (x * 1.1).sin().mul(0.9)
        return x

    return Case(function, (x,), leaves=[x])


@program
def retained_gradients_and_detached_branches(ckpt):
    x, w = leaf(3, 4), leaf(3, 4)

    def function(x):
        straight_through = x + (x.round() - x).detach()
        return straight_through * w, (x.detach() * w).sin()

    return Case(function, (x,), leaves=[x, w])


@program
def scatter_and_segments(ckpt):
    x = leaf(6, 3)
    segments = torch.tensor([0, 0, 1, 2, 2, 2])

    def function(x, segments):
        sums = torch.zeros(3, 3).index_add(0, segments, x.sin())
        largest = torch.zeros(3, 3).scatter_reduce(0, segments[:, None].expand(-1, 3), x.exp(), "amax")
        return sums * largest, sums[segments].cos()

    return Case(function, (x, segments), leaves=[x])


@program
def losses(ckpt):
    x, y = leaf(4, 6), leaf(4, 6)

    def function(x, y):
        return (
            functional.smooth_l1_loss(x, y.sin()),
            functional.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
            functional.cosine_similarity(x, y),
            torch.cdist(x, y),
        )

    return Case(function, (x, y), leaves=[x, y])
