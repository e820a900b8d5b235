"""State that a forward reads and changes: buffers, modes, parameters, captured tensors, generators. Right, or refused.

    forward    note versions, keep small buffers as they are  ->  function  ->  note what it changed
    replay     begin with forward's values  ->  function  ->  put back what was there

What a parameter or a captured tensor was before it was changed is gone: a replay that reads it is refused (`watch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import nn

from regrow._core import buffers, compat, turns
from regrow._core.buffers import Buffer, Buffers
from regrow._core.faults import StateChangedError
from regrow._core.lifecycle import Replay
from regrow._core.reach import Reach, reach
from regrow._core.watch import Watch

_training = attrgetter("training")
_requires_grad = attrgetter("requires_grad")
_is_leaf = attrgetter("is_leaf")


_CUT = ("device_mesh", "placements")  # how a DTensor is cut into shards

Children = list[tuple[nn.Module, dict[str, "nn.Module | None"]]]
Places = list[tuple[nn.Module, dict[str, "nn.Parameter | None"]]]


class State:
    """What one call reaches, as it was in forward.

    Attributes:
        buffers: those of the modules it reaches.
        own: ids of the parameters and captured tensors that forward itself wrote into.

    Memory: holds modules and parameters, copies of small buffers, and of large ones that forward changes, until the
    graph of the call dies. Captured tensors are held by the function alone.
    """

    __slots__ = (
        "_captured",
        "_children",
        "_generators",
        "_modes",
        "_modules",
        "_names",
        "_opaque",
        "_parameters",
        "_places",
        "_requires_grad",
        "_versions",
        "buffers",
        "own",
    )

    def __init__(self, reached: Reach, opaque: tuple[Any, ...]) -> None:
        # A function may reach a whole model: lists and one pass each, and no names before one is needed.
        self._opaque = opaque
        self._names = reached.names
        self._modules = _modules(reached)
        self._modes = list(map(_training, self._modules))
        self.buffers = Buffers(self._modules)
        self._children = [(module, dict(module._modules)) for module in self._modules if module._modules]
        self._places: Places = [(module, dict(module._parameters)) for module in self._modules if module._parameters]
        self._parameters: list[torch.Tensor] = [p for _, there in self._places for p in there.values() if p is not None]
        self._requires_grad = list(map(_requires_grad, self._parameters))
        self._versions = compat.versions_of(self._parameters)
        # Weakly: forward may write its result into one, and the result's graph holds the frame that holds this.
        self._captured = [
            (ref(tensor), compat.version_of(tensor), tensor.requires_grad) for _, tensor in reached.tensors.values()
        ]
        self._generators = [(generator, generator.get_state()) for generator in reached.generators.values()]
        self.own: set[int] = set()

    def generators(self) -> list[torch.Generator]:
        """The generators that a replay rewinds."""
        return [generator for generator, _ in self._generators]

    def modes(self) -> list[bool]:
        """Whether each module it reaches trains."""
        return list(map(_training, self._modules))

    def set_modes(self, modes: list[bool]) -> None:
        """For the time of a replay; it puts back what was there."""
        _set_modes(self._modules, modes)

    def is_sharded(self) -> bool:
        """Whether shards stand where forward had whole parameters: a replay cannot run until they are gathered."""
        here = _parameters(self._modules)
        then = set(map(id, self._parameters))
        shards = any(id(parameter) not in then and hasattr(parameter, "placements") for parameter in here)
        return shards or any(map(compat.is_freed, self._parameters))

    @property
    def needs_grad(self) -> bool:
        """Whether a parameter or a captured tensor needs a gradient."""
        return True in self._requires_grad or any(needs for _, _, needs in self._captured)

    def with_graph(self, reached: Reach) -> str | None:
        """The name of a tensor with a graph of its own that stands for a parameter, as in `functional_call`."""
        if all(map(_is_leaf, self._parameters)):
            return None
        found = [p for p in self._parameters if p.requires_grad and not p.is_leaf]
        return _names_of(found[:1], reached)[0] if found else None

    def tensors(self) -> list[torch.Tensor]:
        """Parameters, and captured tensors."""
        captured = [tensor for tensor in (place() for place, _, _ in self._captured) if tensor is not None]
        return self._parameters + captured

    @property
    def modules(self) -> list[nn.Module]:
        """The modules it reaches, those inside them included."""
        return self._modules

    def after_forward(self) -> None:
        """Note what forward changed. What forward itself writes, other than buffers, is the user's own state."""
        self.buffers.after_forward()
        self.own = set(map(id, self._changed()))

    def begin(self, replay: Replay, function: Callable[..., Any], *, complete: bool) -> Begun:
        """Make everything as forward found it.

        Args:
            replay: waits for its turn with what it changes.
            function: what it will run.
            complete: whether forward has returned; in its middle, what was written was written by itself.

        Raises:
            StateChangedError: a name stands for another module now. What else was changed is watched.
        """
        moved = self._moved()
        everything = moved != [] or turns.any_taken() or list(map(_training, self._modules)) != self._modes
        wanted = map(id, self._modules) if everything else self.buffers.owners()
        begun = Begun(turns.take(wanted, replay), self._modules, self._parameters)
        try:
            begun.children = _swap_children(self._children)
            if moved:
                begun.places = _swap_parameters(moved)
            stale = self.buffers.stale()
            gone = (buffer.here() for buffer in stale if buffer.start is None)
            lost = [tensor for tensor in gone if tensor is not None]
            if complete:
                begun.watch = self._watch(replay, function, lost)
            self._set(begun, stale)
        except BaseException:
            begun.put_back()
            raise
        return begun

    @contextmanager
    def begun(self, replay: Replay, function: Callable[..., Any], *, complete: bool) -> Iterator[Watch | None]:
        """`begin`, and put back what was there; gives the watch to enter around the function, if there is one."""
        begun = self.begin(replay, function, complete=complete)
        try:
            yield begun.watch
        finally:
            begun.put_back()

    def _set(self, begun: Begun, stale: list[Buffer]) -> None:
        begun.buffers = self.buffers.place(stale)
        if begun.modes != self._modes:
            _set_modes(self._modules, self._modes)
        if begun.requires_grad != self._requires_grad:
            _switch(self._parameters, self._requires_grad)
        for place, _, requires_grad in self._captured:
            tensor = place()
            if tensor is not None and tensor.requires_grad != requires_grad:
                begun.switched += _switch([tensor], [requires_grad])
        begun.generators = [(generator, generator.get_state()) for generator, _ in self._generators]
        for generator, state in self._generators:
            generator.set_state(state)

    def _watch(self, replay: Replay, function: Callable[..., Any], lost: list[torch.Tensor]) -> Watch | None:
        changed = [tensor for tensor in self._changed() if id(tensor) not in self.own] + lost
        rebound = self._rebound(replay, function) if self._names else []
        if not changed and not rebound:
            return None
        names = _names_of(changed, reach(function, self._opaque))
        return Watch(replay, list(zip(names, changed, strict=True)), rebound)

    def _changed(self) -> list[torch.Tensor]:
        """Parameters and captured tensors that have another version than before forward."""
        now = compat.versions_of(self._parameters)
        changed: list[torch.Tensor] = []
        if now != self._versions:
            changed += [self._parameters[index] for index in range(len(now)) if now[index] != self._versions[index]]
        for place, version, _ in self._captured:
            tensor = place()
            if tensor is not None and compat.version_of(tensor) != version:
                changed.append(tensor)
        return changed

    def _moved(self) -> Places:
        """Modules whose parameters are other objects than in forward, and what they had; not where they are sharded."""
        here = [id(p) for module in self._modules if module._parameters for p in module._parameters.values()]
        if here == [id(p) for _, there in self._places for p in there.values()]:
            return []
        then = {id(module): there for module, there in self._places}
        pairs = ((module, then.get(id(module), {})) for module in self._modules)
        return [(module, there) for module, there in pairs if _differ(module._parameters, there)]

    def _rebound(self, replay: Replay, function: Callable[..., Any]) -> list[tuple[str, torch.Tensor]]:
        """Names that stand for other tensors now: variables of outer functions, globals that were set anew.

        A name that the function itself sets is the user's own state.
        """
        again = reach(function, self._opaque)
        now = {} if again is None else {name: place() for name, place in again.names.items()}
        then = {name: place() for name, place in self._names.items()}
        own = frozenset() if again is None else again.own()
        other = [
            name
            for name in {**then, **now}
            if name[1] not in own and (now.get(name) is None or now.get(name) is not then.get(name))
        ]
        refused = [name[1] for name in other if not isinstance(now.get(name), torch.Tensor)]
        if refused:
            raise StateChangedError(replay.label, [], refused)
        found = [(name[1], now.get(name)) for name in other]
        return [(name, tensor) for name, tensor in found if isinstance(tensor, torch.Tensor)]


class Begun:
    """What a replay found and has to put back.

    Attributes:
        watch: to enter around the function if something it reaches was changed since forward.
    """

    __slots__ = (
        "_turn",
        "buffers",
        "children",
        "generators",
        "modes",
        "modules",
        "parameters",
        "places",
        "requires_grad",
        "switched",
        "watch",
    )

    def __init__(self, turn: tuple[int, ...], modules: list[nn.Module], parameters: list[torch.Tensor]) -> None:
        self._turn = turn
        self.modules = modules
        self.modes = list(map(_training, modules))
        self.parameters = parameters
        self.requires_grad = list(map(_requires_grad, parameters))
        self.switched: list[tuple[torch.Tensor, bool]] = []
        self.children: Children = []
        self.places: Places = []
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.buffers: buffers.Found = []
        self.watch: Watch | None = None

    def put_back(self) -> None:
        """The replay has ended, one way or the other."""
        buffers.put_back(self.buffers)
        _swap_parameters(self.places)
        _swap_children(self.children)
        if list(map(_training, self.modules)) != self.modes:  # forward's, or switched by a function that stopped
            _set_modes(self.modules, self.modes)
        if list(map(_requires_grad, self.parameters)) != self.requires_grad:
            _switch(self.parameters, self.requires_grad)
        for tensor, requires_grad in self.switched:
            tensor.requires_grad_(requires_grad)
        for generator, state in self.generators:
            generator.set_state(state)
        turns.give_back(self._turn)


def _names_of(tensors: list[torch.Tensor], reached: Reach | None) -> list[str]:
    known = {} if reached is None else {id(tensor): name for name, tensor in reached.tensors.values()}
    for path, module in () if reached is None else reached.modules.values():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            known.setdefault(id(tensor), f"{path}.{name}" if path else name)
    return [known.get(id(tensor), "a tensor that it no longer reaches") for tensor in tensors]


def _swap_children(wanted: Children) -> Children:
    """Give modules the children they had; return what they have, of those that differ."""
    found = [(module, dict(module._modules), children) for module, children in wanted if not _same(module, children)]
    for module, _, children in found:
        module._modules.clear()
        module._modules.update(children)
    return [(module, there) for module, there, _ in found]


def _swap_parameters(wanted: Places) -> Places:
    """Give modules the parameters they had, or what stood for them; return what they have."""
    found = [(module, dict(module._parameters)) for module, _ in wanted]
    for module, there in wanted:
        module._parameters.clear()
        module._parameters.update(there)
    return found


def _differ(here: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    """Whether modules have other parameters; not if one is cut into shards otherwise: whoever does that swaps them."""
    other = [(here.get(name), then.get(name)) for name in {**here, **then} if here.get(name) is not then.get(name)]
    return other != [] and not any(_swapped(one, another) for one, another in other)


def _swapped(one: Any, another: Any) -> bool:
    """Whether these are a parameter and its shards. What merely stands for a parameter is neither."""
    parameters = isinstance(one, nn.Parameter) and isinstance(another, nn.Parameter)
    return parameters and any(getattr(one, name, None) != getattr(another, name, None) for name in _CUT)


def _same(module: nn.Module, children: dict[str, nn.Module | None]) -> bool:
    here = module._modules
    return list(here) == list(children) and list(map(id, here.values())) == list(map(id, children.values()))


def _set_modes(modules: list[nn.Module], modes: list[bool]) -> None:
    for module, training in zip(modules, modes, strict=True):
        module.training = training


def _switch(tensors: list[torch.Tensor], wanted: list[bool]) -> list[tuple[torch.Tensor, bool]]:
    """Freeze or thaw leaves; return what to put back."""
    switched: list[tuple[torch.Tensor, bool]] = []
    for tensor, requires_grad in zip(tensors, wanted, strict=True):
        if tensor.requires_grad != requires_grad and tensor.is_leaf:
            switched.append((tensor, tensor.requires_grad))
            tensor.requires_grad_(requires_grad)
    return switched


def _parameters(modules: list[nn.Module]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for module in modules:
        if module._parameters:
            found += [parameter for parameter in module._parameters.values() if parameter is not None]
    return found


def _modules(reached: Reach) -> list[nn.Module]:
    found = [module for _, module in reached.modules.values() if _is_plain(module)]
    seen = set(map(id, found))
    for module in found:  # grows while it is walked
        if module._modules:
            for child in module._modules.values():
                if child is not None and id(child) not in seen and _is_plain(child):
                    seen.add(id(child))
                    found.append(child)
    return found


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's parameters and buffers are Python's; those of a scripted one are behind C++."""
    return type(module._buffers) is dict
