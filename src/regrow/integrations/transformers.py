"""Hugging Face Transformers: the gradient checkpointing of one model becomes regrow's. Must never touch another object.

A layer of Transformers runs through its attribute ``_gradient_checkpointing_func`` while its attribute
``gradient_checkpointing`` is True. Both are set on the layers of the given model, and put back by `disable`. Its own
``activation_checkpointing_enable``, which a Trainer calls, leads here meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from regrow import arguments
from regrow.arguments import label_of
from regrow.call import run
from regrow.wrappers import checked_options

Model = TypeVar("Model", bound=nn.Module)

_SWITCH, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
_ENABLERS = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # the second until Transformers 6
_TOUCHED = (_SWITCH, _FUNCTION, *_ENABLERS)
_BEFORE = "_regrow_before"  # what a module had of these in its own dict, in that dict


def enable(model: Model, *, every_n_layers: int = 1, offload: bool = False, **checkpoint_kwargs: Any) -> Model:
    """Make the gradient checkpointing of a Transformers model regrow's, and switch it on.

    Every layer is one checkpointed call in training mode, with all it is given by position and by keyword as inputs.
    A ``Trainer`` with ``activation_checkpointing=True`` keeps it, with its own ``activation_checkpointing_kwargs`` on
    top; so does ``model.activation_checkpointing_enable()``. What Transformers does about ``use_cache`` it still does:
    no cache while layers are checkpointed. Enabling again changes the options.

    Args:
        model: a model, or any module with layers of one, such as a stage of a pipeline.
        every_n_layers: checkpoint every n-th layer only, the first one included.
        offload: hold the inputs of the layers in host memory.
        **checkpoint_kwargs: options of `regrow.checkpoint`.

    Returns:
        The same model.

    Raises:
        ValueError: a bad option, or a model without a layer that can be checkpointed this way. Nothing was changed.

    Memory: as `regrow.checkpoint`; the model is not held.

    Threads: as `regrow.checkpoint`.

    Source: transformers 5.24, modeling_layers.py (GradientCheckpointingLayer) and modeling_utils.py.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: PLC0415 - only who uses it needs it

    arguments.check_count("every_n_layers", every_n_layers)
    arguments.check_flag("offload", offload)
    options = checked_options(checkpoint_kwargs)
    parts = _parts(model)
    n_layers = 0
    for name, part in parts:
        _remember(part)
        is_layer = isinstance(part, GradientCheckpointingLayer)
        setattr(part, _FUNCTION, LayerCall(_label(name, part), options, offload))
        setattr(part, _SWITCH, not is_layer or n_layers % every_n_layers == 0)
        n_layers += is_layer
    _remember(model)
    for name in _ENABLERS:
        if hasattr(model, name):
            setattr(model, name, Enabler(model, every_n_layers, offload, checkpoint_kwargs))
    return model


def disable(model: Model) -> Model:
    """Undo `enable`: the model checkpoints as it did before, or not at all. Where nothing was enabled it does nothing.

    Args:
        model: what was enabled, or a module around it.

    Returns:
        The same model.

    Raises:
        ValueError: the argument is no module.
    """
    _check_module(model)
    for part in model.modules():
        before = part.__dict__.pop(_BEFORE, None)
        if before is not None:
            for name in _TOUCHED:
                part.__dict__.pop(name, None)
            part.__dict__.update(before)
    return model


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer calls in place of torch's checkpoint."""

    label: str
    options: Any
    offload: bool

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer, whose keywords Transformers has bound into a partial.

        They are taken out: tensors among them are inputs then, which are checked and offloaded, not captured.
        """
        if isinstance(function, partial):
            kwargs = {**function.keywords, **kwargs}
            function = partial(function.func, *function.args)
        with save_on_cpu(pin_memory=torch.accelerator.is_available()) if self.offload else nullcontext():
            return run(function, self.label, args, kwargs, self.options)


class Enabler:
    """Stands on an enabled model for its method of that name, so that whoever calls it gets regrow.

    Memory: holds the model weakly, since the model holds this.
    """

    def __init__(self, model: nn.Module, every_n_layers: int, offload: bool, checkpoint_kwargs: dict[str, Any]) -> None:
        self._model = ref(model)
        self._options = (every_n_layers, offload, checkpoint_kwargs)

    def __call__(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
        *,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Enable again: what is left at its default is what `enable` was told."""
        model = self._model()
        assert model is not None, "called through the model"
        own_n, own_offload, own = self._options
        given = activation_checkpointing_kwargs or gradient_checkpointing_kwargs or {}
        n = own_n if every_n_layers == 1 else every_n_layers
        enable(model, every_n_layers=n, offload=offload or own_offload, **{**own, **given})

    def __reduce__(self) -> Any:
        return type(self), (self._model(), *self._options)


def _parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that take part in Transformers' checkpointing, by name."""
    _check_module(model)
    setter = getattr(model, "_set_gradient_checkpointing", None)
    if setter is not None and "value" in signature(setter).parameters:
        raise ValueError(
            f"{type(model).__name__} has Transformers' old format of gradient checkpointing, which always calls "
            "torch's. Use regrow.apply_checkpointing(model, LayerClass)."
        )
    parts = [(name, module) for name, module in model.named_modules() if hasattr(module, _SWITCH)]
    if not parts:
        raise ValueError(
            f"{type(model).__name__} has no layer that Transformers can checkpoint (a GradientCheckpointingLayer). "
            "Use regrow.apply_checkpointing(model, LayerClass)."
        )
    return parts


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {model!r} of type {type(model).__name__}.")


def _remember(part: nn.Module) -> None:
    own = part.__dict__
    own.setdefault(_BEFORE, {name: own[name] for name in _TOUCHED if name in own})


def _label(name: str, part: nn.Module) -> str:
    forward = f"{label_of(type(part))}.forward"
    return f"{name} ({forward})" if name else forward
