"""Unpack: backward asks for a saved tensor. Hot path: field reads only (Rule 7)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast
from weakref import ref

import torch

from regrow._core import compat, replaying, session
from regrow._core.faults import CheckpointError, ValueChangedError
from regrow._core.frame import Owner
from regrow._core.lifecycle import Reason, Replay, State
from regrow._engines.hooks import slots
from regrow._engines.hooks.replay import HooksFrame
from regrow._engines.hooks.slots import Slot


def make_unpack(frame: HooksFrame) -> Callable[[Slot], torch.Tensor]:
    """The unpack hook of one call. It keeps the frame alive as long as autograd keeps a slot."""
    graph_task_id = compat.graph_task_id

    def unpack(slot: Slot) -> torch.Tensor:
        active = frame.active_session
        try:
            if slot.owner == (graph_task_id() if active is None else active):
                value = slot.value
                if value is not None and value._version == slot.version:
                    if frame.consume:
                        slot.value = None
                    return value
        except AttributeError:
            pass  # no replay has filled this slot yet
        return _regrow(frame, slot)

    return unpack


def _regrow(frame: HooksFrame, slot: Slot) -> torch.Tensor:
    """The slow path: wait for a replay that runs, or make one."""
    if torch.compiler.is_compiling():  # compiled autograd traces backward; an eager call is replayed eagerly
        return cast("torch.Tensor", torch.compiler.disable(_regrow_eagerly)(frame, slot))
    return _regrow_eagerly(frame, slot)


def _regrow_eagerly(frame: HooksFrame, slot: Slot) -> torch.Tensor:
    active = frame.active_session if frame.complete else None
    if type(active) is session.Unread:
        active = session.read(frame, active)
    reading = replaying.thread.here.reading
    if active is None and reading is not None and reading.scheduled and frame.complete:
        # An inner call takes its inputs from here for a session: what it belongs to, this call belongs to.
        active, _ = session.bind_nest(frame, reading.owner.id)
    if active is not None:
        return _regrow_for(frame, slot, active, scheduled=True)
    if frame.bound is not None:
        session.refuse_foreign_context(frame)
    task = compat.graph_task_id()
    if task != -1:
        return _regrow_for(frame, slot, task, scheduled=False)
    owner = object()  # outside backward: this one value, nothing else
    try:
        return _regrow_for(frame, slot, owner, scheduled=False)
    finally:
        frame.release(owner, Reason.ENDED)


def _regrow_for(frame: HooksFrame, slot: Slot, owner: Owner, *, scheduled: bool) -> torch.Tensor:
    with frame.lock:
        if frame.aside is not None:  # whoever reads: what is kept for all replays may come from it as well
            frame.join()
        before, key = frame.replays.get(owner), owner if frame.aside is None else frame.key(owner)
        if before is None:
            replay = frame.run(owner, scheduled=scheduled)
            if type(owner) is int:
                _release_with_task(frame, owner, replay)
                if frame.active_session is None:
                    # Without retain_graph a node frees what it read when it is done; with it, nobody else would.
                    frame.consume = compat.graph_task_keeps_graph()
        elif slots.holds(slot, key):
            replay = before  # another thread's, for the same owner
        else:
            replay = _again(frame, owner, before, scheduled=scheduled)
        value, intact = slots.take(slot, key, consume=frame.consume)
        if replay.state is State.RELEASED:  # the session was cleared while its replay ran
            slots.drop(frame.saved, key)
    if not intact:
        raise ValueChangedError(frame.label, slots.index_of(frame.saved, slot))
    # None if the function cleared the session that asked: then it is this backward's own to replay.
    return _regrow_eagerly(frame, slot) if value is None else value


def _again(frame: HooksFrame, owner: Owner, before: Replay, *, scheduled: bool) -> Replay:
    """Read twice in one pass. From now on the owner's values stay until it ends, so one more replay is enough."""
    if before.state is State.RUNNING:
        raise CheckpointError(
            f"{frame.label}: the function runs backward through its own output while it is being replayed. "
            "Backward inside a checkpointed function must stay inside it.",
            label=frame.label,
        )
    watch = before.watch
    frame.release(owner, Reason.ENDED)
    replay = frame.run(owner, scheduled=scheduled)
    replay.watch = watch
    frame.consume = False
    return replay


def _release_with_task(frame: HooksFrame, owner: Owner, replay: Replay) -> None:
    """Release when the graph task ends. On success it calls back; on an error it only dies, and the reference tells."""
    here = ref(frame)
    end = partial(_release, here, owner)
    replay.watch = ref(end, partial(_release, here, owner))
    compat.at_graph_task_end(end)


def _release(frame: ref[HooksFrame], owner: Owner, _: object = None) -> None:
    alive = frame()
    if alive is not None:
        alive.release(owner, Reason.ENDED)
