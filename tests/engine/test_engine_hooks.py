"""Saved-tensor hooks of the user: around a call they see its inputs, inside it what they would see anyway."""

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks

import regrow
from regrow import InputChangedError


class Recorder:
    """Hooks that copy, and note what passes."""

    def __init__(self):
        self.packed, self.unpacked = [], []

    def hooks(self):
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor):
        self.packed.append(tuple(tensor.shape))
        return [tensor.detach().clone()]

    def _unpack(self, packed):
        self.unpacked.append(tuple(packed[0].shape))
        return packed[0]


def test_hooks_around_a_call_see_its_inputs_and_nothing_of_its_inside(same_grads):
    """Rule 1: tensors of the arguments, wherever they stand, and each as often as it is an argument."""
    recorder = Recorder()

    def program(call):
        recorder.packed.clear()
        x, w, b = (torch.randn(n, 3, requires_grad=True) for n in (2, 3, 1))
        with recorder.hooks():
            out = call(lambda x, parts, *, b: torch.tanh(x @ parts[0].t()).exp() + b, x, [w], b=b)
        out.sum().backward()
        return x.grad, w.grad, b.grad

    same_grads(program)
    assert recorder.packed == [(2, 3), (3, 3), (1, 3)]


def test_hooks_around_a_call_are_asked_once_per_replay(engine):
    """Rule 6: each backward brings the inputs back once."""
    recorder = Recorder()
    x = torch.randn(3, requires_grad=True)
    with recorder.hooks():
        out = engine.checkpoint(lambda t: t.sin().exp(), x).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert (recorder.packed, recorder.unpacked) == ([(3,)], [(3,)] * 2)


def test_an_input_that_hooks_have_copied_may_change_afterwards(engine, same):
    """Rule 4: the replay starts from the copy, which is what forward saw."""
    x, other = torch.randn(3, requires_grad=True), torch.randn(3)
    want = torch.autograd.grad((x * other).sin().sum(), x)
    with Recorder().hooks():
        out = engine.checkpoint(lambda a, b: (a * b).sin(), x, other)
    other.add_(1)
    same(torch.autograd.grad(out.sum(), x), want)


@pytest.mark.only("hooks", because="calls of the other engine do not nest")
@pytest.mark.parametrize("pin", [False, True])
def test_save_on_cpu_around_chained_and_nested_calls(same_grads, pin):
    """Rule 1: offloading what crosses the borders."""
    if pin and not torch.accelerator.is_available():
        pytest.skip("pinned memory needs an accelerator")

    def program(call):
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        with save_on_cpu(pin_memory=pin):
            h = call(lambda t: torch.tanh(t @ w), x)
            h = call(lambda t: call(lambda u: (u @ w).sin(), t.exp()).cos(), h).sigmoid()
        h.sum().backward()
        return x.grad, w.grad

    same_grads(program)


def test_hooks_around_one_of_two_calls(same_grads):
    """Rule 1: the hooks that count are those of forward; backward's do not matter."""

    def program(call):
        x = torch.randn(3, requires_grad=True)
        with save_on_cpu():
            h = call(lambda t: t.sin().exp(), x)
        h = call(lambda t: t.cos().tanh(), h)
        with Recorder().hooks():
            h.sum().backward()
        return x.grad

    same_grads(program)


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
@pytest.mark.parametrize("early_stop", [True, False])
def test_hooks_inside_the_function_see_what_they_surround_in_both_runs(engine, same, early_stop):
    """Rule 1: the innermost hooks win; those tensors are the user's, the rest is regrown."""
    recorder = Recorder()
    x = torch.randn(3, requires_grad=True)

    def region(t):
        with recorder.hooks():
            h = t.sin().exp()
        return h.cos().tanh()

    engine.checkpoint(region, x, early_stop=early_stop).sum().backward()
    assert recorder.packed == [(3,)] * 4
    assert recorder.unpacked == [(3,)] * 2
    same(x.grad, torch.autograd.grad(x.sin().exp().cos().tanh().sum(), x)[0])


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
def test_where_hooks_are_forbidden_the_call_says_so(engine):
    """Rule 2: autograd's own word, before anything runs."""
    ran = []
    x = torch.randn(3, requires_grad=True)
    with disable_saved_tensors_hooks("no hooks here"), pytest.raises(RuntimeError, match="no hooks here"):
        engine.checkpoint(lambda t: ran.append(1) or t.sin(), x)
    assert ran == []


def handed_through():
    """Hooks that copy nothing."""
    return saved_tensors_hooks(lambda tensor: {"it": (tensor,)}, lambda packed: packed["it"][0])


@pytest.mark.parametrize("hooks", [save_on_cpu, handed_through])
@pytest.mark.parametrize("change", [lambda t: t.mul_(2), lambda t: t.detach().view(-1)[:1].zero_()])
def test_an_input_that_hooks_have_not_copied_may_not_change(engine, hooks, change):
    """Rule 4: on the CPU save_on_cpu keeps the tensor itself, so the replay would start from the new values."""
    x, other = torch.randn(3, requires_grad=True), torch.randn(3)
    with hooks():
        out = engine.checkpoint(lambda a, b: (a * b).sin(), x, b=other)
    change(other)
    with pytest.raises(InputChangedError) as refused:
        out.sum().backward()
    assert (refused.value.names, x.grad) == (["b"], None)


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
@pytest.mark.parametrize("hooks", [save_on_cpu, handed_through])
def test_an_input_that_the_function_overwrites_under_hooks_is_refused(engine, hooks):
    """Rule 4: and is let go, as without hooks."""
    x = torch.randn(3, requires_grad=True)
    with hooks():
        out = engine.checkpoint(lambda t: t.mul_(2).sin(), x * 1)
    with pytest.raises(InputChangedError):
        out.sum().backward()


@pytest.mark.only("hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares")
@pytest.mark.parametrize("hooks", [save_on_cpu, handed_through])
def test_a_kept_result_that_the_caller_overwrites_under_hooks(engine, hooks):
    """Rule 16: the hooks copied nothing, so the operator runs again."""
    x, y = (torch.linspace(-1, 1, 9).view(3, 3).requires_grad_() for _ in range(2))
    w, made = torch.randn(3, 3), []

    def function(x):
        made.append(x @ w)
        return made[-1].sin().exp()

    function(x).sum().backward()
    with hooks():
        out = engine.checkpoint(function, y, policy_fn=lambda ctx, op, *a, **k: op is torch.ops.aten.mm.default)
    made[1].detach().zero_()
    out.sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=0, atol=0)


@pytest.mark.parametrize("hooks", [save_on_cpu, handed_through])
def test_inference_tensors_may_be_inputs(same_grads, hooks):
    """Rule 1: they have no version; the call holds a copy."""

    def program(call):
        with torch.inference_mode():
            shift = torch.ones(3)
        x = torch.randn(3, requires_grad=True)
        with hooks():
            out = call(lambda t, s: (t + s).sin(), x, shift)
        with torch.inference_mode():
            shift.mul_(5)
        out.sum().backward()
        return x.grad

    same_grads(program)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("place", [lambda x: x, lambda x: x * 1], ids=["leaf", "result"])
def test_a_hook_that_the_function_puts_on_its_input_fires_once(engine, same_grads, place, early_stop):
    """Rule 3: the one that forward put there; a replay takes its own away. Torch's checkpoint runs both."""
    fired = []

    def program(call):
        fired.clear()
        x = torch.randn(3, requires_grad=True)

        def function(h):
            h.register_hook(lambda grad: (fired.append("gradient"), grad * 3)[1])
            if h.is_leaf:
                h.register_post_accumulate_grad_hook(lambda leaf: fired.append("accumulated"))
            return h.sin().exp()

        h = place(x)
        h.register_hook(lambda grad: (fired.append("outside"), grad * 2)[1])
        call(function, h).sum().backward()
        return x.grad, list(fired)

    same_grads(program, **({} if engine.use_reentrant else {"early_stop": early_stop}))


def test_a_hook_on_an_input_stays_off_if_the_replay_fails(engine):
    """Rule 3: what it put there by then is taken away, and a second backward is right."""
    fail = []

    def function(h):
        h.register_hook(lambda grad: grad * 3)
        if fail:
            raise KeyError("replay")
        return h.sin().exp()

    x = torch.randn(3, requires_grad=True)
    h = x * 1
    session = "kept"  # in which the reentrant engine's call survives
    with regrow.recompute_session_ctx(session, retain_on_unpack=True):
        out = engine.checkpoint(function, h)
        fail.append(True)
        with pytest.raises(KeyError):
            out.sum().backward(retain_graph=True)
        fail.clear()
        out.sum().backward()
    regrow.clear_recompute_session(session)
    assert torch.equal(x.grad, torch.autograd.grad((x.sin().exp()).sum(), x)[0] * 3)


@pytest.mark.parametrize("where", ["parameter", "captured"])
def test_a_hook_that_the_function_puts_on_what_it_reaches_fires_once(same_grads, where):
    """Rule 3: on a parameter of the module, or on a tensor that it captures."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            self.weight.register_hook(lambda grad: grad * 2)
            return (x * self.weight).sin()

    def program(call):
        x, w, module = torch.randn(3, requires_grad=True), torch.ones(3, requires_grad=True), Scaled()

        def function(t):
            w.register_hook(lambda grad: grad * 2)
            return (t * w).sin()

        call(module if where == "parameter" else function, x).sum().backward()
        return x.grad, w.grad, module.weight.grad

    same_grads(program)


@pytest.mark.only("hooks", because="inputs of the other engine's replays are tensors of their own")
def test_a_hook_that_is_replaced_at_every_call_stays_one(same_grads):
    """Rule 3: the function takes away the hook of its last run, in the replay as well, and puts on another."""

    def program(call):
        known = {}

        def function(t):
            if "hook" in known:
                known["hook"].remove()
            known["hook"] = t.register_hook(lambda grad: grad * 2)
            return t.sin().exp()

        x = torch.randn(3, requires_grad=True)
        for _ in range(3):
            call(function, x).sum().backward()
        return x.grad, len(x._backward_hooks)

    same_grads(program)


def test_a_hook_that_the_replay_takes_away_is_forwards_still(same_grads):
    """Rule 3: the hook is there for backward, as without a checkpoint, though the function would remove it by then."""

    def program(call):
        known = []

        def function(t):
            if known:
                known.pop().remove()
            else:
                known.append(t.register_hook(lambda grad: grad * 2))
            return t.sin().exp()

        x = torch.randn(3, requires_grad=True)
        call(function, x * 1).sum().backward()
        return x.grad

    same_grads(program)
