"""Replay: run a call again in forward's surroundings and check what it brings back. Runs under the frame's lock only.

HooksFrame is what one call leaves behind; `HooksFrame.run` makes one replay of it:

    inputs back > surroundings > contexts > function, its saved tensors into the slots > same as forward? > held
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from regrow import errors
from regrow._core import compat, events, hooks_compat, replaying, streams, telling
from regrow._core.carrier import say_sharded
from regrow._core.environment import Environment, Restored
from regrow._core.frame import Frame, Holding, Owner
from regrow._core.inputs import Inputs
from regrow._core.kept import Kept
from regrow._core.lifecycle import Reason, Replay, State
from regrow._core.regions import Walk
from regrow._core.returned import function_then
from regrow._core.session import Session
from regrow._core.watch import Watch
from regrow._engines.hooks import mismatch, slots
from regrow._engines.hooks.mismatch import Evidence
from regrow._engines.hooks.oplog import OperatorLog
from regrow._engines.hooks.refill import Refill
from regrow._engines.hooks.slots import Saved
from regrow._engines.hooks.stopping import Stop


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of one call, checked, as `regrow.checkpoint` documents them."""

    preserve_rng_state: bool = True
    context_fn: Callable[[], tuple[Any, Any]] | None = None
    policy_fn: Callable[..., Any] | None = None
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True
    respect_saved_tensors_hooks: bool | None = None


class HooksFrame(Frame):
    """One call of the hooks engine.

    Attributes:
        saved: the slots forward left with autograd, in the order they were saved, and what the tensors looked like.
        compares: whether replays compare that.
        contexts: contexts to enter around a replay, outermost first.
        kept: what selective checkpointing keeps.
        evidence: what explains a mismatch, with ``debug`` and where values are compared.
        aside: a replay on other streams than forward's that nobody has waited for yet, or None.

    Memory: holds what autograd would hold of the inputs, from the call until its graph dies.
    """

    contexts: tuple[AbstractContextManager[Any], ...] = ()
    kept: tuple[Kept, ...] = ()
    evidence: Evidence | None = None
    aside: streams.Aside | None = None

    def __init__(
        self, function: Callable[..., Any], label: str, inputs: Inputs, environment: Environment, options: Options
    ) -> None:
        super().__init__(label)
        self.function = function
        self.inputs = inputs
        self.environment = environment
        self.early_stop = options.early_stop
        self.saved: list[Saved] = []
        self.compares = options.determinism_check != "none"

    def position(self) -> int:
        """How many tensors forward has saved so far."""
        return len(self.saved)

    def goes_on(self, position: int) -> bool:
        """Whether anything was saved behind that place: else early stop, or the end, comes there."""
        return len(self.saved) > position

    def prefire(self, session: Session) -> None:
        """Replay now for a session, under this frame's lock; nothing happens if that was done."""
        if not self.complete:
            raise RuntimeError(errors.unfinished_forward(self.label))
        if session in self.replays and events.listeners:
            telling.fired_again(self, session)
        if session in self.replays or not slots.live_count(self.saved):
            return
        if self.state is not None and self.state.is_sharded():
            say_sharded(self.label)
            return
        wanted = self.environment.streams
        self.aside = streams.Aside(session, wanted) if streams.elsewhere(wanted) else None
        key = self.key(session)
        replay = self.run(session, scheduled=True, prefired=True)
        if replay.state is State.RELEASED:  # the function cleared the session
            slots.drop(self.saved, key)

    def run(self, owner: Owner, *, scheduled: bool, prefired: bool = False) -> Replay:
        """Replay for an owner. On any error nothing of the replay is left."""
        # In the middle of forward a replay must not run further than forward has come.
        stops = self.early_stop or not self.complete
        stop_depth = len(self.environment.function_modes) if stops else None
        shared = bool(self.replays)
        key = owner if self.aside is None else self.key(owner)
        refill = Refill(self.saved, key, stop_depth=stop_depth, shared=shared)
        outer = replaying.thread.here.replay or self.outer
        replay = self.replays[owner] = Replay(self.label, owner, scheduled=scheduled, outer=outer)
        record = telling.begin(self, replay, prefired=prefired) if events.listeners else None
        log = None if self.evidence is None else self.evidence.log.again()
        try:
            self._execute(replay, refill, log)
            self._check(refill, log)
            if isinstance(key, streams.Aside):
                key.queued()
        except BaseException as error:
            if record is not None:
                telling.replayed(self, replay, record, failed=True)
            self.release(owner, Reason.FAILED)
            slots.drop(self.saved, key)  # also where the function cleared the session before it raised
            replay.refusal = None  # it is raised; held here it would hold this frame of Python, and that the replay
            if mismatch.is_unexplained(error, self.evidence, log):
                raise self._mismatch(refill, log).report() from error
            raise
        if replay.state is State.RUNNING:
            replay.advance(State.HELD)
        if record is not None:
            telling.replayed(self, replay, record, failed=False)
        return replay

    def release(self, owner: Owner, reason: Reason) -> None:
        """Drop what the replay for an owner holds."""
        replay = self.replays.pop(owner, None)
        if replay is not None:
            if replay.record is not None:
                telling.released(self, replay, reason)
            key = owner if self.aside is None else self.key(owner)
            slots.drop(self.saved, key)
            replay.advance(State.RELEASED, reason)
            if isinstance(key, streams.Aside):
                self.aside = None
                key.abandon()

    def key(self, owner: Owner) -> Owner:
        """What stands in the slots for an owner: a replay aside, as long as nobody has waited for it."""
        return self.aside if self.aside is not None and self.aside.owner is owner else owner

    def join(self) -> None:
        """Somebody reads here: a replay aside is waited for, and becomes its owner's. Under the lock."""
        aside = self.aside
        if aside is not None and aside.is_queued:
            aside.join(slots.values_of(self.saved, aside))
            slots.hand_over(self.saved, aside, aside.owner)
            self.aside = None

    def forget(self) -> None:
        """Let go of what selective checkpointing keeps."""
        for kept in self.kept:
            kept.forget()

    def held(self, owner: Owner) -> dict[int, int]:
        """Bytes of the values the slots hold for an owner, by storage."""
        return slots.held_bytes(self.saved, self.key(owner))

    def values(self, owner: Owner) -> list[torch.Tensor]:
        """The values the slots hold for an owner."""
        return slots.values_of(self.saved, self.key(owner))

    def holdings(self) -> Iterator[Holding]:
        """Inputs, states of generators, what selective checkpointing keeps, and the values in the slots."""
        yield from (Holding("input", None, tensor) for tensor in self.inputs.tensors())
        yield from (Holding("generator state", None, state) for state in self.environment.generator_states())
        yield from (Holding("kept", None, tensor) for kept in self.kept for tensor in kept.tensors())
        for owner in list(self.replays):
            yield from (Holding("replayed", owner, value) for value in self.values(owner))

    def watch(self, owner: Owner) -> Callable[[], frozenset[int]]:
        """Hold the slots of an owner's values, so that one that dies with its node is still seen to be full."""
        full = {index: slot for index, slot in slots.alive(self.saved) if slots.holds(slot, self.key(owner))}
        return lambda: frozenset(index for index, slot in full.items() if slots.holds(slot, self.key(owner)))

    def trim(self, owner: Owner, unread: frozenset[int]) -> None:
        """Empty these slots; one that is read all the same brings its values back by a replay of its own."""
        for index, slot in slots.alive(self.saved):
            if index in unread:
                slots.take(slot, self.key(owner), consume=True)

    def _execute(self, replay: Replay, refill: Refill, log: OperatorLog | None) -> None:
        """Where forward queued its work, unless the replay is aside."""
        wanted = self.environment.streams
        if not wanted:
            self._execute_here(replay, refill, log, apart=False)
            return
        key = self.key(replay.owner)
        if isinstance(key, streams.Aside):
            key.reads(tensor for kept in self.kept for tensor in kept.tensors())
            self._execute_here(replay, refill, log, apart=True)
        else:
            with streams.entered(wanted) as moved:
                self._execute_here(replay, refill, log, apart=moved)

    def _execute_here(self, replay: Replay, refill: Refill, log: OperatorLog | None, *, apart: bool) -> None:
        here = replaying.thread.here
        reading, here.reading = here.reading, replay
        try:
            tensors, args, kwargs = self.inputs.bring_back(self.label)
        finally:
            here.reading = reading
        if self.aside is not None and self.aside.owner is replay.owner:
            self.aside.reads(tensors)
        function = self.function if self.cells is None and self.closure is None else function_then(self)
        hooked = self._hooked(tensors)
        noted = hooks_compat.hooks_on(hooked)
        around, here.replay = here.replay, replay
        here.reading = None
        if compat.functorch_active():
            replay.transforms = compat.transform_level()
        try:
            with Restored(self.environment, apart=apart):
                if self.state is None:
                    self._call(function, args, kwargs, refill, log, replay, None)
                else:
                    with self.state.begun(replay, function, complete=self.complete) as watch:
                        self._call(function, args, kwargs, refill, log, replay, watch)
        finally:
            here.replay, here.reading = around, reading
            hooks_compat.put_back(hooked, noted)
        if replay.refusal is not None:
            raise replay.refusal

    def _hooked(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the function may put hooks on that is not its own: what it is given, in forward and now, and reaches."""
        held = self.inputs.tensors()
        given = tensors if tensors is held else tensors + held
        return given if self.state is None else given + self.state.tensors()

    def _call(
        self,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        refill: Refill,
        log: OperatorLog | None,
        replay: Replay,
        watch: Watch | None,
    ) -> None:
        modes = compat.function_mode_count()
        contexts = self.contexts if watch is None and log is None else _contexts(self.contexts, watch, log)
        pack = refill.pack_hook(watched=watch is not None)
        if self.regions is not None:
            replay.walk = Walk(self, refill)
            refill.watch = watch
        pack = pack if watch is None else watch.pack_hook(pack)
        if compat.hooks_are_searched:
            compat.mark_hooks(pack, forward=False)
        compat.push_hooks(pack, _as_packed)
        try:
            if contexts:
                with ExitStack() as stack:
                    for context in contexts:
                        stack.enter_context(context)
                    function(*args, **kwargs)
            else:
                function(*args, **kwargs)
            if replay.walk is not None:
                replay.walk.finish(None)
        except Stop:
            if replay.walk is not None:
                replay.walk.finish(refill.wanted)
        finally:
            compat.pop_hooks()
            replay.walk = None  # it leads back here
            if compat.function_mode_count() > modes:  # a stop that no torch call came to meet
                compat.swap_function_modes(modes, ())

    def _check(self, refill: Refill, log: OperatorLog | None) -> None:
        forward, replay = len(self.saved), refill.count()
        # A stop leaves the rest unseen; while forward has not returned, more is to come.
        enough = replay == forward or (replay >= refill.wanted and (self.early_stop or not self.complete))
        if not enough or refill.differences:
            raise self._mismatch(refill, log, replay=forward if enough else replay).report()
        if mismatch.computed_otherwise(self.evidence, log):
            raise self._mismatch(refill, log).report()

    def _mismatch(self, refill: Refill, log: OperatorLog | None, replay: int | None = None) -> mismatch.Case:
        forward = len(self.saved)
        return mismatch.Case(
            label=self.label,
            function=self.function,
            opaque=self.inputs.opaque,
            inputs=self.inputs.tensors(),
            input_names=self.inputs.names(),
            forward=forward,
            replay=forward if replay is None else replay,
            differences=refill.differences,
            place=refill.place,
            evidence=None if log is None or self.evidence is None else (self.evidence, log),
        )


def _contexts(
    contexts: tuple[AbstractContextManager[Any], ...], watch: Watch | None, log: OperatorLog | None
) -> tuple[AbstractContextManager[Any], ...]:
    """What to enter around a replay, outermost first: the watch sees what really runs."""
    if watch is not None:
        contexts = (watch, *contexts)
    return contexts if log is None else (*contexts, log)


def _as_packed(value: Any) -> Any:
    return value
