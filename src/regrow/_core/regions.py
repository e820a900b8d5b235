"""SAVE regions: parts of a checkpointed call that run once, in forward; a replay goes around them. Knows no engine.

    forward   inputs ---> region runs -----------------------------------> outputs, kept
                            |  its operators save
                            |-- parts of inputs ----> slots of the call, filled by replays
                            '-- everything else ----> kept with the graph
    replay    inputs ---> those slots, and nothing runs -----------------> outputs, as they were kept

A call made by the forward of another call notes its regions in both: either may be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from regrow import errors
from regrow._core import compat, hidden, outputs, replaying, trees
from regrow._core.borders import Border, Look, Part, look
from regrow._core.captured import Captured
from regrow._core.faults import PlaceholderError, RegionError, ValueChangedError
from regrow._core.frame import Frame
from regrow._core.graft import Graft
from regrow._core.kept import KeptTensor
from regrow._core.lifecycle import Replay
from regrow._core.moves import Moves
from regrow._core.placeholder import Placeholder


class Region:
    """One call of a region, as it was in forward.

    Attributes:
        label: the function or module.
        looks: what its inputs looked like.
        made: storages that it made; a replay does not make those again. Weakly, but no other storage takes the place.
        failure: what it raised.
        strided: inputs of which its outputs are views.
        graft: its own graph, where the call's forward leaves none.

    Memory: what it keeps belongs to the calls that reached it, and lives until their graphs die.
    """

    __slots__ = ("_outputs", "_template", "failure", "graft", "label", "looks", "made", "strided")

    def __init__(self, label: str, looks: list[Look]) -> None:
        self.label = label
        self.looks = looks
        self.made: dict[int, StorageWeakRef] = {}
        self.failure: str | None = None
        self.strided: set[int] = set()
        self.graft: Graft | None = None
        self._outputs: list[outputs.Output] = []
        self._template = trees.TENSORS_ONLY

    def keep(
        self, output: Any, border: Border, captured: Captured, hooks: compat.Hooks | None, *, save_output: bool
    ) -> Any:
        """Note what it returned; give what the call goes on with."""
        tensors, template = trees.flatten((output,), {})
        for value in template.opaque:
            kind = hidden.tensors_in(value)
            if kind is not None:
                raise RegionError(
                    errors.region_hides(self.label, type(value).__name__, kind), label=self.label, region=self.label
                )
        keys = [compat.storage_key(tensor) for tensor in tensors]
        for tensor, key in zip(tensors, keys, strict=True):
            # Where outputs share memory, with each other or with what is outside, copies that hooks make would not.
            through = None if keys.count(key) > 1 or key in captured.storages else hooks
            made = outputs.note(self.label, tensor, border, through, save_output=save_output)
            self._outputs.append(made)
            if key is not None and not isinstance(made, outputs.Passed):
                self.made[key] = StorageWeakRef(tensor.untyped_storage())
        self._template = template
        passed = (made.part for made in self._outputs if isinstance(made, outputs.Passed))
        self.strided = {part.source for part in passed if part.view is not None}
        if self.graft is None:
            return output
        roots = zip(tensors, self._outputs, strict=True)
        joined = set(map(id, outputs.grafted(self._outputs)))
        self.graft.close([tensor for tensor, made in roots if id(made) in joined])
        return template.fill([tensor.detach() for tensor in tensors])[0][0]

    def intact(self) -> bool:
        """Whether what is kept of its outputs is still as it made them."""
        return all(made.intact() for made in self._outputs if isinstance(made, (outputs.Kept, outputs.Leaf)))

    def again(self, label: str, inputs: list[torch.Tensor]) -> Any:
        """What it returned, for a replay of a call that brings these inputs."""
        tensors = outputs.all_again(self._outputs, inputs, self.graft, label, self.label)
        args, _ = self._template.fill(tensors)
        return args[0]


class Entry:
    """A region in the forward of one call.

    Attributes:
        region: what it left behind.
        start: how many tensors the call had saved when the region began.
        end: how many when it ended.
        parts: which parts of the region's inputs the tensors in between are; grows while the region runs.
        moves: what it moved on.
    """

    __slots__ = ("end", "moves", "parts", "region", "start")

    def __init__(self, region: Region, call: Frame, parts: list[Part], moves: Moves) -> None:
        """Note the region in a call that has reached it."""
        self.region = region
        self.start = self.end = call.position()
        self.parts = parts
        self.moves = moves
        if call.regions is None:
            call.regions = []
        call.regions.append(self)


class Refilling(Protocol):
    """What an engine tells a walk, and is told by it."""

    def count(self) -> int:
        """How many tensors the replay has saved."""

    def fill(self, value: torch.Tensor) -> None:
        """The next saved tensor."""

    def stop_if_back(self) -> None:
        """End the replay here if it has nothing left to do."""


class Walk:
    """One replay's way around the regions of forward."""

    def __init__(self, frame: Frame, refilling: Refilling) -> None:
        self._label = frame.label
        self._goes_on = frame.goes_on
        self._entries = frame.regions or []
        self._refilling = refilling
        self._next = 0

    def around(self, label: str, inputs: list[torch.Tensor], names: Callable[[], list[str]]) -> Entry:
        """Go around the region that forward reached here.

        Args:
            label: the region that the replay has reached.
            inputs: what it is given.
            names: how a user would write them.

        Raises:
            RegionError: forward reached another region here, or none; or its inputs look otherwise.
        """
        self._refilling.stop_if_back()
        entry = self._entry(label)
        self._check(entry, inputs, names)
        self._next += 1
        detached = [tensor.detach() for tensor in inputs] if entry.parts else []
        for part in entry.parts:
            value = part.of(detached)
            if isinstance(value, Placeholder):
                raise PlaceholderError(value._region, f"SAVE region {label}")
            self._refilling.fill(value)
        self._refilling.stop_if_back()
        _check_way_on(self._label, entry, self._goes_on)
        entry.moves.again()
        return entry

    def finish(self, wanted: int | None) -> None:
        """The replay has ended; refuse it if forward had reached more regions by then.

        Args:
            wanted: how many tensors it had saved when it stopped; None if the function returned.

        Raises:
            RegionError: there are regions left.
        """
        left = [entry for entry in self._entries[self._next :] if wanted is None or entry.start < wanted]
        if left:
            region = left[0].region.label
            raise RegionError(errors.regions_left(self._label, region, len(left)), label=self._label, region=region)

    def _entry(self, label: str) -> Entry:
        if self._next == len(self._entries):
            found = f"forward had reached all {self._next} of its regions"
        else:
            entry = self._entries[self._next]
            if entry.region.label != label:
                found = f"forward reached {entry.region.label}"
            elif self._refilling.count() != entry.start:
                found = f"it had saved {self._refilling.count()} tensors, and forward {entry.start}"
            else:
                return entry
        raise RegionError(errors.region_elsewhere(self._label, label, found), label=self._label, region=label)

    def _check(self, entry: Entry, inputs: list[torch.Tensor], names: Callable[[], list[str]]) -> None:
        region = entry.region
        strided = region.strided.union(part.source for part in entry.parts if part.view is not None)
        if len(inputs) != len(region.looks):
            found = f"it is given {len(inputs)} tensors, and in forward {len(region.looks)}"
            raise RegionError(
                errors.region_elsewhere(self._label, region.label, found), label=self._label, region=region.label
            )
        for index, (then, tensor) in enumerate(zip(region.looks, inputs, strict=True)):
            now = look(tensor)
            if not now.matches(then, strides=index in strided):
                raise RegionError(
                    errors.region_input_differs(self._label, region.label, names()[index], str(then), str(now)),
                    label=self._label,
                    region=region.label,
                )


def run(
    function: Callable[..., Any], label: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, save_output: bool
) -> Any:
    """Run a region, or in a replay give what it returned in forward. A plain call outside checkpointed ones."""
    if compat.tracing():
        return function(*args, **kwargs)
    here = replaying.thread.here
    replay = here.replay
    calls = list(_calls(here.forward, replay))
    if replay is None:
        return _Recording(calls, function, label, args, kwargs).run(save_output) if calls else function(*args, **kwargs)
    if replay.walk is None:
        found = "forward reached none"
        raise RegionError(errors.region_elsewhere(replay.label, label, found), label=replay.label, region=label)
    inputs, template = trees.flatten(args, kwargs)
    region, here.region = here.region, label
    try:
        entry = replay.walk.around(label, inputs, lambda: template.names(len(inputs)))
        output = entry.region.again(replay.label, inputs)
    finally:
        here.region = region
    for call in calls:
        Entry(entry.region, call, [], entry.moves)
    return output


def check_after_forward(frame: Frame) -> None:
    """Refuse what no replay of a call could bring back, if one is needed beyond it.

    Raises:
        RegionError: a region raised and the function went on, or an output of one was changed in place since.
    """
    for entry in frame.regions or ():
        _check_way_on(frame.label, entry, frame.goes_on)


def _check_way_on(label: str, entry: Entry, goes_on: Callable[[int], bool]) -> None:
    """Refuse to go on from a region whose outputs are not what they were, if a replay does go on."""
    region = entry.region
    if not goes_on(entry.end):
        return
    if region.failure is not None:
        raise RegionError(errors.region_raised(label, region.label, region.failure), label=label, region=region.label)
    if not region.intact():
        raise RegionError(errors.region_output_written(label, region.label), label=label, region=region.label)


class _Inside:
    """Stands on the thread for a call while a region of it runs: calls inside are its own, their regions are not."""

    def __init__(self, call: Frame) -> None:
        self.add_inner = call.add_inner


class _Recording:
    """A region while it runs in forward."""

    def __init__(
        self,
        calls: list[Frame],
        function: Callable[..., Any],
        label: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._calls = calls
        self._function = function
        self._frame = calls[0]
        self._args = args
        self._kwargs = kwargs
        self._refuse(label)
        self._inputs, self._template = trees.flatten(args, kwargs)
        made = frozenset(key for call in calls for entry in call.regions or () for key in entry.region.made)
        self._border = Border(self._inputs, made)
        self._region = Region(label, self._border.looks())
        if self._frame.silent:
            self._region.graft = Graft(self._inputs, self._frame.is_constant)
        self._captured = Captured(function, self._template.opaque)
        self._parts: list[Part] = []
        self._grad = torch.is_grad_enabled()
        self._hooks = compat.user_hooks() or compat.user_hooks_below()

    def run(self, save_output: bool) -> Any:
        """Run it and note what it leaves behind."""
        # Noted now: a backward inside the region may replay the call up to here.
        entries = [
            Entry(self._region, call, self._parts if call is self._frame else [], Moves(call.environment, call.state))
            for call in self._calls
        ]
        here = replaying.thread.here
        before = here.forward, here.region
        here.forward, here.region = _Inside(self._frame), self._region
        try:
            output = self._call()
            for entry in entries:
                entry.moves.end()
            self._refuse_writes()
            hooks = self._hooks if self._frame.respects_hooks else None
            output = self._region.keep(output, self._border, self._captured, hooks, save_output=save_output)
        except BaseException as error:
            self._region.failure = type(error).__name__
            raise
        finally:
            here.forward, here.region = before
            for call, entry in zip(self._calls, entries, strict=True):
                entry.end = call.position()
            self._border.close()
            self._inputs = []
        return output

    def _call(self) -> Any:
        graft = self._region.graft
        pack, unpack = self._saving()
        if compat.hooks_are_searched:
            compat.mark_hooks(pack, forward=True)
        compat.push_hooks(pack, unpack)
        try:
            if graft is None:
                return self._function(*self._args, **self._kwargs)
            with torch.enable_grad():
                args, kwargs = self._template.fill(graft.behind_gate(self._inputs))
                return self._function(*args, **kwargs)
        finally:
            compat.pop_hooks()
            if compat.hooks_are_searched:
                compat.unmark_hooks(pack)

    def _saving(self) -> compat.Hooks:
        """Hooks that save a part of an input as a slot of the call, and keep everything else."""
        label, border, parts, hooks = self._region.label, self._border, self._parts, self._hooks
        save, read = self._frame.hooks()

        def pack(tensor: torch.Tensor) -> Any:
            part = border.find(tensor)
            if part is None:
                return KeptTensor(tensor, hooks)
            parts.append(part)
            return save(tensor)

        def unpack(saved: Any) -> torch.Tensor:
            if type(saved) is not KeptTensor:
                return read(saved)
            if not saved.intact():
                raise ValueChangedError(label, None)
            return saved.read()

        return pack, unpack

    def _refuse(self, label: str) -> None:
        if compat.functorch_active() and compat.transform_level() > 0:
            message = errors.region_transformed(self._frame.label, label)
        elif self._frame.foreign_contexts:
            message = errors.region_foreign_contexts(self._frame.label, label)
        else:
            return
        raise RegionError(message, label=self._frame.label, region=label)

    def _refuse_writes(self) -> None:
        written = self._captured.written() + ([] if torch.is_grad_enabled() == self._grad else ["the grad mode"])
        indices = self._border.written()
        if indices:
            names = self._template.names(len(self._region.looks))
            written = [names[index] for index in indices] + written
        if written:
            raise RegionError(
                errors.region_wrote(self._frame.label, self._region.label, written),
                label=self._frame.label,
                region=self._region.label,
            )


def _calls(forward: Frame | None, replay: Replay | None) -> Iterator[Frame]:
    """The calls whose forward runs here, innermost first; one that stands still around a replay is not among them."""
    while isinstance(forward, Frame) and forward.outer is replay:
        yield forward
        forward = forward.around
