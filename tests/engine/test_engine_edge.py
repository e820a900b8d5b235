"""The edge of the call: bad arguments are refused by name before anything is done; without a function it decorates."""

import functools

import pytest
import torch
from torch import nn

from regrow import recompute_handle_collector_ctx

FLAGS = ["preserve_rng_state", "debug", "early_stop"]


def ran():
    """A function and the list it fills when it runs."""
    log = []

    def function(t):
        log.append(True)
        return t.sin()

    return function, log


MISTAKES = {
    **{
        f"{flag}={value!r}": ({flag: value}, [flag, repr(value), "True or False"])
        for flag in FLAGS
        for value in (None, 1, "yes")
    },
    "respect_saved_tensors_hooks": (
        {"respect_saved_tensors_hooks": 0},
        ["respect_saved_tensors_hooks", "0", "True or False"],
    ),
    "context_fn": ({"context_fn": 3}, ["context_fn", "3", "two context managers"]),
    "context_fn gives none": ({"context_fn": lambda: None}, ["context_fn", "None", "pair"]),
    "context_fn gives one": ({"context_fn": lambda: (torch.no_grad(),)}, ["context_fn", "pair"]),
    "context_fn gives three": ({"context_fn": lambda: (torch.no_grad(),) * 3}, ["context_fn", "pair"]),
    "context_fn gives no contexts": ({"context_fn": lambda: (1, 2)}, ["context_fn", "(1, 2)", "pair"]),
    "policy_fn": ({"policy_fn": "keep"}, ["policy_fn", "'keep'", "policy_fn(ctx, op, *args, **kwargs)"]),
    "determinism_check": ({"determinism_check": "strict"}, ["determinism_check", "'strict'", "'default', 'none'"]),
    "determinism_check=None": ({"determinism_check": None}, ["determinism_check", "None", "'default', 'none'"]),
    "determinism_check=[]": ({"determinism_check": []}, ["determinism_check", "[]", "'default', 'none'"]),
}


# The other engine takes no context_fn, whatever it returns.
ASKED = [
    pytest.param(name, marks=pytest.mark.only("hooks", because="it takes context_fn")) if "gives" in name else name
    for name in MISTAKES
]


@pytest.mark.parametrize("mistake", ASKED)
def test_a_bad_option_is_refused_with_name_value_and_what_is_allowed(engine, mistake):
    """Rule 19: a ValueError, before the function runs, and no handle is left."""
    options, words = MISTAKES[mistake]
    function, log = ran()
    with recompute_handle_collector_ctx() as handles, pytest.raises(ValueError, match="must") as refused:
        engine.checkpoint(function, torch.randn(3, requires_grad=True), **options)
    assert [word for word in words if word not in str(refused.value)] == []
    assert (log, handles) == ([], [])


@pytest.mark.parametrize("function", ["sin", 3, torch.ones(2)])
def test_a_function_that_cannot_be_called_is_refused(engine, function):
    """Rule 19: the name of the argument is ``function``."""
    with pytest.raises(ValueError, match="function must be the function or module to run"):
        engine.checkpoint(function, torch.ones(3))


def test_arguments_without_a_function_are_refused(engine):
    """Rule 19: None as the function is a mistake where there is something to give it."""
    with pytest.raises(ValueError, match="function is missing"):
        engine.checkpoint(None, torch.ones(3))
    with pytest.raises(ValueError, match=r"function is missing.*x for it"):
        engine.checkpoint(x=torch.ones(3))


def test_bad_options_are_refused_where_nothing_is_recorded_too(engine):
    """Rule 19: a typo shows in evaluation as well."""
    with torch.no_grad(), pytest.raises(ValueError, match="early_stop"):
        engine.checkpoint(torch.sin, torch.ones(3), early_stop="yes")


def test_a_decorator_with_options(engine, same):
    """Rule 1: without a positional argument the call decorates."""
    runs = []

    @engine.checkpoint(early_stop=False)
    def block(x, *, scale=1.0):
        """A block."""
        y = (x * scale).sin() + 1
        runs.append(scale)
        return y

    x = torch.randn(3, requires_grad=True)
    got = torch.autograd.grad(block(x, scale=2.0).sum(), x)
    assert runs == [2.0, 2.0]
    assert (block.__name__, block.__doc__) == ("block", "A block.")
    same(got, torch.autograd.grad(((x * 2.0).sin() + 1).sum(), x))


def test_a_decorator_without_options(engine):
    """Rule 1: empty brackets are enough."""

    @engine.checkpoint()
    def block(x):
        return x.sin()

    with recompute_handle_collector_ctx() as handles:
        block(torch.randn(3, requires_grad=True))
    assert len(handles) == 1


@pytest.mark.only("hooks", because="the other engine refuses a limited backward outside a scope")
def test_a_decorated_method(engine, same):
    """Rule 1: ``self`` is the first argument, on instances and through the class, also below ``super()``."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        @engine.checkpoint(early_stop=False)
        def forward(self, x):
            return torch.tanh(x @ self.w)

    class Deeper(Net):
        def forward(self, x):
            return super().forward(x).exp()

    net, x = Deeper(), torch.randn(2, 4, requires_grad=True)
    with recompute_handle_collector_ctx() as handles:
        out = net(x)
    assert len(handles) == 1
    same(torch.autograd.grad(out.sum(), [x, net.w]), torch.autograd.grad(torch.tanh(x @ net.w).exp().sum(), [x, net.w]))


def test_a_decorated_static_and_class_method(engine):
    """Rule 1: below the descriptors of Python."""

    class Maths:
        factor = 2.0

        @staticmethod
        @engine.checkpoint()
        def sine(x):
            return x.sin()

        @classmethod
        @engine.checkpoint()
        def scaled(cls, x):
            return (x * cls.factor).sin()

    x = torch.randn(3, requires_grad=True)
    with recompute_handle_collector_ctx() as handles:
        (Maths.sine(x) + Maths.scaled(x)).sum().backward()
    assert len(handles) == 2
    torch.testing.assert_close(x.grad, x.detach().cos() + 2 * (x.detach() * 2).cos())


def test_a_bad_option_of_a_decorator_is_refused_where_it_is_written(engine):
    """Rule 19: not when the function is called, hours later."""
    with pytest.raises(ValueError, match="early_stop must be True or False, got 'no'"):
        engine.checkpoint(early_stop="no")


def test_a_decorator_around_something_else_is_refused(engine):
    """Rule 19: what is decorated must be a function."""
    with pytest.raises(ValueError, match="function must be the function to decorate"):
        engine.checkpoint(early_stop=False)(3)


def test_options_can_be_bound_beforehand(engine, counted):
    """Rule 1: ``functools.partial`` of the call is a checkpoint of one's own."""
    mine = functools.partial(engine.checkpoint, early_stop=False, preserve_rng_state=False)
    region = counted(torch.sin)
    mine(region, torch.randn(3, requires_grad=True)).sum().backward()
    assert region.runs == 2


@pytest.mark.parametrize("option", ["context_fn", "policy_fn", "debug"])
def test_what_only_the_engine_on_hooks_can_do_is_refused_by_the_other(option):
    """Rule 19: by name, with the engine that can, before the function runs."""
    import regrow

    values = {"context_fn": lambda: (torch.no_grad(), torch.no_grad()), "policy_fn": lambda *_: True, "debug": True}
    function, log = ran()
    with pytest.raises(ValueError, match=f"^{option}: not with use_reentrant=True.*use_reentrant at False"):
        regrow.checkpoint(function, torch.ones(3), use_reentrant=True, **{option: values[option]})
    assert log == []


def test_the_choice_of_the_engine_is_a_flag():
    """Rule 19: anything but a flag is a mistake."""
    import regrow

    with pytest.raises(ValueError, match="use_reentrant must be True or False, got None"):
        regrow.checkpoint(torch.sin, torch.ones(3, requires_grad=True), use_reentrant=None)
