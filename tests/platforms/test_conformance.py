"""The conformance suite: written against Platform, run on every framework that is installed.

The oracle is the framework's own backward of the plain function. Replays are counted in the function.
"""

import threading

import numpy as np
import pytest

import regrow
from regrow.errors import RegrowError


def collected(on, function, *args, **kwargs):
    with on.platform.recompute_handle_collector_ctx() as handles:
        output = on.platform.checkpoint(function, *args, **kwargs)
    return output, handles[0]


def read(on, output, inputs, session_id="s", *, retain=True, keep=True):
    with on.platform.recompute_session_ctx(session_id, retain_on_unpack=retain):
        return on.gradients(output, inputs, keep=keep)


@pytest.fixture(autouse=True)
def cleared(on):
    """No session outlives its test."""
    yield
    for session_id in ("s", "other"):
        on.platform.clear_recompute_session(session_id)


def fail_in_run(block, number, error=ZeroDivisionError):
    def fail(runs):
        if runs == number:
            raise error("on purpose")

    block.halfway = fail


class TestTheCall:
    def test_values_and_gradients_are_those_of_the_plain_call(self, on, block, x, equal):
        """Rule 1: forward runs once, backward replays once."""
        output = on.platform.checkpoint(block, x)
        assert equal([on.array(output)], [on.array(block.plain(x))])
        assert equal(on.gradients(output, [x, *block.weights]), block.gradients(x))
        assert block.runs == 2

    def test_every_plain_backward_replays_for_itself(self, on, block, x, equal):
        """Rule 6: without a session two backwards make two replays."""
        output = on.platform.checkpoint(block, x)
        grads = [*on.gradients(output, [x]), *on.gradients(output, block.weights)]
        assert equal(grads, block.gradients(x))
        assert block.replays == 2

    def test_where_nothing_is_recorded_the_call_is_plain(self, on, block, x):
        """Rule 2: no handle, one run."""
        with on.not_recording(), on.platform.recompute_handle_collector_ctx() as handles:
            on.platform.checkpoint(block, x)
        assert (block.runs, handles) == (1, [])

    def test_where_nothing_needs_a_gradient_there_is_no_handle(self, on, x):
        """Rule 2: constants leave no frame."""
        with on.platform.recompute_handle_collector_ctx() as handles:
            on.platform.checkpoint(on.sin, on.constant(on.array(x)))
        assert handles == []

    def test_a_call_that_saves_nothing_has_a_handle_that_does_nothing(self, on, x):
        """Rule 2, rule 21: its backward needs no saved tensor; firing it is allowed and replays nothing."""
        runs = []

        def add(t):
            runs.append(1)
            return t + 1.0

        output, handle = collected(on, add, x)
        on.platform.recompute_handle(handle, "s")
        assert len(runs) == 1
        assert (on.gradients(output, [x])[0] == 1).all()

    def test_keywords_and_containers_carry_tensors(self, on, block, x, equal):
        """Rule 1, rule 3: gradients reach tensors anywhere, and a replay sees containers as forward saw them."""
        scale = on.tensor(np.full((4, 4), 0.5, np.float32))

        def function(first, *, more, factor=1.0):
            return block(on.matmul(first, more["scale"][0])) * factor

        more = {"scale": [scale]}
        output = on.platform.checkpoint(function, x, more=more, factor=2.0)
        more["scale"][0] = None
        plain = block.plain(on.matmul(x, scale)) * 2.0
        assert equal(on.gradients(output, [x, scale]), on.gradients(plain, [x, scale]))

    def test_several_outputs(self, on, block, x, equal):
        """Rule 1: a tuple of outputs, of which one is used."""
        first, _ = on.platform.checkpoint(lambda t: (block(t), on.exp(t)), x)
        assert equal(on.gradients(first, [x]), on.gradients(block.plain(x), [x]))

    def test_the_decorator(self, on, block, x, equal):
        """Rule 1: without a positional argument it is a decorator."""

        @on.platform.checkpoint(early_stop=False)
        def function(t):
            return block(t)

        assert equal(on.gradients(function(x), [x]), block.gradients(x)[:1])
        assert (block.replays, block.tails, function.__name__) == (1, 2, "function")

    def test_the_function_can_tell(self, on, x):
        """Rule 18: False in forward and around it, True in a replay, lazy and fired."""
        told = []

        def function(t):
            told.append(regrow.is_recomputing())
            return on.exp(on.sin(t))

        output, handle = collected(on, function, x)
        on.platform.recompute_handle(handle, "s")
        on.gradients(output, [x])
        told.append(regrow.is_recomputing())
        assert told == [False, True, True, False]

    def test_contexts_surround_forward_and_replay(self, on, block, x):
        """Rule 3: context_fn gives one context for forward and one for replays."""
        entered = []

        class Noted:
            def __init__(self, name):
                self.name = name

            def __enter__(self):
                entered.append(self.name)

            def __exit__(self, *error):
                entered.append(f"end of {self.name}")

        output = on.platform.checkpoint(block, x, context_fn=lambda: (Noted("forward"), Noted("replay")))
        on.gradients(output, [x])
        assert entered == ["forward", "end of forward", "replay", "end of replay"]

    def test_a_context_that_swallows_an_exception_is_named(self, on, x):
        """Rule 19: there is no output to return."""

        class Swallow:
            def __enter__(self):
                pass

            def __exit__(self, *error):
                return True

        with pytest.raises(RegrowError, match="suppressed an exception"):
            on.platform.checkpoint(lambda t: t.nothing, x, context_fn=lambda: (Swallow(), Swallow()))

    def test_nested_calls(self, on, make_block, x, equal):
        """Rule 15: an outer call around two inner ones; gradients are those of the plain calls."""
        first, second = make_block(1), make_block(2)
        outer_runs = []

        def outer(t):
            outer_runs.append(1)
            return on.platform.checkpoint(second, on.platform.checkpoint(first, t))

        plain = on.gradients(second.plain(first.plain(x)), [x, *first.weights, *second.weights])
        output = on.platform.checkpoint(outer, x)
        assert equal(on.gradients(output, [x, *first.weights, *second.weights]), plain)
        assert (len(outer_runs), first.runs, second.runs) == (2, 3, 2)


class TestCollecting:
    def test_handles_come_in_forward_order(self, on, make_block, x):
        """Rule 21: one handle per call; firing one runs its function alone."""
        blocks = [make_block(seed) for seed in range(3)]
        output = x
        with on.platform.recompute_handle_collector_ctx() as handles:
            for each in blocks:
                output = on.platform.checkpoint(each, output)
        on.platform.recompute_handle(handles[1], "s")
        assert (len(handles), [each.replays for each in blocks]) == (3, [0, 1, 0])
        assert on.array(output).shape == (4, 4)

    def test_the_innermost_collector_collects(self, on, block, x):
        """Rule 21: collectors nest."""
        with on.platform.recompute_handle_collector_ctx() as outer:
            with on.platform.recompute_handle_collector_ctx() as inner:
                first = on.platform.checkpoint(block, x)
            second = on.platform.checkpoint(block, x)
        third = on.platform.checkpoint(block, x)
        assert (len(outer), len(inner), len([first, second, third])) == (1, 1, 3)

    def test_outer_before_inner_and_none_by_a_replay(self, on, block, x):
        """Rule 21: a call inside a call has a handle of its own; the replay's has none."""
        with on.platform.recompute_handle_collector_ctx() as handles:
            output = on.platform.checkpoint(lambda t: on.exp(on.platform.checkpoint(block, t)), x)
            on.gradients(output, [x])
        assert [repr(handle) for handle in handles] == [repr(handles[0]), "<handle of Block>"]

    def test_a_call_whose_forward_raises_is_taken_out(self, on, block, x):
        """Rule 21: and the call after it works."""
        fail_in_run(block, 1)
        with on.platform.recompute_handle_collector_ctx() as handles:
            with pytest.raises(ZeroDivisionError):
                on.platform.checkpoint(block, x)
            output = on.platform.checkpoint(block, x)
        assert len(handles) == 1
        assert on.array(output).shape == (4, 4)

    def test_a_handle_keeps_no_graph_alive(self, on, block, x):
        """Rule 12: firing it then is a RuntimeError that says so."""
        output, handle = collected(on, block, x)
        del output
        on.settle()
        with pytest.raises(RuntimeError, match=r"Block.*died"):
            on.platform.recompute_handle(handle, "s")
        assert block.replays == 0

    def test_a_handle_dies_with_the_backward_that_frees_the_graph(self, on, block, x):
        """Rule 12: there is nothing left to regrow, although the output is alive."""
        output, handle = collected(on, block, x)
        on.gradients(output, [x], keep=False)
        on.settle()
        with pytest.raises(RuntimeError, match=r"Block.*died"):
            on.platform.recompute_handle(handle, "s")
        assert (block.replays, on.array(output).shape) == (1, (4, 4))


class TestSessions:
    def test_prefire_dx_and_dw_share_one_replay(self, on, block, x, equal):
        """Rule 9, rule 32: forward and one replay, in the prefire; dx reads and keeps, dw reads and lets go."""
        output, handle = collected(on, block, x)
        counts = [block.runs]
        on.platform.recompute_handle(handle, "s")
        counts.append(block.runs)
        dx = read(on, output, [x])
        counts.append(block.runs)
        dw = read(on, output, block.weights, retain=False, keep=False)
        on.platform.clear_recompute_session("s")
        counts.append(block.runs)
        assert equal([*dx, *dw], block.gradients(x))
        assert counts == [1, 2, 2, 2]

    def test_without_a_prefire_the_first_pass_replays(self, on, block, x, equal):
        """Rule 9: a call made in the session is replayed by dx, and dw reads the same replay."""
        with on.platform.recompute_session_ctx("s", retain_on_unpack=True):
            output = on.platform.checkpoint(block, x)
        assert block.runs == 1
        dx = read(on, output, [x])
        assert block.runs == 2
        assert equal([*dx, *read(on, output, block.weights, retain=False)], block.gradients(x))
        assert block.runs == 2

    def test_a_second_prefire_does_nothing(self, on, block, x):
        """Rule 9: for the same session."""
        output, handle = collected(on, block, x)
        for _ in range(3):
            on.platform.recompute_handle(handle, "s")
        assert (block.replays, on.array(output).shape) == (1, (4, 4))

    def test_retained_reads_may_be_repeated(self, on, block, x, equal):
        """Rule 9: any number of passes in retaining contexts, and a last one that lets go."""
        output, handle = collected(on, block, x)
        on.platform.recompute_handle(handle, "s")
        for _ in range(3):
            assert equal(read(on, output, [x]), block.gradients(x)[:1])
        assert equal(read(on, output, [x, *block.weights], retain=False), block.gradients(x))
        assert block.replays == 1

    def test_what_was_let_go_is_replayed_once_more(self, on, block, x, equal):
        """Rule 14: a pass after the last one is right, at the price of one replay, which is counted."""
        output, handle = collected(on, block, x)
        on.platform.recompute_handle(handle, "s")
        read(on, output, [x, *block.weights], retain=False)
        assert equal(read(on, output, [x, *block.weights], retain=False), block.gradients(x))
        assert block.replays == 2

    def test_prefire_inside_a_retaining_context(self, on, block, x, equal):
        """Rule 10: the same session may be open."""
        output, handle = collected(on, block, x)
        with on.platform.recompute_session_ctx("s", retain_on_unpack=True):
            on.platform.recompute_handle(handle, "s")
            grads = on.gradients(output, [x, *block.weights])
        assert equal(grads, block.gradients(x))
        assert block.replays == 1

    def test_prefire_where_nothing_is_recorded(self, on, block, x, equal):
        """Rule 3: gradients are enabled in the replay, wherever it is started."""
        output, handle = collected(on, block, x)
        with on.not_recording():
            on.platform.recompute_handle(handle, "s")
        assert equal(read(on, output, [x, *block.weights]), block.gradients(x))
        assert block.replays == 1

    def test_two_calls_in_one_session(self, on, make_block, x, equal):
        """Rule 9: fired in either order, each is replayed once."""
        first, second = make_block(1), make_block(2)
        targets = [x, *first.weights, *second.weights]
        plain = on.gradients(second.plain(first.plain(x)), targets)
        with on.platform.recompute_handle_collector_ctx() as handles:
            output = on.platform.checkpoint(second, on.platform.checkpoint(first, x))
        for handle in reversed(handles):
            on.platform.recompute_handle(handle, "s")
        dx = read(on, output, [x])
        dw = read(on, output, targets[1:], retain=False)
        assert equal([*dx, *dw], plain)
        assert (first.replays, second.replays) == (1, 1)

    def test_repeated_iterations_reuse_an_id(self, on, block, x, equal):
        """Rule 8, rule 11: after clear the id serves the next iteration."""
        for step in range(4):
            output, handle = collected(on, block, x)
            on.platform.recompute_handle(handle, "s")
            grads = [*read(on, output, [x]), *read(on, output, block.weights, retain=False, keep=False)]
            on.platform.clear_recompute_session("s")
            assert equal(grads, block.gradients(x))
            assert block.runs == 2 * (step + 1)

    def test_micro_batches_do_not_see_each_other(self, on, block, x, equal):
        """Rule 8: two calls of one function under two sessions, interleaved."""
        other_x = on.tensor(on.array(x) * 2)
        (one, first), (two, second) = collected(on, block, x), collected(on, block, other_x)
        on.platform.recompute_handle(first, "s")
        on.platform.recompute_handle(second, "other")
        dx = [*read(on, two, [other_x], "other"), *read(on, one, [x])]
        on.platform.clear_recompute_session("s")
        dw = read(on, two, block.weights, "other", retain=False)
        assert equal([*dx, *dw], [block.gradients(other_x)[0], block.gradients(x)[0], *block.gradients(other_x)[1:]])
        assert block.runs == 4

    def test_an_id_may_be_a_number(self, on, block, x, equal):
        """Rule 8: a session is never taken for a plain backward, whatever a framework counts backwards with."""
        for number in range(12):
            output, handle = collected(on, block, x)
            on.platform.recompute_handle(handle, number)
            before = block.runs
            assert equal(on.gradients(output, [x]), block.gradients(x)[:1])
            assert block.runs == before + 1
            on.platform.clear_recompute_session(number)

    def test_a_plain_backward_replays_for_itself_and_evicts_nothing(self, on, block, x, equal):
        """Rule 9: while a session holds values."""
        output, handle = collected(on, block, x)
        on.platform.recompute_handle(handle, "s")
        assert equal(on.gradients(output, [x]), block.gradients(x)[:1])
        assert block.replays == 2
        assert equal(read(on, output, [x, *block.weights]), block.gradients(x))
        assert block.replays == 2

    def test_clear_may_be_repeated_and_a_plain_backward_works_after_it(self, on, block, x, equal):
        """Rule 11: read or not; unknown ids do nothing."""
        output, handle = collected(on, block, x)
        on.platform.recompute_handle(handle, "s")
        read(on, output, [x], retain=False)
        for _ in range(2):
            on.platform.clear_recompute_session("s")
        on.platform.clear_recompute_session(("never", "seen"))
        assert equal(on.gradients(output, [x, *block.weights]), block.gradients(x))
        assert block.replays == 2

    def test_another_session_serves_after_clear(self, on, block, x, equal):
        """Rule 8: the call is free again."""
        output, handle = collected(on, block, x)
        on.platform.recompute_handle(handle, "s")
        on.platform.clear_recompute_session("s")
        on.platform.recompute_handle(handle, "other")
        assert equal(read(on, output, [x, *block.weights], "other"), block.gradients(x))
        assert block.replays == 2

    def test_nested_calls_share_their_replays(self, on, make_block, x, equal):
        """Rule 15: in a session, too: the outer twice, the inner ones three times and twice."""
        first, second = make_block(1), make_block(2)
        outer_runs = []

        def outer(t):
            outer_runs.append(1)
            return on.platform.checkpoint(second, on.platform.checkpoint(first, t))

        targets = [x, *first.weights, *second.weights]
        plain = on.gradients(second.plain(first.plain(x)), targets)
        with on.platform.recompute_handle_collector_ctx() as handles:
            output = on.platform.checkpoint(outer, x)
        for handle in handles:
            on.platform.recompute_handle(handle, "s")
        assert equal([*read(on, output, [x]), *read(on, output, targets[1:])], plain)
        assert (len(handles), len(outer_runs), first.runs, second.runs) == (3, 2, 3, 2)

    def test_contexts_nest_with_the_same_id_and_the_inner_one_counts(self, on, block, x, equal):
        """Rule 10: a retaining context inside one that lets go."""
        output, handle = collected(on, block, x)
        on.platform.recompute_handle(handle, "s")
        with on.platform.recompute_session_ctx("s", retain_on_unpack=False):
            dx = read(on, output, [x])
            dw = on.gradients(output, block.weights)
        assert equal([*dx, *dw], block.gradients(x))
        assert block.replays == 1

    def test_a_context_may_decorate_a_function(self, on, block, x, equal):
        """Rule 10: each call has a context of its own."""
        output, handle = collected(on, block, x)
        on.platform.recompute_handle(handle, "s")
        reads = on.platform.recompute_session_ctx("s", retain_on_unpack=True)(on.gradients)
        assert equal([*reads(output, [x]), *reads(output, block.weights)], block.gradients(x))
        assert block.replays == 1

    def test_a_replay_may_be_fired_from_another_thread(self, on, block, x, equal):
        """Rule 9: the scheduler may have a thread of its own."""
        output, handle = collected(on, block, x)
        thread = threading.Thread(target=on.platform.recompute_handle, args=(handle, "s"))
        thread.start()
        thread.join()
        assert equal(read(on, output, [x, *block.weights]), block.gradients(x))
        assert block.replays == 1


class TestBusyCalls:
    def test_a_prefire_for_another_session_is_refused_and_changes_nothing(self, on, block, x, equal):
        """Rule 8: the error names both sessions, the first stays intact."""
        output, handle = collected(on, block, x)
        on.platform.recompute_handle(handle, "s")
        with pytest.raises(RegrowError, match="clear_recompute_session") as caught:
            on.platform.recompute_handle(handle, "other")
        error = caught.value
        assert (type(error).__name__, error.label, error.owner, error.wanted) == (
            "FrameBusyError",
            "Block",
            "s",
            "other",
        )
        assert equal(read(on, output, [x, *block.weights]), block.gradients(x))
        assert block.replays == 1

    def test_a_context_of_another_session_is_refused(self, on, block, x, equal):
        """Rule 8: backward inside it raises, the first session stays intact."""
        output, handle = collected(on, block, x)
        on.platform.recompute_handle(handle, "s")
        with pytest.raises(RegrowError, match="clear_recompute_session"):
            read(on, output, [x], "other")
        assert equal(read(on, output, [x, *block.weights]), block.gradients(x))
        assert block.replays == 1


class TestFailures:
    @pytest.mark.parametrize("next_id", ["s", "other"])
    def test_a_prefire_that_raises_leaves_the_call_free(self, on, block, x, equal, next_id):
        """Rule 11: the error passes through; the same session or another may try again."""
        output, handle = collected(on, block, x)
        fail_in_run(block, 2)
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            on.platform.recompute_handle(handle, "s")
        assert not regrow.is_recomputing()
        on.platform.recompute_handle(handle, next_id)
        grads = [*read(on, output, [x], next_id), *read(on, output, block.weights, next_id, retain=False)]
        assert equal(grads, block.gradients(x))
        assert block.replays == 2

    def test_a_lazy_replay_that_raises_can_be_repeated_in_the_session(self, on, block, x, equal):
        """Rule 11: nothing half filled is read."""
        with on.platform.recompute_session_ctx("s", retain_on_unpack=True):
            output = on.platform.checkpoint(block, x)
        fail_in_run(block, 2)
        with pytest.raises(ZeroDivisionError):
            read(on, output, [x])
        assert equal([*read(on, output, [x]), *read(on, output, block.weights)], block.gradients(x))
        assert block.replays == 2

    def test_a_plain_backward_that_raises_can_be_repeated(self, on, block, x, equal):
        """Rule 6, rule 11: outside sessions as well."""
        output = on.platform.checkpoint(block, x)
        fail_in_run(block, 2)
        with pytest.raises(ZeroDivisionError):
            on.gradients(output, [x])
        assert equal(on.gradients(output, [x, *block.weights]), block.gradients(x))

    def test_after_a_failure_and_clear_a_plain_backward_works(self, on, block, x, equal):
        """Rule 11: as the four verbs are used, with clear in finally."""
        output, handle = collected(on, block, x)
        fail_in_run(block, 2)
        try:
            with pytest.raises(ZeroDivisionError):
                on.platform.recompute_handle(handle, "s")
        finally:
            on.platform.clear_recompute_session("s")
        assert equal(on.gradients(output, [x, *block.weights]), block.gradients(x))

    def test_a_replay_that_saves_fewer_tensors_is_refused(self, on, x):
        """Rule 4: with both numbers, and nothing is kept."""
        runs = []

        def function(t):
            runs.append(1)
            return on.exp(on.sin(t)) if len(runs) != 2 else on.sin(t)

        output, handle = collected(on, function, x, early_stop=False)
        with pytest.raises(RegrowError, match=r"forward saved \d+ tensors, the replay saved") as caught:
            on.platform.recompute_handle(handle, "s")
        assert type(caught.value).__name__ == "ReplayMismatchError"
        assert caught.value.replay < caught.value.forward
        on.platform.recompute_handle(handle, "other")
        assert np.isfinite(read(on, output, [x], "other")[0]).all()

    def test_a_replay_that_saves_more_tensors_is_refused(self, on, x):
        """Rule 4: where it runs to its end."""
        runs = []

        def function(t):
            runs.append(1)
            return on.sin(t) if len(runs) == 1 else on.exp(on.sin(t))

        output, handle = collected(on, function, x, early_stop=False)
        with pytest.raises(RegrowError, match="the replay saved") as caught:
            on.platform.recompute_handle(handle, "s")
        assert caught.value.replay > caught.value.forward
        assert on.array(output).shape == (4, 4)

    def test_an_input_that_was_overwritten_is_refused(self, on, block, x):
        """Rule 4: the error names the argument; nothing is replayed."""
        scale = on.constant(np.ones((4, 4), np.float32))
        output, handle = collected(on, lambda t, scale: block(on.matmul(t, scale)), x, scale=scale)
        on.overwrite(scale)
        with pytest.raises(RegrowError, match="changed in place") as caught:
            on.platform.recompute_handle(handle, "s")
        assert (type(caught.value).__name__, caught.value.names, block.replays) == ("InputChangedError", ["scale"], 0)
        assert on.array(output).shape == (4, 4)


class TestEarlyStop:
    def test_it_ends_the_replay_behind_the_last_saved_tensor(self, on, block, x, equal):
        """Rule 5: code behind it does not run again."""
        output = on.platform.checkpoint(block, x)
        assert equal(on.gradients(output, [x, *block.weights]), block.gradients(x))
        assert (block.runs, block.tails) == (2, 1)

    def test_without_it_the_whole_function_runs_again(self, on, block, x, equal):
        """Rule 5: per call."""
        output = on.platform.checkpoint(block, x, early_stop=False)
        assert equal(on.gradients(output, [x, *block.weights]), block.gradients(x))
        assert (block.runs, block.tails) == (2, 2)


class TestRandomNumbers:
    @pytest.mark.parametrize("early_stop", [True, False])
    def test_a_prefire_draws_what_forward_drew_and_moves_nothing(self, on, block, x, equal, early_stop):
        """Rule 3: dropout in the replay is that of forward; the caller's next numbers are what they would have been."""

        def function(t):
            return block(on.dropout(t))

        def plain(t):
            return block.plain(on.dropout(t))

        on.seed(7)
        expected = plain(x)
        next_numbers = on.draw()
        expected_grads = on.gradients(expected, [x, *block.weights])
        on.seed(7)
        output, handle = collected(on, function, x, early_stop=early_stop)
        on.platform.recompute_handle(handle, "s")
        assert equal([on.draw()], [next_numbers])
        grads = [*read(on, output, [x]), *read(on, output, block.weights, retain=False)]
        assert equal([on.array(output), *grads], [on.array(expected), *expected_grads])
        assert block.replays == 1

    def test_a_lazy_replay_moves_nothing(self, on, x, equal):
        """Rule 3: backward draws no numbers of the caller's."""
        on.seed(7)
        output = on.platform.checkpoint(lambda t: on.exp(on.dropout(t)), x)
        next_numbers = on.draw()
        on.seed(7)
        again = on.platform.checkpoint(lambda t: on.exp(on.dropout(t)), x)
        on.gradients(again, [x])
        assert equal([on.draw()], [next_numbers])
        assert equal([on.array(output)], [on.array(again)])

    def test_a_replay_that_raises_moves_nothing(self, on, x, equal):
        """Rule 3: the caller's numbers are the same also when it fails."""

        def function(t):
            noise = on.dropout(t)
            if regrow.is_recomputing():
                raise ZeroDivisionError
            return on.exp(noise)

        on.seed(7)
        on.dropout(x)
        next_numbers = on.draw()
        on.seed(7)
        output, handle = collected(on, function, x)
        with pytest.raises(ZeroDivisionError):
            on.platform.recompute_handle(handle, "s")
        assert equal([on.draw()], [next_numbers])
        assert on.array(output).shape == (4, 4)

    def test_without_preserving_a_replay_draws_anew(self, on, x):
        """Rule 3: preserve_rng_state=False leaves the numbers alone."""
        drawn = []

        def function(t):
            drawn.append(on.array(on.dropout(on.constant(np.ones((32, 32), np.float32)))))
            return on.exp(on.sin(t))

        output = on.platform.checkpoint(function, x, preserve_rng_state=False)
        on.gradients(output, [x])
        assert len(drawn) == 2
        assert not np.array_equal(*drawn)


class TestWrappers:
    def test_a_wrapped_module_checkpoints_each_call(self, on, block, x, equal):
        """Rule 17: it stays the same object, with the same names."""
        module = on.module(block, inner=block.inner, outer=block.outer)
        names, cls = on.names(module), type(module)
        wrapped = on.platform.checkpoint_wrapper(module, early_stop=False)
        assert wrapped is module
        assert isinstance(module, cls)
        assert on.names(module) == names
        assert len(names) == 2
        assert equal(on.gradients(module(x), [x, *block.weights]), block.gradients(x))
        assert (block.runs, block.tails) == (2, 2)

    def test_a_wrapped_module_has_a_handle_per_call(self, on, block, x, equal):
        """Rule 21: as any checkpointed call."""
        module = on.platform.checkpoint_wrapper(on.module(block, inner=block.inner, outer=block.outer))
        with on.platform.recompute_handle_collector_ctx() as handles:
            output = module(x)
        on.platform.recompute_handle(handles[0], "s")
        assert equal(read(on, output, [x, *block.weights]), block.gradients(x))
        assert (len(handles), block.replays) == (1, 1)

    def test_a_wrapped_function_keeps_its_name(self, on, block, x):
        """Rule 17: and its calls are checkpointed."""

        def function(t):
            return block(t)

        wrapped = on.platform.checkpoint_wrapper(function)
        on.gradients(wrapped(x), [x])
        assert (wrapped.__name__, block.replays) == ("function", 1)

    @pytest.mark.parametrize(
        ("wrap", "says"),
        [
            (lambda on: on.platform.checkpoint_wrapper(3), "module_or_fn must be"),
            (lambda on: on.platform.checkpoint_wrapper(on.sin, nothing=1), "nothing: no option of checkpoint"),
            (lambda on: on.platform.checkpoint_wrapper(on.sin, early_stop=1), "early_stop must be True or False"),
            (
                lambda on: on.platform.checkpoint_wrapper(on.platform.checkpoint_wrapper(on.module(on.sin))),
                "is wrapped already",
            ),
            (lambda on: on.platform.checkpoint_exclude_wrapper(3), "module_or_fn must be"),
            (lambda on: on.platform.checkpoint_exclude_wrapper(on.sin, save_output=1), "save_output must be"),
        ],
    )
    def test_a_bad_argument_is_named(self, on, wrap, says):
        """Rule 19: the same sentences."""
        with pytest.raises(ValueError, match=says):
            wrap(on)


OPTIONS = [
    ({"use_reentrant": None}, "use_reentrant must be True or False"),
    ({"preserve_rng_state": 1}, "preserve_rng_state must be True or False"),
    ({"debug": "yes"}, "debug must be True or False"),
    ({"early_stop": 1}, "early_stop must be True or False"),
    ({"respect_saved_tensors_hooks": 0}, "respect_saved_tensors_hooks must be True or False"),
    ({"context_fn": 3}, "context_fn must be a function"),
    ({"context_fn": list}, "context_fn must return a pair"),
    ({"policy_fn": 3}, "policy_fn must be a function"),
    ({"determinism_check": "strict"}, "determinism_check must be one of 'default', 'none'"),
]


class TestWrongArguments:
    @pytest.mark.parametrize(("options", "says"), OPTIONS, ids=[says for _, says in OPTIONS])
    def test_an_option_is_named_before_anything_runs(self, on, block, x, options, says):
        """Rule 19, rule 32: the same sentences on both."""
        with (
            on.platform.recompute_handle_collector_ctx() as handles,
            pytest.raises(ValueError, match=says),
        ):
            on.platform.checkpoint(block, x, **options)
        assert (block.runs, handles) == (0, [])

    def test_a_function_that_is_none(self, on, x):
        """Rule 19: missing, or not callable."""
        with pytest.raises(ValueError, match="function is missing"):
            on.platform.checkpoint(x=x)
        with pytest.raises(ValueError, match="function must be"):
            on.platform.checkpoint(3, x)

    @pytest.mark.parametrize("bad", [None, [], {}, ("s", []), float("nan")], ids=repr)
    def test_an_id_that_cannot_be_named_again(self, on, block, x, bad):
        """Rule 19: in each verb, before anything is done."""
        output, handle = collected(on, block, x)
        for verb in (
            lambda: on.platform.recompute_handle(handle, bad),
            lambda: on.platform.recompute_session_ctx(bad),
            lambda: on.platform.clear_recompute_session(bad),
        ):
            with pytest.raises(ValueError, match="session_id"):
                verb()
        assert (block.replays, on.array(output).shape) == (0, (4, 4))

    @pytest.mark.parametrize("foreign", [None, "handle", 0, object()], ids=str)
    def test_what_is_no_handle(self, on, foreign):
        """Rule 19: a handle of another platform is none, either."""
        with pytest.raises(ValueError, match="handle must come from recompute_handle_collector_ctx"):
            on.platform.recompute_handle(foreign, "s")

    def test_flags_of_the_verbs(self, on, block, x):
        """Rule 19: True and False."""
        output, handle = collected(on, block, x)
        with pytest.raises(ValueError, match="retain_on_unpack must be True or False"):
            on.platform.recompute_session_ctx("s", retain_on_unpack=1)
        with pytest.raises(ValueError, match="carrier must be True or False"):
            on.platform.recompute_handle(handle, "s", carrier="yes")
        assert on.array(output).shape == (4, 4)

    def test_contexts_of_two_sessions(self, on):
        """Rule 10: nested contexts have one id."""
        with (
            on.platform.recompute_session_ctx("s"),
            pytest.raises(ValueError, match="nest only with the same id"),
            on.platform.recompute_session_ctx("other"),
        ):
            pass

    @pytest.mark.parametrize(
        ("session_id", "retain", "says"),
        [("other", True, "inside a context of the same session"), ("s", False, "which lets values go")],
    )
    def test_a_prefire_in_the_wrong_place(self, on, block, x, session_id, retain, says):
        """Rule 10: not inside another session's context, nor inside one that lets go."""
        output, handle = collected(on, block, x)
        with (
            on.platform.recompute_session_ctx(session_id, retain_on_unpack=retain),
            pytest.raises(ValueError, match=says),
        ):
            on.platform.recompute_handle(handle, "s")
        assert (block.replays, on.array(output).shape) == (0, (4, 4))

    def test_a_prefire_inside_forward(self, on, x):
        """Rule 19: the call has not returned; afterwards it can be fired."""
        said = []

        def function(t):
            if not regrow.is_recomputing():
                with pytest.raises(RuntimeError, match="forward has not returned") as caught:
                    on.platform.recompute_handle(handles[0], "s")
                said.append(caught.value)
            return on.exp(on.sin(t))

        with on.platform.recompute_handle_collector_ctx() as handles:
            output = on.platform.checkpoint(function, x)
        on.platform.recompute_handle(handles[0], "other")
        assert (len(said), on.array(output).shape) == (1, (4, 4))
