"""Outputs of a SAVE region: what is noted of each in forward, and what a replay gets for it. Must never run the region.

kept      an alias of what the region made
passed    an input, or a view of one: the replay's own
leaf      a parameter, as it is
dropped   a placeholder: what is not kept, since it goes into another region
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from regrow import errors
from regrow._core import compat
from regrow._core.borders import Part
from regrow._core.faults import RegionError
from regrow._core.kept import KeptTensor
from regrow._core.placeholder import Placeholder, look_of


class _Bridge(torch.autograd.Function):
    """Outputs of a region in a replay: they need a gradient as in forward, but there is no way through."""

    @staticmethod
    def forward(ctx: Any, labels: tuple[str, str], kept: list[Kept], *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Give what was kept."""
        ctx.labels = labels
        return tuple(made.value.read() for made in kept)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Refuse."""
        label, region = ctx.labels
        raise RegionError(errors.region_gradient(label, region), label=label, region=region)


class Kept:
    """An output that the region made."""

    def __init__(self, value: KeptTensor, *, requires_grad: bool) -> None:
        self.value = value
        self.requires_grad = requires_grad

    def again(self, _: Sequence[torch.Tensor]) -> torch.Tensor:
        """An alias, as a leaf where it needs a gradient."""
        value = self.value.read()
        return value.requires_grad_() if self.requires_grad else value


class Passed:
    """An output that is an input, or a view of one."""

    def __init__(self, part: Part, *, requires_grad: bool) -> None:
        self._part = part
        self._requires_grad = requires_grad

    def again(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same part of the replay's input; cut off from its graph where the region cut it off."""
        value = self._part.of(inputs)
        same = value.requires_grad == self._requires_grad
        return value if same else value.detach().requires_grad_(self._requires_grad)


class Leaf:
    """An output that is a parameter, or another tensor that no operator made."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def again(self, _: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor itself."""
        return self._tensor


class Dropped:
    """An output that is not kept."""

    def __init__(self, region: str, tensor: torch.Tensor) -> None:
        self._region = region
        self._look = look_of(tensor)
        self._requires_grad = tensor.requires_grad

    def again(self, _: Sequence[torch.Tensor]) -> torch.Tensor:
        """What raises when it is read."""
        return Placeholder(self._region, self._look, self._requires_grad)


Output = Kept | Passed | Leaf | Dropped


def note(
    label: str, tensor: torch.Tensor, part: Part | None, hooks: compat.Hooks | None, *, save_output: bool
) -> Output:
    """Note an output; ``part`` is where it lies in an input, if it does."""
    if part is not None:
        return Passed(part, requires_grad=tensor.requires_grad)
    if tensor.is_leaf and tensor.requires_grad:
        return Leaf(tensor)
    if save_output:
        return Kept(KeptTensor(tensor, hooks), requires_grad=tensor.requires_grad)
    return Dropped(label, tensor)


def all_again(outputs: Sequence[Output], inputs: Sequence[torch.Tensor], label: str, region: str) -> list[torch.Tensor]:
    """All outputs, for a replay of a call that brings these inputs.

    Args:
        outputs: what was noted of them.
        inputs: the tensors that the region is given.
        label: the call that is replayed, for messages.
        region: the region, for messages.
    """
    bridged = [output for output in outputs if isinstance(output, Kept) and output.requires_grad]
    if not bridged or compat.functorch_active():
        return [output.again(inputs) for output in outputs]
    gate = torch.empty(0, requires_grad=True)
    sources = [tensor for tensor in inputs if tensor.requires_grad]
    values = iter(_Bridge.apply((label, region), bridged, gate, *sources))  # type: ignore[no-untyped-call]
    return [next(values) if output in bridged else output.again(inputs) for output in outputs]
