"""Like B1: random numbers. A replay draws what forward drew, and nobody's stream moves."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional


def noisy(x, generator):
    return (x * torch.rand(x.shape, generator=generator)).sin()


def after(x, generator):
    """What a program with a generator returns: the gradient, and what is drawn next from either stream."""
    return x.grad, torch.rand(3, generator=generator), torch.rand(2)


def calling(inner):
    def function(x):
        return inner(x)

    return function


def taking(held, key):
    return lambda x: noisy(x, held[key])


REACHED = {
    "argument": lambda generator: (noisy, generator),
    "partial": lambda generator: (partial(noisy, generator=generator),),
    "closure": lambda generator: (lambda x: noisy(x, generator),),
    "closure in a closure": lambda generator: (calling(lambda x: noisy(x, generator)),),
    "captured list": lambda generator: (taking([1, generator], 1),),
    "captured dict": lambda generator: (taking({"g": generator}, "g"),),
}
HIDDEN = {
    "default": lambda generator: (lambda x, g=generator: noisy(x, g),),
    "list argument": lambda generator: (lambda x, pair: noisy(x, pair[0]), [generator, 1]),
    "dict argument": lambda generator: (lambda x, held: noisy(x, held["g"]), {"g": generator}),
    "ordered argument": lambda generator: (lambda x, held: noisy(x, held["g"]), OrderedDict(g=generator)),
}


@pytest.mark.parametrize("name", [*REACHED, *HIDDEN])
def test_a_generator_is_rewound_however_it_is_reached(same_in_any_way, name):
    """Rule 24: the replay begins with forward's generator and leaves it as it found it."""

    def program(run):
        generator = torch.Generator().manual_seed(3)
        x = torch.ones(8, requires_grad=True)
        function, *more = {**REACHED, **HIDDEN}[name](generator)
        out = run(function, x, *more)
        run.backward(out.sum())
        return after(x, generator)

    same_in_any_way(program)


def test_a_generator_by_keyword_is_rewound(same_in_any_way):
    """Rule 24: a keyword is an argument too."""

    def program(run):
        generator = torch.Generator().manual_seed(3)
        x = torch.ones(8, requires_grad=True)
        run.backward(run(noisy, x, generator=generator).sum())
        return after(x, generator)

    same_in_any_way(program)


def test_a_generator_of_a_method_is_rewound(same_in_any_way):
    """Rule 24: a generator on the module that a method is bound to is the method's own."""

    class Noise(nn.Module):
        def forward(self, x, generator):
            return noisy(x, generator) + torch.rand(x.shape)

    def program(run):
        generator = torch.Generator().manual_seed(3)
        x = torch.ones(8, requires_grad=True)
        run.backward(run(Noise().forward, x, generator).sum())
        return after(x, generator)

    same_in_any_way(program)


def test_one_generator_serves_two_micro_batches(same_in_any_way):
    """Rule 24: two graphs are alive and one generator served both; each replay draws its own forward's numbers."""

    def program(run):
        generator = torch.Generator().manual_seed(3)
        xs = [torch.full((6,), scale, requires_grad=True) for scale in (1.0, 2.0)]
        losses = [run(noisy, x, generator).sum() for x in xs]
        for loss in losses:
            run.backward(loss)
        return *(x.grad for x in xs), torch.rand(3, generator=generator)

    same_in_any_way(program)


def test_a_generator_that_others_move_meanwhile_stays_where_they_left_it(same_in_any_way):
    """Rule 24: what is put back is what the replay found, not what forward left."""

    def program(run):
        generator = torch.Generator().manual_seed(3)
        x = torch.ones(8, requires_grad=True)
        out = run(noisy, x, generator)
        torch.rand(5, generator=generator)
        run.backward(out.sum())
        return after(x, generator)

    same_in_any_way(program)


def test_two_generators_do_not_mix(same_in_any_way):
    """Rule 24: each generator gets its own state back."""

    def program(run):
        first, second = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
        x = torch.ones(8, requires_grad=True)

        def both(x, generator):
            return noisy(noisy(x, generator), second) * torch.rand(8)

        run.backward(run(both, x, first).sum())
        return *after(x, first), torch.rand(2, generator=second)

    same_in_any_way(program)


def test_nested_dropouts_draw_the_same_masks(same_in_any_way):
    """Rule 3: masks of modules, of functions and of in-place operators come back."""

    def program(run):
        body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Sequential(nn.AlphaDropout(0.3), nn.RReLU()))
        x = torch.randn(3, 6, requires_grad=True)

        def noisy_body(x):
            y = functional.dropout(body(x), 0.5)
            return functional.dropout1d(y.sin(), 0.2) * torch.empty(6).bernoulli_(0.5)

        out = run(noisy_body, x)
        torch.rand(7)
        run.backward(out.square().sum())
        return x.grad, body[0].weight.grad, torch.rand(2)

    same_in_any_way(program)


def test_indices_drawn_in_forward_are_drawn_again(same_in_any_way):
    """Rule 3: permutations and choices come from the same stream as masks."""

    def program(run):
        x = torch.rand(6, 4, requires_grad=True)

        def pick(x):
            order = torch.randperm(6)
            chosen = torch.multinomial(x.detach(), 2)
            return (x[order].gather(1, chosen) * torch.randint(1, 5, (6, 2))).exp()

        run.backward(run(pick, x).sum())
        return x.grad, torch.randperm(9)

    same_in_any_way(program)


def test_a_function_that_seeds_the_stream_seeds_it_once(same_in_any_way):
    """Rule 3: the stream of the caller stands where the caller left it, whatever the replay does to it."""

    def program(run):
        x = torch.ones(8, requires_grad=True)

        def seeding(x):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(5)
                x = x * torch.rand(8)
            torch.manual_seed(11)
            return torch.dropout(x, 0.5, True).sin() * torch.rand(8)

        out = run(seeding, x)
        drawn = torch.rand(3)
        run.backward(out.sum())
        return x.grad, drawn, torch.rand(3)

    same_in_any_way(program)


def test_two_noisy_calls_run_backward_in_forward_order(same_in_any_way):
    """Rule 3: each call has its own place in the stream, in whatever order backward comes."""

    def program(run):
        xs = [torch.ones(8, requires_grad=True) for _ in range(3)]
        losses = [run(lambda x: torch.dropout(x, 0.5, True).exp() * torch.rand(8), x).sum() for x in xs]
        for loss in losses:
            run.backward(loss)
            torch.rand(1)
        return *(x.grad for x in xs), torch.rand(2)

    same_in_any_way(program)
