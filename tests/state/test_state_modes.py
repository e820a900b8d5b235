"""Like B3: function modes, flags of the process, and what users register."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from regrow import is_recomputing, register_ambient


class Times(TorchFunctionMode):
    """Scales the first argument of every matmul, and counts them."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.matmul:
            args = (args[0] * self.factor + 1, *args[1:])
        return func(*args, **(kwargs or {}))


def leaves():
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


def mix(x, w):
    return torch.matmul(torch.matmul(x, w).sin(), w).cos()


def test_modes_are_entered_again_in_their_order(same_in_any_way):
    """Rule 3: two modes that do not commute do to the replay what they did to forward."""

    def program(run):
        x, w = leaves()
        with Times(2.0), Times(3.0):
            out = run(mix, x, w)
        run.backward(out.sum())
        return out.detach(), x.grad, w.grad

    same_in_any_way(program)


@pytest.mark.only(
    "hooks",
    because="each call of the other engine adds up what it captures or shares by itself, which may round differently",
)
def test_a_mode_around_backward_does_not_touch_the_replay(same_in_any_way):
    """Rule 3: forward ran without the mode, or under another, and so does the replay."""

    def program(run):
        x, w = leaves()
        with Times(2.0):
            out = run(mix, x, w)
        with Times(5.0):
            out = out + run(mix, x, w)
        with Times(7.0), Times(11.0):
            run.backward((out + run(mix, w, x)).sum() * 0 + out.sum())
            after = torch.matmul(x, w).detach()
        return out.detach(), x.grad, w.grad, after

    same_in_any_way(program)


def test_a_mode_that_the_function_opens_nests_in_that_of_forward(same_in_any_way):
    """Rule 3: a mode inside the function lies on top of those around it, also where the replay is cut short."""

    def program(run):
        x, w = leaves()

        def inside(x, w):
            with Times(3.0):
                return mix(x, w).exp()

        with Times(2.0):
            out = run(inside, x, w)
        run.backward(out.sum())
        return x.grad, w.grad

    same_in_any_way(program)


@pytest.mark.parametrize("forward", ["cpu", "meta"])
@pytest.mark.parametrize("backward", ["cpu", "meta"])
def test_the_default_device_is_that_of_forward(same_in_any_way, forward, backward):
    """Rule 3: what a function creates, it creates where forward did."""

    def program(run):
        x, w = leaves()

        def block(x, w):
            scale = 2.0 if torch.empty(1).is_meta else 3.0
            return mix(x * scale, w)

        with torch.device(forward):
            loss = run(block, x, w).sum()
        with torch.device(backward):
            run.backward(loss)
        return x.grad, w.grad

    same_in_any_way(program)


def test_the_default_dtype_is_that_of_forward(same_in_any_way):
    """Rule 3: a constant made in the function has forward's type, and the later default stays."""

    def program(run):
        x, w = leaves()
        torch.set_default_dtype(torch.float64)
        out = run(lambda x, w: mix(x, w).exp() * torch.rand(4), x, w)
        torch.set_default_dtype(torch.float32)
        run.backward(out.sum())
        return x.grad, w.grad, torch.ones(1)

    same_in_any_way(program)


def test_flags_of_the_process_are_those_of_forward(same_in_any_way):
    """Rule 3: deterministic algorithms and matmul precision hold for the replay, and not a moment longer."""

    def program(run):
        x, w = leaves()

        def block(x, w):
            scale = 2.0 if torch.are_deterministic_algorithms_enabled() else 3.0
            return mix(x, w).exp() * (scale + len(torch.get_float32_matmul_precision()))

        losses = []
        for deterministic, precision in ((True, "high"), (False, "medium"), (False, "highest")):
            torch.use_deterministic_algorithms(deterministic)
            torch.set_float32_matmul_precision(precision)
            losses.append(run(block, x, w).sin().sum())
        for loss in losses:
            run.backward(loss)
        return x.grad, w.grad, torch.get_float32_matmul_precision()

    same_in_any_way(program)


def test_determinism_that_only_warned_does_not_raise_in_the_replay(same_in_any_way):
    """Rule 3: a strictness that forward did not have is not there in the replay."""

    def program(run):
        x, _ = leaves()

        def block(x):
            scale = 2.0 if torch.is_deterministic_algorithms_warn_only_enabled() else 3.0
            return (x * scale).sin().exp()

        torch.use_deterministic_algorithms(True, warn_only=True)
        loss = run(block, x).sum()
        torch.use_deterministic_algorithms(False)
        run.backward(loss)
        return x.grad

    same_in_any_way(program)


def test_the_new_flags_of_precision_do_not_break_a_call(fresh_process):
    """Rule 3: a process that sets the precision of one backend can still checkpoint."""
    program = """if True:
        import torch, regrow
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        x = torch.ones(4, requires_grad=True)
        regrow.checkpoint(torch.sin, x).sum().backward()
        print(x.grad is not None)
    """
    assert fresh_process(program).strip() == "True"


def test_attention_is_computed_by_forwards_backend(same_in_any_way):
    """Rule 3: what sdpa_kernel allowed around forward is what the replay may choose from."""

    def program(run):
        q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))

        def attend(q, k, v):
            scale = 2.0 if torch.backends.cuda.flash_sdp_enabled() else 3.0
            return nn.functional.scaled_dot_product_attention(q * scale, k, v).exp()

        with sdpa_kernel([SDPBackend.MATH]):
            out = run(attend, q, k, v)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            out = out + run(attend, q, k, v)
        run.backward(out.sum())
        return q.grad, k.grad, v.grad

    same_in_any_way(program)


class Dial:
    """A piece of ambient state, and the order in which it is turned."""

    def __init__(self, name="dial", log=None):
        self.name = name
        self.log = [] if log is None else log
        self.value = 1.0
        self.fails = ""

    @contextmanager
    def at(self, value):
        if self.fails == "enter":
            raise OSError(self.name)
        was, self.value = self.value, value
        self.log.append(f"{self.name} in")
        try:
            yield
        finally:
            self.value = was
            self.log.append(f"{self.name} out")
        if self.fails == "leave":
            raise OSError(self.name)

    def capture(self):
        return self.value


@pytest.fixture
def dial():
    made = Dial()
    unregister = register_ambient(made.capture, made.at)
    yield made
    unregister()


def test_registered_state_is_that_of_each_forward(same_in_any_way, dial):
    """Rule 24: two calls under two states are each replayed under their own, and the state around backward stays."""

    def program(run):
        x, w = leaves()
        losses = []
        for value in (2.0, 3.0):
            with dial.at(value):
                losses.append(run(lambda x, w: mix(x * dial.value, w), x, w).sum())
        with dial.at(7.0):
            for loss in losses:
                run.backward(loss)
            after = dial.value
        return x.grad, w.grad, after, dial.value

    same_in_any_way(program)


def test_state_that_the_function_turns_itself_nests(same_in_any_way, dial):
    """Rule 24: a function that opens the state again finds forward's around it."""

    def program(run):
        x, w = leaves()

        def block(x, w):
            x = x * dial.value
            with dial.at(dial.value + 1):
                return mix(x * dial.value, w).exp()

        with dial.at(4.0):
            out = run(block, x, w)
        run.backward(out.sum())
        return x.grad, w.grad, dial.value

    same_in_any_way(program)


def test_registered_states_are_entered_in_order_and_left_in_reverse(engine, anywhere):
    """Rule 24: the order of registration, which is that of nesting; None is nothing to restore."""
    log = []
    dials = [Dial(name, log) for name in ("first", "none", "second")]
    captures = [dials[0].capture, lambda: None, dials[2].capture]
    ends = [register_ambient(capture, dial.at) for capture, dial in zip(captures, dials, strict=True)]
    x = torch.ones(3, requires_grad=True)
    loss = engine.checkpoint(lambda x: x.sin().exp(), x).sum()
    for unregister in ends:
        unregister()
    anywhere(loss.backward)
    assert log == ["first in", "second in", "second out", "first out"]


def test_a_call_made_after_unregistering_restores_nothing(engine, anywhere):
    """Rule 24: unregistering, once or twice, ends what is captured from now on."""
    dial = Dial()
    unregister = register_ambient(dial.capture, dial.at)
    unregister()
    unregister()
    x = torch.ones(3, requires_grad=True)
    anywhere(engine.checkpoint(torch.sin, x).sum().backward)
    assert dial.log == []


@pytest.mark.only("hooks", because="a failed backward releases a call of the other engine")
@pytest.mark.parametrize("fails", ["enter", "leave"])
def test_a_state_that_cannot_be_restored_leaves_nothing_behind(engine, anywhere, fails):
    """Rule 24: the error is the user's own, the states around it are taken back, and the next backward works."""
    outer, inner = Dial("outer"), Dial("inner")
    ends = [register_ambient(dial.capture, dial.at) for dial in (outer, inner)]
    x = torch.ones(3, requires_grad=True)
    with outer.at(2.0), inner.at(3.0):
        loss = engine.checkpoint(lambda x: (x * outer.value * inner.value).sin(), x).sum()
    for unregister in ends:
        unregister()
    inner.fails = fails
    before = torch.random.get_rng_state().tolist(), torch.is_grad_enabled(), is_recomputing()
    with pytest.raises(OSError, match="inner"):
        anywhere(lambda: loss.backward(retain_graph=True))
    after = torch.random.get_rng_state().tolist(), torch.is_grad_enabled(), is_recomputing()
    inner.fails = ""
    anywhere(loss.backward)
    assert (before, outer.value, inner.value) == (after, 1.0, 1.0)
    torch.testing.assert_close(x.grad, torch.full((3,), 6.0).cos() * 6)


def test_a_capture_that_raises_ends_the_call_and_nothing_else(engine, anywhere):
    """Rule 24: the error comes from the call, before the function; the next call is as if nothing had been."""
    runs = []

    def capture():
        raise OSError("no state")

    unregister = register_ambient(capture, Dial().at)
    x = torch.ones(3, requires_grad=True)

    def function(x):
        runs.append(1)
        return x.sin()

    with pytest.raises(OSError, match="no state"):
        engine.checkpoint(function, x)
    unregister()
    anywhere(engine.checkpoint(function, x).sum().backward)
    assert len(runs) == 2


@pytest.mark.parametrize("name", ["dtype", "deterministic"])
def test_a_flag_that_the_function_sets_for_itself_is_not_left_behind(engine, anywhere, name):
    """Rule 3: a replay that stops early, before the function sets the flag back, leaves it as it was."""
    read, write, inside = {
        "dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    }[name]
    x, was = torch.ones(4, requires_grad=True), read()

    def function(x):
        write(inside)
        y = (x * torch.ones(4)).sin()
        write(was)
        return y

    anywhere(engine.checkpoint(function, x).sum().backward)
    assert read() == was
