"""Outputs of a SAVE region: what is noted of each in forward, and what a replay gets for it. Must never run the region.

kept      an alias of what the region made
passed    an input, or a view of one: the replay's own
leaf      a parameter, as it is
dropped   a placeholder: what is not kept, since it goes into another region
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from regrow import errors
from regrow._core import compat
from regrow._core.borders import Border, Part
from regrow._core.faults import RegionError
from regrow._core.graft import Graft
from regrow._core.kept import KeptTensor
from regrow._core.placeholder import Placeholder, look_of


class _Bridge(torch.autograd.Function):
    """Outputs of a region in a replay: they need a gradient as in forward, but there is no way through."""

    @staticmethod
    def forward(ctx: Any, labels: tuple[str, str], kept: list[Kept], *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Give what was kept."""
        ctx.labels = labels
        return tuple(made.read(*labels) for made in kept)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Refuse."""
        label, region = ctx.labels
        raise RegionError(errors.region_gradient(label, region), label=label, region=region)


class _Flow(NamedTuple):
    """Whether a gradient goes on from an output, and whether it says that it needs one: some views do without."""

    takes_gradient: bool
    requires_grad: bool

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """A value from which no gradient goes on, and which says of itself what forward's did."""
        value = value.detach()
        if not self.requires_grad:
            return value
        with torch.no_grad():
            return value.requires_grad_().view_as(value)


class Kept:
    """An output that the region made."""

    def __init__(self, value: KeptTensor, flow: _Flow) -> None:
        self._value = value
        self._version: int | None = None
        self._flow = flow

    @property
    def takes_gradient(self) -> bool:
        """Whether a gradient goes on from it."""
        return self._flow.takes_gradient

    def intact(self) -> bool:
        """Whether it is still as the region made it."""
        return self._value.intact()

    def cut(self, label: str, region: str) -> torch.Tensor:
        """As it was, without a way on for gradients."""
        return self._flow.cut(self.read(label, region))

    def read(self, label: str, region: str) -> torch.Tensor:
        """An alias. The user's hooks may give back one tensor each time, which an earlier replay has written."""
        value = self._value.read()
        version = compat.version_of(value)
        if self._version is None:
            self._version = version
        elif version != self._version:
            raise RegionError(errors.region_output_written(label, region), label=label, region=region)
        return value


class Passed:
    """An output that is an input, or a view of one."""

    def __init__(self, part: Part, flow: _Flow) -> None:
        self.part = part
        self._flow = flow

    def again(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same part of the replay's input; cut off from its graph where the region cut it off."""
        value = self.part.of(inputs)
        flow = _Flow(compat.takes_gradient(value), value.requires_grad)
        return value if self._flow.takes_gradient or flow == self._flow else self._flow.cut(value)


class Leaf:
    """An output that is a parameter, or another tensor that no operator made."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = compat.version_of(tensor)

    def intact(self) -> bool:
        """Whether it was left alone since the region."""
        return compat.version_of(self._tensor) == self._version

    def again(self, _: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor itself."""
        return self._tensor


class Dropped:
    """An output that is not kept."""

    def __init__(self, region: str, tensor: torch.Tensor) -> None:
        self._region = region
        self._look = look_of(tensor)
        self._requires_grad = tensor.requires_grad
        self.takes_gradient = compat.takes_gradient(tensor)

    def again(self, _: Sequence[torch.Tensor]) -> torch.Tensor:
        """What raises when it is read."""
        return Placeholder(self._region, self._look, self._requires_grad)

    def read(self, *_: str) -> torch.Tensor:
        """The same, to be the output of a node."""
        return Placeholder(self._region, self._look)


Output = Kept | Passed | Leaf | Dropped


def note(label: str, tensor: torch.Tensor, border: Border, hooks: compat.Hooks | None, *, save_output: bool) -> Output:
    """Note an output of the region that has just run."""
    part = border.itself(tensor) or border.find(tensor)
    takes_gradient = compat.takes_gradient(tensor)
    if part is not None:
        return Passed(part, _Flow(takes_gradient, tensor.requires_grad))
    if takes_gradient and tensor.grad_fn is None:
        return Leaf(tensor)
    if save_output or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return Kept(KeptTensor(tensor, hooks), _Flow(takes_gradient, tensor.requires_grad))
    return Dropped(label, tensor)


def grafted(outputs: Sequence[Output]) -> list[Kept | Dropped]:
    """Those from which a gradient goes on into the region."""
    return [output for output in outputs if isinstance(output, (Kept, Dropped)) and output.takes_gradient]


def all_again(
    outputs: Sequence[Output], inputs: list[torch.Tensor], graft: Graft | None, label: str, region: str
) -> list[torch.Tensor]:
    """All outputs, for a replay of a call that brings these inputs.

    Args:
        outputs: what was noted of them.
        inputs: the tensors that the region is given.
        graft: the region's own graph, if forward left none.
        label: the call that is replayed, for messages.
        region: the region, for messages.
    """
    if graft is not None:
        joined = grafted(outputs)
        with torch.enable_grad():
            made = graft.bridge([output.read(label, region) for output in joined], inputs) if joined else ()
            values = dict(zip(map(id, joined), made, strict=True))
            return [values[id(o)] if id(o) in values else _alone(o, inputs, label, region) for o in outputs]
    kept = [output for output in outputs if isinstance(output, Kept)]
    bridged = [output for output in kept if output.takes_gradient]
    values = {id(output): output.cut(label, region) for output in kept if not output.takes_gradient}
    with torch.enable_grad():  # a region may make what needs a gradient where its caller makes none
        if compat.functorch_active():
            values.update((id(output), output.read(label, region).requires_grad_()) for output in bridged)
        elif bridged:
            gate = torch.empty(0, device="cpu", requires_grad=True)
            sources = [tensor for tensor in inputs if tensor.requires_grad]
            found = _Bridge.apply((label, region), bridged, gate, *sources)  # type: ignore[no-untyped-call]
            values.update(zip(map(id, bridged), found, strict=True))
        return [values[id(output)] if isinstance(output, Kept) else output.again(inputs) for output in outputs]


def _alone(output: Output, inputs: Sequence[torch.Tensor], label: str, region: str) -> torch.Tensor:
    return output.cut(label, region) if isinstance(output, Kept) else output.again(inputs)
