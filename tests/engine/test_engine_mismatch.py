"""A replay that is none: it is refused before it gives backward anything, and the message says what differs."""

import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.utils.checkpoint

import regrow
from regrow import CheckpointError, InputChangedError, RegrowError, ReplayMismatchError, ValueChangedError

pytestmark = pytest.mark.only(
    "hooks", because="it speaks of saved tensors, which the other engine neither keeps nor compares"
)


class Switch:
    """A function that another hand can change between forward and replay."""

    def __init__(self, **ways):
        self.ways = ways
        self.way = next(iter(ways))

    def __call__(self, x):
        return self.ways[self.way](x)


def refused(engine, switch, *, shape=(3, 4), **options):
    """The refusal of a replay that goes the second way."""
    x = torch.randn(shape, requires_grad=True)
    out = engine.checkpoint(switch, x, **options)
    switch.way = list(switch.ways)[1]
    with pytest.raises(CheckpointError) as error:
        out.sum().backward()
    assert x.grad is None
    return error.value


DIFFERENCES = {
    "fewer": (Switch(a=lambda x: x.sin().exp().cos(), b=lambda x: x.sin().exp()), (3, 2, ())),
    "none": (Switch(a=lambda x: x.sin(), b=lambda x: x + 1), (1, 0, ())),
    "shape": (Switch(a=lambda x: x.sin().exp(), b=lambda x: x[:2].sin().exp()), (2, 2, (0, 1))),
    "dtype": (Switch(a=lambda x: x.sin().exp(), b=lambda x: x.sin().double().exp()), (2, 2, (1,))),
    "device": (Switch(a=lambda x: x.sin().exp(), b=lambda x: x.to("meta").sin()), (2, 1, (0,))),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_replay_that_saves_other_tensors_is_refused(engine, kind, early_stop):
    """Rule 4: number, shape, type and device, as fields and in words."""
    switch, (forward, replay, indices) = DIFFERENCES[kind]
    switch.way = "a"
    error = refused(engine, switch, early_stop=early_stop)
    assert isinstance(error, ReplayMismatchError)
    assert (error.forward, error.replay, error.indices) == (forward, replay, indices)


def test_a_replay_that_saves_more_is_refused_without_early_stop(engine):
    """Rule 4: with early stop it ends before it could save more, and what it brought back was looked at."""
    switch = Switch(a=lambda x: x.sin(), b=lambda x: x.sin().exp())
    error = refused(engine, switch, early_stop=False)
    assert (error.forward, error.replay) == (1, 2)
    assert "forward saved 1 tensors, the replay saved 2 or more" in str(error)


def test_the_message_names_the_function_both_sides_and_the_usual_causes(engine):
    """Rule 4: where, what with numbers, what to do."""
    error = refused(engine, Switch(a=lambda x: x.sin().exp(), b=lambda x: x[:2].sin().exp()))
    message = str(error)
    assert message.startswith("Switch: 2 of 2 tensors")
    assert "Saved tensor 0: forward (3, 4) float32 cpu, replay (2, 4) float32 cpu." in message
    assert "Saved tensor 1: forward (3, 4) float32 cpu, replay (2, 4) float32 cpu." in message
    assert "Does the function branch on state that changed since forward" in message
    assert "debug=True" in message


def test_many_differences_are_counted_and_three_are_shown(engine):
    """Rule 4: the message stays short, the field has them all."""

    def chain(x):
        for _ in range(9):
            x = x.sin()
        return x

    error = refused(engine, Switch(a=chain, b=lambda x: chain(x[:1])))
    assert error.indices == tuple(range(9))
    assert str(error).count("Saved tensor") == 3
    assert "6 more differ." in str(error)


def test_the_label_is_the_functions_or_the_modules(engine):
    """Rule 4: errors name what was checkpointed as the user would."""

    class Net(torch.nn.Module):
        def forward(self, x):
            return x.sin().exp() if flags[-1] else x.sin()

    flags = [True]
    net, x = Net(), torch.randn(3, requires_grad=True)
    labels = []
    for function in (net, net.forward, lambda t: net(t * 1)):
        out = engine.checkpoint(function, x)
        flags.append(False)
        with pytest.raises(ReplayMismatchError) as error:
            out.sum().backward()
        flags.append(True)
        labels.append(error.value.label)
    here = "test_the_label_is_the_functions_or_the_modules.<locals>."
    assert labels == ["Net", f"{here}Net.forward", f"{here}<lambda>"]
    assert labels[-1] in str(error.value)


@pytest.mark.parametrize("kind", ["shape", "dtype"])
def test_without_the_check_only_the_number_is_looked_at(engine, kind):
    """Rule 4: ``determinism_check="none"`` trusts the function; what goes on from there is the user's."""
    switch, _ = DIFFERENCES[kind]
    switch.way = "a"
    x = torch.randn(3, 4, requires_grad=True)
    out = engine.checkpoint(switch, x, determinism_check="none")
    switch.way = "b"
    seen = []
    try:
        out.sum().backward()
    except CheckpointError as error:
        seen.append(error)
    except RuntimeError:
        pass  # autograd's own word on shapes
    assert seen == []


def test_without_the_check_a_wrong_number_is_still_refused(engine):
    """Rule 4: there is no value for some slots."""
    error = refused(
        engine, Switch(a=lambda x: x.sin().exp(), b=lambda x: x.sin()), determinism_check="none", early_stop=False
    )
    assert (error.forward, error.replay, error.indices) == (2, 1, ())


def test_values_that_differ_in_nothing_but_value_are_not_looked_at(engine):
    """Rule 4: the default check compares what is cheap to compare."""
    scale = [1.0]
    x = torch.ones(3, requires_grad=True)
    out = engine.checkpoint(lambda t: (t * torch.full((3,), scale[0])).sin(), x)
    scale[0] = 2.0
    out.sum().backward()
    assert x.grad is not None


def test_a_refused_backward_can_be_repeated_when_the_function_is_itself_again(engine, same):
    """Rule 11: after the error nothing is left, and the graph works."""
    switch = Switch(a=lambda x: x.sin().exp(), b=lambda x: x.sin())
    x = torch.randn(3, 4, requires_grad=True)
    out = engine.checkpoint(switch, x).sum()
    switch.way = "b"
    for _ in range(2):
        with pytest.raises(ReplayMismatchError):
            out.backward()
    switch.way = "a"
    out.backward()
    same(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_a_refused_replay_holds_no_memory(engine, track, gc_off):
    """Rule 11: what the replay had brought back by then is released."""
    switch = Switch(
        a=lambda x: track(track(x.sin()).exp()).cos(), b=lambda x: track(track(x.sin()).exp())[:1].cos().exp()
    )
    x = torch.randn(3, 4, requires_grad=True)
    out = engine.checkpoint(switch, x).sum()
    switch.way = "b"
    with pytest.raises(ReplayMismatchError):
        out.backward()
    assert track.alive == 0


def test_debug_lists_the_operators_of_both_runs_and_where_they_part(engine):
    """Rule 4: the report has both logs, with the user's lines."""
    switch = Switch(a=lambda x: x.sin().exp().cos(), b=lambda x: x.sin().tanh())
    message = str(refused(engine, switch, debug=True))
    assert "First difference, operator 1: forward aten.exp.default -> (3, 4) float32 cpu at" in message
    assert "; replay aten.tanh.default -> (3, 4) float32 cpu at" in message
    forward, replay = message.split("Operators of the forward:")[1].split("Operators of the replay:")
    assert [line.split(" -> ")[0].strip() for line in forward.strip().splitlines()] == [
        "0: aten.sin.default",
        "1: aten.exp.default",
        "2: aten.cos.default",
    ]
    assert [line.split(" -> ")[0].strip() for line in replay.strip().splitlines()] == [
        "0: aten.sin.default",
        "1: aten.tanh.default",
    ]
    assert all("test_engine_mismatch.py:" in line for line in [*forward.split("\n"), *replay.split("\n")] if line)
    assert "Run once with" not in message


def test_debug_says_when_the_replay_is_only_shorter(engine):
    """Rule 4: the same operators, and then none."""
    message = str(refused(engine, Switch(a=lambda x: x.sin().exp(), b=lambda x: x.sin()), debug=True))
    assert "The replay ran the first 1 of forward's 2 operators, in the same order." in message


def test_debug_composes_with_contexts_and_policies(engine, same):
    """Rule 16: unlike torch's, regrow's ``debug`` goes with a ``context_fn``."""
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    out = engine.checkpoint(
        lambda a, b: (a @ b).sin(),
        x,
        w,
        debug=True,
        context_fn=lambda: (nullcontext(), nullcontext()),
        policy_fn=lambda ctx, op, *args, **kwargs: op is torch.ops.aten.mm.default,
    )
    same(torch.autograd.grad(out.sum(), [x, w]), torch.autograd.grad((x @ w).sin().sum(), [x, w]))


def test_debug_changes_no_gradient(same_grads):
    """Rule 1: the log of operators looks on."""

    def program(call):
        x = torch.randn(3, 4, requires_grad=True)
        loss = call(lambda t: torch.dropout(t.relu() @ t.t(), 0.4, True).softmax(-1), x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad

    same_grads(program, debug=True)


def test_debug_keeps_no_tensor(engine, track, gc_off):
    """Rule 12: the log holds words."""
    x = torch.randn(3, 4, requires_grad=True)
    out = engine.checkpoint(lambda t: track(track(t.sin()).exp()).cos(), x, debug=True)
    assert track.alive == 0
    del out


ERRORS = {
    "CheckpointError": {"label"},
    "FrameBusyError": {"label", "owner", "wanted"},
    "InputChangedError": {"label", "names"},
    "ReplayMismatchError": {"label", "forward", "replay", "indices"},
    "ValueChangedError": {"label", "index"},
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_tree_of_errors(name):
    """Rule 4: every one is regrow's and torch's at once, so code written for torch catches it."""
    error = getattr(regrow, name)
    assert issubclass(error, CheckpointError)
    assert issubclass(error, RegrowError)
    assert issubclass(error, torch.utils.checkpoint.CheckpointError)
    assert issubclass(error, RuntimeError)


def test_fields_and_message_of_a_changed_input(engine):
    """Rule 4: which argument, and how far its version moved."""
    x, other = torch.randn(3, requires_grad=True), torch.randn(3)
    out = engine.checkpoint(lambda a, *, mask: (a * mask).sin(), x, mask=other)
    other.add_(1).mul_(2)
    with pytest.raises(InputChangedError) as error:
        out.sum().backward()
    assert error.value.names == ["mask"]
    assert "mask (version 0 before forward, 2 now)" in str(error.value)
    assert error.value.label in str(error.value)
    assert "Pass a clone" in str(error.value)


def test_several_changed_inputs_are_named_at_once(engine):
    """Rule 4: all faults are gathered, one error is raised."""
    x = torch.randn(3, requires_grad=True)
    a, b = torch.randn(3), torch.randn(3)
    out = engine.checkpoint(
        lambda t, parts, *, last: (t * parts[0] * parts[1]["k"] * last).sin(), x, [a, {"k": a}], last=b
    )
    a.add_(1)
    b.add_(1)
    with pytest.raises(InputChangedError) as error:
        out.sum().backward()
    assert error.value.names == ["argument 1[0]", "argument 1[1]['k']", "last"]


def test_fields_and_message_of_an_overwritten_value(engine):
    """Rule 4: which saved tensor, in the order they were saved."""
    x = torch.randn(3, requires_grad=True)

    def function(t):
        y = t.exp()
        z = y.sin()
        y.mul_(2)
        return z * t

    out = engine.checkpoint(function, x)
    with pytest.raises(ValueChangedError) as error:
        out.sum().backward()
    assert error.value.index == 1
    assert "saved tensor 1 was changed in place" in str(error.value)
    assert error.value.label in str(error.value)


def test_an_exception_of_the_function_in_the_replay_is_the_users_own(engine):
    """Rule 11: no wrapping, no chaining; the type, the message and the traceback are the user's."""
    fail = []

    def function(t):
        if fail:
            raise ZeroDivisionError("in the replay")
        return t.sin()

    x = torch.randn(3, requires_grad=True)
    out = engine.checkpoint(function, x)
    fail.append(True)
    with pytest.raises(ZeroDivisionError, match="in the replay") as error:
        out.sum().backward()
    assert error.traceback[-1].name == "function"


def test_errors_survive_pickling(engine):
    """Rule 4: an error that crosses a process keeps its class, its message and its fields."""
    error = refused(engine, Switch(a=lambda x: x.sin().exp(), b=lambda x: x.sin()))
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))
    assert {name: getattr(copy, name) for name in ERRORS["ReplayMismatchError"]} == {
        name: getattr(error, name) for name in ERRORS["ReplayMismatchError"]
    }
