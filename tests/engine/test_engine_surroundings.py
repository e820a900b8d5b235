"""A replay sees forward's random numbers, autocast, modes and grad mode; the caller's are the same before and after."""

import random
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from regrow import clear_recompute_session, recompute_handle, recompute_handle_collector_ctx


class Noting(TorchFunctionMode):
    """A function mode that changes nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def state_of_the_caller():
    """Everything a replay may touch on its thread."""
    return {
        "random": torch.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        "default device": torch.get_default_device(),
    }


def fired(engine, function, *args, **options):
    """A handle whose replay runs where the test says."""
    with recompute_handle_collector_ctx() as handles:
        out = engine.checkpoint(function, *args, **options)
    return out, handles[0]


SURROUNDINGS = {
    "nothing": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "default device": lambda: torch.device("meta"),
    "function mode": Noting,
    "saved-tensor hooks": torch.autograd.graph.save_on_cpu,
}
# Those in which forward records a graph, on the CPU.
RECORDING = [name for name in SURROUNDINGS if name not in ("no_grad", "inference mode", "default device")]


@pytest.mark.parametrize("of_prefire", SURROUNDINGS)
@pytest.mark.parametrize("of_forward", RECORDING)
def test_the_callers_state_is_the_same_before_and_after_a_replay(engine, of_forward, of_prefire):
    """Rule 3: whatever forward ran in, and whatever the replay is started in."""
    x = torch.randn(4, 4, requires_grad=True)
    with SURROUNDINGS[of_forward]():
        _alive, handle = fired(engine, lambda t: torch.dropout(t @ t, 0.5, True).float().sin(), x)
    with SURROUNDINGS[of_prefire]():
        before = state_of_the_caller()
        recompute_handle(handle, "session")
        after = state_of_the_caller()
    clear_recompute_session("session")
    assert after == before


@pytest.mark.parametrize("of_prefire", SURROUNDINGS)
def test_the_callers_state_is_the_same_after_a_replay_that_fails(engine, of_prefire):
    """Rule 3: also when the function raises in the middle, inside modes and contexts of its own."""
    fail = []

    def function(t):
        h = torch.dropout(t.sin(), 0.5, True)
        with torch.autocast("cpu", dtype=torch.float16), Noting():
            if fail:
                raise KeyError("replay")
            return (h @ h).float().exp()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        _alive, handle = fired(engine, function, torch.randn(3, 3, requires_grad=True))
    fail.append(True)
    with SURROUNDINGS[of_prefire]():
        before = state_of_the_caller()
        with pytest.raises(KeyError, match="replay"):
            recompute_handle(handle, "session")
        after = state_of_the_caller()
    assert after == before


@pytest.mark.parametrize("surround", RECORDING)
def test_the_replay_computes_in_forwards_surroundings(same_grads, surround):
    """Rule 3: backward runs outside; gradients and later random numbers are those of the plain call."""

    def program(call):
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        with SURROUNDINGS[surround]():
            out = call(lambda a, b: torch.dropout(torch.tanh(a @ b), 0.5, True).float().exp(), x, w)
        torch.rand(3)
        out.sum().backward()
        return x.grad, w.grad, torch.rand(2)

    same_grads(program)


@pytest.mark.parametrize("surround", [*RECORDING, "no_grad"])
def test_the_replay_ignores_the_surroundings_of_backward(same_grads, surround):
    """Rule 3: forward ran bare, backward does not."""

    def program(call):
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        out = call(lambda a, b: torch.dropout(torch.tanh(a @ b), 0.5, True).float().exp(), x, w)
        loss = out.sum()
        with SURROUNDINGS[surround]():
            loss.backward()
        return x.grad, w.grad, torch.rand(2)

    same_grads(program)


def test_random_numbers_without_preserving_them(engine):
    """Rule 3: ``preserve_rng_state=False`` neither rewinds the generator nor puts it back."""
    drawn = []

    def function(t):
        drawn.append(torch.rand(2))
        return t.exp()

    out = engine.checkpoint(function, torch.randn(3, requires_grad=True), preserve_rng_state=False)
    torch.manual_seed(5)
    want = torch.rand(2)
    torch.manual_seed(5)
    out.sum().backward()
    assert torch.equal(drawn[1], want)
    assert not torch.equal(drawn[1], drawn[0])


def test_every_kind_of_draw_is_repeated(engine):
    """Rule 3: one generator serves them all."""
    drawn = []

    def function(t):
        drawn.append(
            [
                torch.rand(2),
                torch.randn(2),
                torch.randint(9, (2,)),
                torch.randperm(5),
                torch.empty(2).uniform_(),
                torch.bernoulli(torch.full((4,), 0.5)),
                torch.multinomial(torch.ones(4), 2),
                torch.normal(0.0, 1.0, (2,)),
                nn.functional.dropout(torch.ones(4)),
            ]
        )
        return t.exp()

    engine.checkpoint(function, torch.randn(3, requires_grad=True)).sum().backward()
    forward, replay = drawn
    assert all(torch.equal(a, b) for a, b in zip(forward, replay, strict=True))


def test_a_captured_generator_of_torch_is_rewound_and_pythons_moves_on(engine):
    """Rule 24: what is restored is listed; Python's own generator is not in the list."""
    own = torch.Generator().manual_seed(3)
    random.seed(3)
    drawn = []

    def function(t):
        drawn.append((random.random(), torch.rand(1, generator=own).item()))
        return t.exp()

    engine.checkpoint(function, torch.randn(3, requires_grad=True)).sum().backward()
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] == drawn[1][1]


def test_a_reseed_inside_the_function_stays_inside_the_replay(same_grads):
    """Rule 3: the replay reseeds again, and the caller's generator does not feel it."""

    def program(call):
        x = torch.randn(3, requires_grad=True)

        def function(t):
            torch.manual_seed(17)
            return (t * torch.rand(3)).sin()

        out = call(function, x)
        torch.manual_seed(99)
        out.sum().backward()
        return x.grad, torch.rand(2)

    same_grads(program)


@pytest.mark.only("hooks", because="forward of the other engine casts without autocast's cache")
@pytest.mark.parametrize("cached", [True, False])
def test_autocasts_cache_flag_is_forwards(engine, cached):
    """Rule 3: whether autocast remembers casts is part of the state."""
    seen = []

    def function(t):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return (t @ t).float().sin()

    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
        out = engine.checkpoint(function, torch.randn(3, 3, requires_grad=True))
    out.sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=not cached):
        engine.checkpoint(function, torch.randn(3, 3, requires_grad=True)).sum().backward()
    assert seen == [(True, cached)] * 2 + [(True, not cached)] * 2


@pytest.mark.only("hooks", because="forward of the other engine casts without autocast's cache")
def test_autocast_inside_autocast_with_backward_in_the_middle(same_grads):
    """Rule 3: forward in an inner region, backward in the outer one, weights cast once by the cache."""

    def program(call):
        layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            warm = layer(x)
            with torch.autocast("cpu", enabled=False):
                inner = call(lambda t: layer(t).tanh(), x)
            outer = call(lambda t: layer(t).tanh(), x)
            (inner.sum() + outer.float().sum() + warm.float().sum()).backward()
        return x.grad, layer.weight.grad, layer.bias.grad

    same_grads(program)


def test_default_device_of_forward(engine):
    """Rule 3: tensors that the function makes lie where forward made them."""
    made = []

    def function(t):
        made.append((torch.ones(2).device.type, torch.get_default_device().type))
        return t.exp()

    x = torch.randn(3, requires_grad=True)
    with torch.device("meta"):
        out = engine.checkpoint(function, x)
    out.sum().backward()
    bare = engine.checkpoint(function, x)
    with torch.device("meta"):
        torch.autograd.grad(bare, x, torch.ones(3, device="cpu"))
    assert made == [("meta", "meta")] * 2 + [("cpu", "cpu")] * 2


class Adding(TorchFunctionMode):
    def __init__(self, log, name):
        super().__init__()
        self.log, self.name = log, name

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.sin:
            self.log.append(self.name)
        return func(*args, **(kwargs or {}))


def test_function_modes_come_back_in_their_order(engine):
    """Rule 3: outer and inner modes of forward, and none of backward's."""
    log, x = [], torch.randn(3, requires_grad=True)
    with Adding(log, "outer"), Adding(log, "inner"):
        out = engine.checkpoint(lambda t: torch.sin(t).exp(), x)
    loss = out.sum()
    with Adding(log, "backward's"):
        loss.backward()
    assert log == ["inner", "outer"] * 2


def test_function_modes_inside_the_function_are_entered_and_left_again(engine):
    """Rule 3: a mode of the function's own lies above forward's, in both runs."""
    log, x = [], torch.randn(3, requires_grad=True)

    def function(t):
        with Adding(log, "own"):
            h = torch.sin(t)
        return torch.sin(h).exp()

    with Adding(log, "outer"):
        out = engine.checkpoint(function, x, early_stop=False)
    out.sum().backward()
    assert log == ["own", "outer", "outer"] * 2


class CountMm(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_around_a_step_sees_the_replay(engine):
    """Rule 3: flop counters around backward count what runs there."""
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with CountMm() as count:
        engine.checkpoint(lambda a, b: torch.tanh(a @ b), x, w).sum().backward()
    assert count.seen == 1 + 1 + 2


def test_grad_mode_inside_the_function_is_its_own(same_grads):
    """Rule 3: ``no_grad`` and ``enable_grad`` parts save the same tensors again."""

    def program(call):
        x = torch.randn(3, requires_grad=True)

        def function(t):
            with torch.no_grad():
                scale = t.exp()
            with torch.inference_mode():
                shift = t.abs().sum()
            return (t * scale).sin() * float(shift)

        call(function, x).sum().backward()
        return x.grad

    same_grads(program)


@pytest.mark.only("hooks", because="the other engine takes no context_fn")
def test_contexts_of_context_fn_surround_forward_and_replay(engine):
    """Rule 3: the first context is forward's, the second the replay's."""
    log = []

    class Context:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            log.append(f"enter {self.name}")

        def __exit__(self, *error):
            log.append(f"leave {self.name}")

    def function(t):
        log.append("run")
        return t.exp()

    x = torch.randn(3, requires_grad=True)
    out = engine.checkpoint(function, x, context_fn=lambda: (Context("forward"), Context("replay"))).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert log == ["enter forward", "run", "leave forward"] + ["enter replay", "run", "leave replay"] * 2


@pytest.mark.only("hooks", because="the other engine takes no context_fn")
def test_context_fn_is_asked_once_per_call_and_not_where_nothing_is_recorded(engine, counted):
    """Rule 2: a plain call has no contexts."""
    contexts = counted(lambda: (nullcontext(), nullcontext()))
    x = torch.randn(3, requires_grad=True)
    engine.checkpoint(torch.exp, x, context_fn=contexts).sum().backward()
    assert contexts.runs == 1
    with torch.no_grad():
        engine.checkpoint(torch.exp, x, context_fn=contexts)
    assert contexts.runs == 1


@pytest.mark.only("hooks", because="the other engine takes no context_fn")
def test_a_replay_context_that_swallows_exceptions_does_not_make_a_failed_replay_good(engine):
    """Rule 4: what the function did not bring back is missed."""
    fail = []

    def function(t):
        h = t.sin()
        if fail:
            raise KeyError("replay")
        return h.exp()

    x = torch.randn(3, requires_grad=True)
    out = engine.checkpoint(function, x, context_fn=lambda: (nullcontext(), suppress(KeyError)))
    fail.append(True)
    with pytest.raises(RuntimeError, match="forward saved 2 tensors, the replay saved 1"):
        out.sum().backward()
    assert x.grad is None


@pytest.mark.only("hooks", because="the other engine takes no context_fn")
def test_a_forward_context_that_swallows_exceptions_is_refused(engine):
    """Rule 3: there would be no output to return."""

    def function(t):
        raise KeyError("forward")

    with pytest.raises(RuntimeError, match="suppressed an exception"):
        engine.checkpoint(
            function, torch.randn(3, requires_grad=True), context_fn=lambda: (suppress(KeyError), nullcontext())
        )


class Twice(torch.Tensor):
    """Its sines are twice as large."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is torch.Tensor.sin else out


def test_a_backward_that_starts_from_a_tensor_of_a_subclass(same_grads):
    """Rule 3: torch asks no subclass meanwhile; the replay asks them, as forward did."""

    def program(call):
        x = torch.randn(3, requires_grad=True)
        call(lambda t: t.sin().exp(), (x * 1).as_subclass(Twice)).sum().backward()
        return x.grad

    same_grads(program)


def test_a_call_that_asks_no_subclass_is_replayed_so(same_grads):
    """Rule 3: made where a subclass is not asked, and read where it is."""

    def program(call):
        x = torch.randn(3, requires_grad=True)
        with torch._C.DisableTorchFunctionSubclass():
            out = call(lambda t: torch.Tensor.sin(t).exp(), (x * 1).as_subclass(Twice))
        torch.autograd.backward([out.as_subclass(torch.Tensor)], [torch.ones(3)])
        return x.grad

    same_grads(program)


class Louder(TorchFunctionMode):
    """A mode that changes sines."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 1.7 if func is torch.sin else out


ASKED = {
    "all": nullcontext,
    "modes": torch._C.DisableTorchFunctionSubclass,
    "nobody": torch._C.DisableTorchFunction,
}


@pytest.mark.parametrize("behind", list(ASKED))
@pytest.mark.parametrize("forward", list(ASKED))
def test_a_replay_asks_whom_forward_asked(same_grads, forward, behind):
    """Rule 3: subclasses and modes, modes alone, or nobody, whoever is asked around backward."""

    def program(call):
        x = torch.randn(4, requires_grad=True)
        with Louder(), ASKED[forward]():
            out = call(lambda t: torch.sin(t).exp() * torch.sin(t), x)
        with ASKED[behind]():
            torch.autograd.backward([out.sum()])
        return x.grad

    same_grads(program)
