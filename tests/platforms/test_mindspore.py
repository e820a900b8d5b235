"""What holds on MindSpore alone: what it lacks, where it differs from torch, and what regrow adds to it.

A docstring that says ``Difference:`` shows a row of the table in docs/platforms.md.
"""

import copy
import gc
import weakref
from functools import partial
from importlib import import_module

import numpy as np
import pytest

import regrow
from regrow.errors import RegrowError
from regrow.platform import get_platform
from tests.platforms.adapters import installed
from tests.platforms.test_conformance import collected, read

pytestmark = pytest.mark.skipif(not installed("mindspore"), reason="MindSpore is not installed here")


@pytest.fixture(params=["mindspore"] if installed("mindspore") else [])
def adapter(request):
    """MindSpore alone, also where torch is installed beside it."""
    from tests.platforms.adapters import ADAPTERS

    return ADAPTERS[request.param]()


@pytest.fixture(autouse=True)
def cleared(on):
    """No session outlives its test."""
    yield
    for session_id in ("s", "other"):
        on.platform.clear_recompute_session(session_id)


def record_of(handle):
    """MindSpore's record of a call."""
    return handle._frame().record()


def held(record):
    """How many tensors MindSpore holds for a call."""
    return sum(len(values) for values in record.recomputed_data.values())


class TestWhatIsLacking:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"use_reentrant": True}, r"use_reentrant=True: not on MindSpore.*Leave use_reentrant at False"),
            ({"policy_fn": lambda *_: True}, r"policy_fn: not on MindSpore.*Checkpoint smaller functions"),
            ({"debug": True}, r"debug=True: not on MindSpore.*is_recomputing"),
        ],
    )
    def test_options(self, on, block, x, options, says):
        """Rule 37: named, with another way, before anything runs. Difference: What is not there."""
        with pytest.raises(NotImplementedError, match=says):
            on.platform.checkpoint(block, x, **options)
        with pytest.raises(NotImplementedError, match=says):
            on.platform.checkpoint_wrapper(block, **options)
        assert block.runs == 0

    def test_regions(self, on):
        """Rule 37: no part of a function is left out of a replay."""
        with pytest.raises(NotImplementedError, match=r"checkpoint_exclude_wrapper.*End the checkpointed call before"):
            on.platform.checkpoint_exclude_wrapper(on.sin)

    def test_the_carrier(self, on, block, x):
        """Rule 37: and nothing is replayed."""
        output, handle = collected(on, block, x)
        with pytest.raises(NotImplementedError, match=r"carrier=True.*Leave carrier at False"):
            on.platform.recompute_handle(handle, "s", carrier=True)
        assert (block.replays, on.array(output).shape) == (0, (4, 4))

    def test_graph_mode(self, on, block, x):
        """Rule 37: a call in graph mode is refused. Difference: Compiled code."""
        on.ms.set_context(mode=on.ms.GRAPH_MODE)
        try:
            with pytest.raises(NotImplementedError, match=r"graph mode: not on MindSpore.*PYNATIVE_MODE"):
                on.platform.checkpoint(block, x)
        finally:
            on.ms.set_context(mode=on.ms.PYNATIVE_MODE)
        assert block.runs == 0


MISSING = """
import mindspore
from importlib import import_module
from regrow.platform import get_platform
module = import_module({module!r})
{change}
try:
    get_platform("mindspore")
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("module", "change", "name"),
    [
        ("mindspore.common.recompute", "del module._recompute_session_ctx", "_recompute_session_ctx("),
        ("mindspore.common.recompute", "module._clear_recompute_session = lambda: None", "_clear_recompute_session("),
        ("mindspore.common.recompute", "del module._RecomputeHandle.clear_session", "clear_session("),
        (
            "mindspore.common.recompute",
            "module._RecomputeHandle.__init__ = lambda *_, **__: None",
            "_RecomputeHandle.placeholders",
        ),
        ("mindspore.common.seed", "del module._KERNEL_SEED", "_KERNEL_SEED"),
        (
            "mindspore.graph.api",
            "del type(module._pynative_executor).requires_grad",
            "_pynative_executor.requires_grad",
        ),
    ],
)
def test_a_private_name_that_is_gone_is_named_when_the_platform_is_chosen(in_a_process, module, change, name):
    """Rule 38: with why it is needed, the version that lacks it, and what to install."""
    said = in_a_process(MISSING.format(module=module, change=change)).splitlines()
    lines = [line for line in said if line.startswith("regrow needs")]
    assert len(lines) == 1
    assert name in lines[0]
    assert "which MindSpore 2.10" in lines[0]
    assert "pip install 'mindspore==2.10.0' 'numpy<2'" in lines[0]


DRAWS = {
    "dropout": lambda ops, on: on.dropout(on.constant(np.ones((4, 4), np.float32))),
    "standard_normal": lambda ops, on: ops.standard_normal((4, 4)),
    "rand": lambda ops, on: ops.rand(4, 4),
    "randn": lambda ops, on: ops.randn(4, 4),
    "randint": lambda ops, on: ops.randint(0, 1000, (4, 4)),
    "multinomial": lambda ops, on: ops.multinomial(on.constant(np.ones(50, np.float32)), 20, True),
    "shuffle": lambda ops, on: ops.shuffle(on.constant(np.arange(100, dtype=np.float32))),
}


class TestRandomNumbers:
    def test_mindspore_alone_draws_anew_on_cpu(self, on, x):
        """The reason for what follows: its own recompute repeats the generator, from which no operator on CPU draws."""
        drawn = []

        def function(t):
            dropped = on.dropout(t)
            drawn.append(on.array(dropped))
            return on.exp(dropped)

        on.gradients(on.ms.recompute(function, x, use_reentrant=False), [x])
        assert not np.array_equal(*drawn)

    @pytest.mark.parametrize("early_stop", [True, False])
    def test_the_generator_is_forwards_in_a_replay_and_the_callers_after_it(self, on, x, early_stop):
        """Rule 3: also after an early stop, where MindSpore alone leaves forward's behind."""
        seen = []

        def function(t):
            seen.append(on.array(on.ms.get_rng_state()))
            return on.exp(on.sin(t))

        on.ms.manual_seed(1)
        output, handle = collected(on, function, x, early_stop=early_stop)
        on.ms.manual_seed(2)
        callers = on.array(on.ms.get_rng_state())
        on.platform.recompute_handle(handle, "s")
        on.gradients(output, [x])
        assert np.array_equal(on.array(on.ms.get_rng_state()), callers)
        assert not np.array_equal(seen[0], callers)
        assert len(seen) == 3
        assert all(np.array_equal(seen[0], each) for each in seen)

    @pytest.mark.parametrize("name", DRAWS)
    def test_operators_with_seeds_repeat(self, on, x, name):
        """Rule 3: they follow the counts of seeds, which are forward's in a replay."""
        draw = partial(DRAWS[name], on.ms.ops, on)
        drawn = []

        def function(t):
            drawn.append([on.array(draw()), on.array(draw())])
            return on.exp(on.sin(t))

        on.gradients(on.platform.checkpoint(function, x), [x])
        (first, second), replayed = drawn
        assert not np.array_equal(first, second)
        assert all(map(np.array_equal, [first, second], replayed))

    def test_without_set_seed_a_call_has_a_seed_of_its_own(self, on, x, equal):
        """Rule 3: two calls draw differently, a replay repeats its own. Difference: A process without a seed."""
        compat = import_module("regrow.platform._mindspore._compat")
        drawn = []

        def function(t):
            dropped = on.dropout(t)
            drawn.append(on.array(dropped))
            return on.exp(dropped)

        before = compat.global_seed()
        compat.set_global_seed(None)
        try:
            big = on.tensor(np.ones((16, 16), np.float32))
            first, second = on.platform.checkpoint(function, big), on.platform.checkpoint(function, big)
            assert compat.global_seed() is None
            on.gradients(first, [big])
            on.gradients(second, [big])
            assert compat.global_seed() is None
        finally:
            compat.set_global_seed(before)
        assert equal(drawn[2:], drawn[:2])
        assert not np.array_equal(drawn[0], drawn[1])

    def test_a_seed_that_the_function_sets_stays(self, on, x):
        """Rule 3: forward is the plain call."""
        on.platform.checkpoint(lambda t: (on.ms.set_seed(77), on.exp(t))[1], x)
        assert on.ms.get_seed() == 77

    @pytest.mark.parametrize("kind", ["Dropout", "Dropout1d", "Dropout2d", "Dropout3d"])
    def test_cells_that_keep_their_state_in_the_kernel_are_refused(self, on, x, kind):
        """Rule 3: nothing can repeat them. Difference: Dropout cells on CPU."""
        nn = on.ms.nn
        net = nn.SequentialCell(nn.Dense(4, 4), getattr(nn, kind)(p=0.5))
        net.set_train(True)
        with pytest.raises(NotImplementedError, match=rf"1 \({kind}\) in training.*mindspore.ops.dropout"):
            on.platform.checkpoint(net, x)
        with pytest.raises(NotImplementedError, match=rf"net.1 \({kind}\)"):
            on.platform.checkpoint(lambda t: net(t) + 0.0, x)
        with pytest.raises(NotImplementedError, match=rf"args\[0\].1 \({kind}\)"):
            on.platform.checkpoint(lambda cell, t: cell(t), net, x)
        net.set_train(False)
        assert on.array(on.platform.checkpoint(net, x)).shape == (4, 4)

    def test_a_dropout_cell_that_drops_nothing_is_let_pass(self, on, x):
        """Rule 3: and so is one whose numbers need not repeat."""
        nn = on.ms.nn
        cells = [nn.Dropout(p=0.0), nn.Dropout2d(p=0.0), nn.Dropout(p=0.5)]
        for cell in cells:
            cell.set_train(True)
        on.platform.checkpoint(lambda t: on.exp(cells[0](t)), x)
        on.platform.checkpoint(nn.SequentialCell(cells[0]), x)
        assert on.array(on.platform.checkpoint(cells[2], x, preserve_rng_state=False)).shape == (4, 4)

    def test_some_operators_draw_anew_unnoticed(self, on, x):
        """Difference: Random operators on CPU. They keep their state in the kernel, and no function tells of them."""
        drawn = []

        def function(t):
            drawn.append(on.array(on.ms.ops.bernoulli(on.constant(np.full((16, 16), 0.5, np.float32)), 0.5)))
            return on.exp(on.sin(t))

        on.gradients(on.platform.checkpoint(function, x), [x])
        assert not np.array_equal(*drawn)


class TestWhatIsChecked:
    def test_a_write_that_is_not_counted_is_not_noticed(self, on, x):
        """Difference: Inputs changed in place. ``copy_`` counts, an assignment to an index does not."""
        scale = on.constant(np.ones((4, 4), np.float32))
        output, handle = collected(on, lambda t: on.exp(on.matmul(t, scale)), x)
        before = scale._version
        scale[0] = 5.0
        on.platform.recompute_handle(handle, "s")
        assert (scale._version, on.array(scale)[0, 0], on.array(output).shape) == (before, 5.0, (4, 4))

    def test_only_the_number_of_saved_tensors_is_compared(self, on, x):
        """Rule 4: as far as MindSpore tells. Difference: The determinism check."""
        shapes = []

        def function(t):
            shapes.append(1)
            return on.exp(on.sin(t if len(shapes) == 1 else t[:2]))

        output, handle = collected(on, function, x, determinism_check="default")
        on.platform.recompute_handle(handle, "s")
        assert on.array(output).shape == (4, 4)

    def test_what_a_function_reaches_is_not_watched(self, on, x):
        """Difference: State that forward reaches. A replay moves it again, unless the function asks."""
        counter = on.weight(np.zeros(1, np.float32), "counter")
        asking = on.weight(np.zeros(1, np.float32), "asking")
        one = on.constant(np.ones(1, np.float32))

        def function(t):
            on.ms.ops.assign_add(counter, one)
            if not regrow.is_recomputing():
                on.ms.ops.assign_add(asking, one)
            return on.exp(on.sin(t))

        on.gradients(on.platform.checkpoint(function, x), [x])
        assert (on.array(counter)[0], on.array(asking)[0]) == (2, 1)

    def test_a_function_that_catches_everything_stops_the_stop(self, on, x):
        """Rule 4: it goes on and saves more, which is refused. Difference: Early stop and except Exception."""

        def function(t):
            try:
                wave = on.exp(on.sin(t))
            except Exception:
                wave = t
            return on.exp(on.sin(wave)) if regrow.is_recomputing() else wave

        output, handle = collected(on, function, x)
        with pytest.raises(RegrowError, match="or catch every Exception") as caught:
            on.platform.recompute_handle(handle, "s")
        assert (type(caught.value).__name__, on.array(output).shape) == ("ReplayMismatchError", (4, 4))

    def test_names_of_the_errors(self, on, block, x):
        """Rule 37: the names and fields of torch's, under RegrowError. Difference: Classes of errors."""
        _output, handle = collected(on, block, x)
        on.platform.recompute_handle(handle, "s")
        with pytest.raises(RegrowError) as caught:
            on.platform.recompute_handle(handle, "other")
        assert [cls.__name__ for cls in type(caught.value).__mro__[:4]] == [
            "FrameBusyError",
            "CheckpointError",
            "RegrowError",
            "RuntimeError",
        ]


class TestSessions:
    def test_a_value_read_twice_in_a_context_that_lets_go(self, on, block, x, equal):
        """Rule 14: refused with what to do; the next context is right. Difference: Reading twice while letting go."""
        output, handle = collected(on, block, x)
        on.platform.recompute_handle(handle, "s")

        def reads():
            on.gradients(output, [x])
            on.gradients(output, [x, *block.weights])

        letting_go = on.platform.recompute_session_ctx("s", retain_on_unpack=False)
        with pytest.raises(RegrowError, match=r"read twice.*retain_on_unpack=True"):
            letting_go(reads)()
        assert equal(read(on, output, [x, *block.weights]), block.gradients(x))
        assert block.replays == 2

    def test_a_call_that_a_context_reaches_belongs_to_its_session(self, on, block, x, equal):
        """Rule 8: one replay, and another session must wait for clear. Difference: A call that was not prefired."""
        output, handle = collected(on, block, x)
        grads = [*read(on, output, [x]), *read(on, output, block.weights)]
        assert equal(grads, block.gradients(x))
        assert block.replays == 1
        with pytest.raises(RegrowError, match="clear_recompute_session"):
            on.platform.recompute_handle(handle, "other")

    def test_a_backward_without_the_context_variables_replays_for_itself(self, on, block, x, equal):
        """Difference: Backward on another thread. MindSpore looks its session up in the variables of the thread."""
        from contextvars import Context

        output, handle = collected(on, block, x)
        on.platform.recompute_handle(handle, "s")
        with on.platform.recompute_session_ctx("s", retain_on_unpack=True):
            elsewhere = Context().run(on.gradients, output, [x])
            here = on.gradients(output, [x])
        assert equal(elsewhere, here)
        assert block.replays == 2

    def test_an_id_that_mindspore_gives_a_backward_is_not_taken_for_it(self, on, block, x, equal):
        """Rule 8: MindSpore keeps what a plain backward brings back under a number; a session may have the same."""
        compat, seen = import_module("regrow.platform._mindspore._compat"), []

        def function(t):
            seen.append(compat.backward_id())
            return block(t)

        on.gradients(on.platform.checkpoint(function, x), [x])
        for number in range(seen[-1], seen[-1] + 40):
            output, handle = collected(on, function, x)
            on.platform.recompute_handle(handle, number)
            grads = on.gradients(output, [x])
            on.platform.clear_recompute_session(number)
            assert equal(grads, block.gradients(x)[:1])
            if seen[-1] > number:
                break
        assert block.runs == len(seen)
        assert block.runs == 2 + 3 * (number - seen[1] + 1)

    def test_clear_frees_what_is_held(self, on, block, x):
        """Rule 11: read or not."""
        output, handle = collected(on, block, x)
        record = record_of(handle)
        on.platform.recompute_handle(handle, "s")
        filled = held(record)
        read(on, output, [x], retain=False)
        on.platform.clear_recompute_session("s")
        assert filled > 0
        assert held(record) == 0

    def test_a_plain_backward_leaves_nothing(self, on, block, x):
        """Rule 6: also what it brought back and did not read; MindSpore alone would hold that with the graph."""
        output, handle = collected(on, block, x)
        on.gradients(output, [block.outer])
        assert held(record_of(handle)) == 0

    def test_a_failed_prefire_holds_nothing(self, on, block, x):
        """Rule 11: nothing half filled."""
        output, handle = collected(on, block, x)

        def fail(runs):
            raise ZeroDivisionError

        block.halfway = fail
        with pytest.raises(ZeroDivisionError):
            on.platform.recompute_handle(handle, "s")
        assert held(record_of(handle)) == 0
        assert on.array(output).shape == (4, 4)

    def test_nothing_waits_for_the_garbage_collector(self, on, block, x):
        """Rule 12: record and frame die with the output, when MindSpore frees it. Difference: When a graph dies."""
        gc.collect()
        gc.disable()
        try:
            output, handle = collected(on, block, x)
            frame, record = handle._frame, weakref.ref(record_of(handle))
            on.platform.recompute_handle(handle, "s")
            on.platform.clear_recompute_session("s")
            del output
            on.settle()
            assert (frame(), record()) == (None, None)
        finally:
            gc.enable()

    def test_the_public_gradients_replay_lazily(self, on, block, x, equal):
        """Rule 6: mindspore.grad replays each call once, and nothing is left of it."""
        expected = block.gradients(x)
        with on.platform.recompute_handle_collector_ctx() as handles:
            dx, dw = on.ms.grad(lambda t: on.platform.checkpoint(block, t).sum(), 0, block.weights)(x)
        on.settle()
        assert equal([on.array(each) for each in (dx, *dw)], expected)
        assert (block.replays, len(handles), handles[0]._frame()) == (1, 1, None)

    def test_the_public_gradients_prefire_too(self, on, block, x, equal):
        """Rule 9: inside mindspore.value_and_grad a forward may fire its own handles."""

        def forward(t):
            output, handle = collected(on, block, t)
            on.platform.recompute_handle(handle, "s")
            return output.sum()

        expected = block.gradients(x)
        with on.platform.recompute_session_ctx("s", retain_on_unpack=True):
            _, (dx, dw) = on.ms.value_and_grad(forward, 0, block.weights)(x)
        assert equal([on.array(each) for each in (dx, *dw)], expected)
        assert block.replays == 1


class TestTheCall:
    def test_names_that_mindspore_takes_for_itself_are_the_functions(self, on, x):
        """Rule 19: only the options of checkpoint are not passed on."""
        seen = []

        def function(t, block, output_recompute, save_rng_state):
            seen.append((block, output_recompute, save_rng_state))
            return on.exp(on.sin(t))

        output = on.platform.checkpoint(function, x, block=1, output_recompute=2, save_rng_state=3)
        on.gradients(output, [x])
        assert seen == [(1, 2, 3)] * 2

    def test_a_wrapped_cell_is_copied_as_what_it_became(self, on, block, x):
        """Rule 17: a copy is checkpointed, too; a cell whose construct is its own is refused."""
        cell = on.platform.checkpoint_wrapper(on.module(block, inner=block.inner, outer=block.outer), early_stop=False)
        twin = copy.copy(cell)
        assert type(twin) is type(cell)
        with on.platform.recompute_handle_collector_ctx() as handles:
            output = twin(x)
        assert len(handles) == 1
        assert on.array(output).shape == (4, 4)
        own = on.module(block)
        own.__dict__["construct"] = on.sin
        with pytest.raises(ValueError, match="construct of its own instance"):
            on.platform.checkpoint_wrapper(own)

    def test_mixed_with_mindspores_own_calls(self, on, make_block, x, equal):
        """Rule 21: a call of mindspore.recompute inside a checkpointed one is no handle of ours."""
        first, second = make_block(1), make_block(2)

        def function(t):
            return on.ms.recompute(second, first(t), use_reentrant=False)

        output, handle = collected(on, function, x)
        on.platform.recompute_handle(handle, "s")
        targets = [x, *first.weights, *second.weights]
        assert equal(read(on, output, targets), on.gradients(second.plain(first.plain(x)), targets))
        assert first.replays == 1


def test_the_platform_is_the_one_that_the_environment_names(monkeypatch, on):
    """Rule 38: REGROW_PLATFORM."""
    monkeypatch.setenv("REGROW_PLATFORM", "mindspore")
    assert get_platform() is on.platform
