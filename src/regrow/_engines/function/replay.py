"""Replay: run a call again in forward's surroundings, this time with a graph. Runs under the frame's lock at most.

ReentrantFrame is what one call leaves behind; `ReentrantFrame.keep` and `once` make one replay of it:

    surroundings > inputs back, as leaves > function, recorded > same outputs as forward? > leaves and outputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from regrow import errors
from regrow._core import compat, events, hooks_compat, leaks, replaying, streams, telling, trees
from regrow._core.carrier import say_sharded
from regrow._core.environment import Environment, Restored, uncached
from regrow._core.faults import CheckpointError
from regrow._core.frame import Holding, Owner
from regrow._core.inputs import Inputs
from regrow._core.lifecycle import Reason, Replay, State
from regrow._core.regions import Walk
from regrow._core.returned import function_then
from regrow._core.scope import SplitFrame
from regrow._core.session import Session
from regrow._core.watch import Watch
from regrow._engines.function import _compat
from regrow._engines.function.brought import Places
from regrow._engines.function.data_parallel import Around
from regrow._engines.function.graph import Graph, Leaves
from regrow._engines.function.slots import Slots, saving, watching

Result = TypeVar("Result")

# Names every call that is not split among the targets of a whole backward. Autograd then tells a whole backward from a
# limited one, and the output of a call that only captures parameters requires a gradient.
SHARED_TRIGGER = torch.empty(0, device="cpu", requires_grad=True)


class _Own:
    """The owner of a replay that no session holds."""

    def __repr__(self) -> str:
        return "its own"


OWN = _Own()


@dataclass(frozen=True, slots=True)
class ReentrantOptions:
    """The choices of one reentrant call, checked."""

    preserve_rng_state: bool = True
    determinism_check: str = "default"


class ReentrantFrame(SplitFrame):
    """One call of the engine on an autograd Function.

    Attributes:
        trigger: its first input for autograd; one of its own if the call is split.
        asks: whether its handle must say which half of backward comes.
        lean: whether nobody asks dw for the gradients that dx gave.
        parameters: the inputs that are parameters, by place; dx leaves them alone.
        wrapper: the DDP wrapper around the call, if what it reduces must not be accumulated twice.
        graphs: what replays built that are kept, by owner.
        places: what SAVE regions saved of their inputs; None without regions.
        fresh: the outputs of forward on their way to autograd; None before and after.
        compares: whether the outputs of replays are compared with forward's.
        began_ns: when forward began, if somebody listened.

    Memory: holds the inputs from the call until it is let go or its graph dies.
    """

    trigger = SHARED_TRIGGER
    asks = False
    lean = False
    parameters: frozenset[int] = frozenset()
    wrapper: Around | None = None
    silent = True
    places: Places | None = None
    fresh: tuple[torch.Tensor, ...] | None = None
    began_ns = 0
    _constants: frozenset[int] | None = None

    def __init__(
        self,
        function: Callable[..., Any],
        label: str,
        inputs: Inputs,
        environment: Environment,
        options: ReentrantOptions,
    ) -> None:
        super().__init__(label)
        self.function = function
        self.inputs = inputs
        self.environment = environment
        self.compares = options.determinism_check == "default"
        self.graphs: dict[Owner, Graph] = {}

    def hooks(self) -> compat.Hooks:
        """The hooks of regions, for the parts of their inputs that replays bring back."""
        if self.places is None:
            self.places = Places(self.label)
        return self.places.hooks()

    def position(self) -> int:
        """How many such parts forward has saved so far."""
        return 0 if self.places is None else len(self.places)

    def goes_on(self, position: int) -> bool:
        """A replay runs to its outputs."""
        return True

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether it is a parameter that is no input, or lies in an input or a buffer that needs no gradient."""
        if self._constants is None:
            self._constants = self.inputs.storages(requires_grad=False) | self._buffers()
        if tensor.requires_grad and compat.takes_gradient(tensor):
            return not self.inputs.holds(tensor)
        key = compat.storage_key(tensor)
        return key in self._constants and key not in self.inputs.storages(requires_grad=True)

    def prefire(self, session: Session) -> None:
        """Replay now for a session, under this frame's lock; nothing happens if that was done."""
        self.check_usable()
        if session in self.graphs:
            if events.listeners:
                telling.fired_again(self, session)
        elif self.state is not None and self.state.is_sharded():
            say_sharded(self.label)
        else:
            self.keep(session, scheduled=True, prefired=True)

    def recompute(self) -> None:
        """Replay now, for the next backward that no session holds."""
        self.check_usable()
        with self.lock:
            if OWN not in self.graphs:
                self.keep(OWN, scheduled=False, prefired=True)

    def keep(self, owner: Owner, *, scheduled: bool, prefired: bool = False) -> Graph:
        """Replay, and keep the graph for an owner. On any error nothing of it is left."""
        slots = Slots(self.label)
        before = _compat.next_sequence_number()
        replay = self.replays[owner] = Replay(
            self.label, owner, scheduled=scheduled, outer=replaying.thread.here.replay or self.outer
        )

        record = telling.begin(self, replay, prefired=prefired) if events.listeners else None

        def finish(outputs: list[torch.Tensor], leaves: Leaves) -> Graph:
            return Graph(self.label, outputs, leaves, slots, before=before, compares=self.compares)

        try:
            graph = self._run(replay, slots, finish)
        except BaseException:
            if record is not None:
                telling.replayed(self, replay, record, failed=True)
            self.release(owner, Reason.FAILED)
            replay.refusal = None  # as in `once`
            raise
        if replay.state is State.RUNNING:  # else the function cleared the session: the graph serves this once
            replay.advance(State.HELD)
            self.graphs[owner] = graph
        if record is not None:
            telling.replayed(self, replay, record, failed=False)
        return graph

    def once(self) -> tuple[list[torch.Tensor], Leaves]:
        """Replay for one backward that takes everything with it."""
        replay = Replay(self.label, OWN, scheduled=False, outer=replaying.thread.here.replay or self.outer)
        try:
            return self._told_once(replay) if events.listeners else self._run(replay, None, _as_they_are)
        finally:
            replay.refusal = None  # it is raised; held here it would hold this frame of Python, and that the replay

    def _told_once(self, replay: Replay) -> tuple[list[torch.Tensor], Leaves]:
        """The same while somebody listens: what it saves goes into slots, to be weighed, and `release` ends it."""
        slots = Slots(self.label)
        self.replays[OWN] = replay
        record = telling.begin(self, replay, prefired=False)
        try:
            found = self._run(replay, slots, _as_they_are)
        except BaseException:
            telling.replayed(self, replay, record, failed=True)
            self.release(OWN, Reason.FAILED)
            raise
        telling.replayed(self, replay, record, failed=False, values=[*slots.values(), *found[0]])
        return found

    def _run(
        self, replay: Replay, slots: Slots | None, finish: Callable[[list[torch.Tensor], Leaves], Result]
    ) -> Result:
        """Run the function with a graph, where forward queued its work.

        Args:
            replay: this one.
            slots: where to put what is saved; None leaves it to autograd.
            finish: gets the outputs, and the leaves that stand for the inputs.
        """
        wanted = self.environment.streams
        if not wanted:
            return self._run_here(replay, slots, finish, apart=False)
        with streams.entered(wanted) as moved:
            return self._run_here(replay, slots, finish, apart=moved)

    def _run_here(
        self,
        replay: Replay,
        slots: Slots | None,
        finish: Callable[[list[torch.Tensor], Leaves], Result],
        *,
        apart: bool,
    ) -> Result:
        restored = Restored(self.environment, apart=apart)
        with restored:
            here = replaying.thread.here
            reading, here.reading = here.reading, replay
            try:
                leaves, args, kwargs = self.inputs.as_leaves(self.label)
            finally:
                here.reading = reading
            function = function_then(self)
            hooked = self._hooked(leaves)
            noted = hooks_compat.hooks_on(hooked)
            around, reentrant = here.replay, here.reentrant
            here.replay, here.reentrant, here.reading = replay, True, None
            if compat.functorch_active():
                replay.transforms = compat.transform_level()
            # Casts that the caller's autocast keeps belong to the caller's graph.
            casts = self.environment.casts and not restored.casts_anew
            try:
                if self.state is None and slots is None and self.regions is None and not casts:
                    output = function(*args, **kwargs)
                else:
                    output = self._call(replay, function, args, kwargs, slots, casts=casts)
            finally:
                here.replay, here.reading, here.reentrant = around, reading, reentrant
                hooks_compat.put_back(hooked, noted)
            if replay.refusal is not None:
                raise replay.refusal
            if self.inputs.contained and leaks.in_arguments(args, kwargs, self.inputs.opaque):
                raise CheckpointError(errors.leaked_graph(self.label, "an argument"), label=self.label)
            return finish([output] if type(output) is torch.Tensor else trees.tensors_in(output), leaves)

    def release(self, owner: Owner, reason: Reason) -> None:
        """Drop what the replay for an owner holds."""
        graph = self.graphs.pop(owner, None)
        replay = self.replays.pop(owner, None)
        self.forget_brought(owner)
        if replay is not None:
            if replay.record is not None:
                telling.released(self, replay, reason)
            replay.advance(State.RELEASED, reason)
        del graph

    def forget_brought(self, owner: Owner) -> None:
        """Let go of what a replay brought back for regions."""
        if self.places is not None:
            self.places.drop(owner)

    def let_go(self) -> None:
        """Drop every replay, the inputs and the function. A backward that runs now keeps what it has in hand."""
        self.released = True
        for owner in list(self.replays):
            self.release(owner, Reason.LET_GO)
        self.inputs = _NOTHING
        self.function = _gone
        self.closure = self.cells = self.state = self.regions = self.places = None

    def forget(self) -> None:
        """Nothing is kept beside the replays."""

    def held(self, owner: Owner) -> dict[int, int]:
        """Bytes of what the replay for an owner saved, by storage."""
        graph = self.graphs.get(owner)
        return {} if graph is None else graph.held_bytes()

    def values(self, owner: Owner) -> list[torch.Tensor]:
        """What the replay for an owner saved and holds, and what it brought back for regions."""
        graph = self.graphs.get(owner)
        brought = [] if self.places is None else self.places.values(owner)
        return brought if graph is None else graph.values() + brought

    def holdings(self) -> Iterator[Holding]:
        """Inputs, states of generators, and what replays that are kept have saved."""
        yield from (Holding("input", None, tensor) for tensor in self.inputs.tensors())
        if not self.released:
            yield from (Holding("generator state", None, state) for state in self.environment.generator_states())
        for owner in list(self.graphs):
            yield from (Holding("replayed", owner, value) for value in self.values(owner))

    def watch(self, owner: Owner) -> Callable[[], frozenset[int]]:
        """Nothing to learn: the graph tells which half reads what."""
        return frozenset

    def trim(self, owner: Owner, unread: frozenset[int]) -> None:
        """Let go of what dx read and dw will not."""
        graph = self.graphs.get(owner)
        if graph is not None:
            graph.trim()

    def check_usable(self) -> None:
        """RuntimeError where no replay is possible."""
        if self.released:
            raise RuntimeError(errors.let_go_frame(self.label))
        if not self.complete:
            raise RuntimeError(errors.unfinished_forward(self.label))

    def _hooked(self, leaves: Leaves) -> list[torch.Tensor]:
        """What the function may put hooks on that is not its own."""
        given = [*(leaf for leaf in leaves if leaf is not None), *self.inputs.tensors()]
        return given if self.state is None else given + self.state.tensors()

    def _call(
        self,
        replay: Replay,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        slots: Slots | None,
        *,
        casts: bool,
    ) -> Any:
        with ExitStack() as stack:
            if casts:
                stack.enter_context(uncached())
            if _compat.caches_weights():
                stack.enter_context(_compat.own_weights())
            watch = None
            if self.state is not None:
                watch = stack.enter_context(self.state.begun(replay, function, complete=True))
            if watch is not None:
                stack.enter_context(watching(watch, slots or Slots(self.label)))
            elif slots is not None:
                stack.enter_context(saving(slots.pack, slots))
            output = self._around_regions(replay, function, args, kwargs, watch)
            left = None if self.state is None else leaks.in_modules(self.state.modules)
            if left is not None:
                raise CheckpointError(errors.leaked_graph(self.label, left), label=self.label)
            return output

    def _around_regions(
        self,
        replay: Replay,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        watch: Watch | None,
    ) -> Any:
        if self.regions is None:
            return function(*args, **kwargs)
        places = self.places or Places(self.label)
        replay.walk = Walk(self, places.filling(replay.owner, watch))
        try:
            output = function(*args, **kwargs)
            replay.walk.finish(None)
            return output
        finally:
            replay.walk = None  # it leads back here

    def _buffers(self) -> frozenset[int]:
        modules = () if self.state is None else self.state.modules
        tensors = [tensor for module in modules for tensor in module._buffers.values() if tensor is not None]
        return frozenset(key for key in map(compat.storage_key, tensors) if key is not None)


def _as_they_are(outputs: list[torch.Tensor], leaves: Leaves) -> tuple[list[torch.Tensor], Leaves]:
    return outputs, leaves


_NOTHING = Inputs([], trees.TENSORS_ONLY)


def _gone(*_: Any, **__: Any) -> Any:
    """Stands where the function was."""
    raise AssertionError("a released call cannot run")
