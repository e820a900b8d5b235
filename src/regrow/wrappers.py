"""Wrappers: modules and functions that checkpoint each call. Must never add a level to a module's names.

A wrapped module is the same object with another class: its class becomes a subclass whose ``forward`` is
checkpointed. Names of parameters, buffers and state, attributes, hooks and ``isinstance`` are therefore those of the
module itself, and nothing points back from it, so it dies with its last reference.

A limit that comes with it: torch's parametrizations change the class as well. Wrap first, parametrize then; the other
order works until the parametrization is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import getattr_static, signature
from types import FunctionType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch.fx
from torch import nn

from regrow import arguments
from regrow._engines.function.replay import ReentrantOptions
from regrow._engines.hooks.replay import Options
from regrow.call import OPTION_NAMES, check_options, label_of, run

_OPTIONS = "_regrow_options"
_LABEL = "_regrow_label"


Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])


def checkpoint_wrapper(module_or_fn: Wrapped, **checkpoint_kwargs: Any) -> Wrapped:
    """Make a module or a function checkpoint each of its calls.

    Args:
        module_or_fn: an ``nn.Module``, which is changed in place and returned, or any other callable, which is wrapped.
        **checkpoint_kwargs: options of `regrow.checkpoint`.

    Returns:
        The module, now an instance of a subclass of its class, or a function with the callable's name. Hooks of the
        module run once, around the checkpoint; hooks of its submodules run again in a replay.

    Raises:
        ValueError: a bad option, or a module that is wrapped already, has a ``forward`` of its own instance, or is
            traced or scripted code.

    Memory: as `regrow.checkpoint`; the wrapper itself holds nothing.

    Threads: as `regrow.checkpoint`.
    """
    options = _checked(checkpoint_kwargs)
    if not isinstance(module_or_fn, nn.Module):
        arguments.check_callable("module_or_fn", module_or_fn, "a module or a function")
        return cast("Wrapped", _wrapped_function(module_or_fn, options))
    _check_free(module_or_fn, "module_or_fn")
    _wrap(module_or_fn, options, _label(module_or_fn, ""))
    return module_or_fn


def apply_checkpointing(
    model: nn.Module,
    where: type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool],
    **checkpoint_kwargs: Any,
) -> list[nn.Module]:
    """Wrap every submodule that ``where`` selects, the model itself included. All are checked before one is changed.

    Modules inside a selected module may be selected, too: they become checkpoints inside a checkpoint, and run once
    more for each level.

    Args:
        model: the model; its names do not change.
        where: a module class, a tuple of classes, or a predicate on (name, module), with "" as the model's own name.
        **checkpoint_kwargs: options of `regrow.checkpoint`.

    Returns:
        The wrapped modules, in the order of ``model.named_modules()``.

    Raises:
        ValueError: nothing is selected, a bad argument, or what `checkpoint_wrapper` refuses.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {model!r} of type {type(model).__name__}.")
    options = _checked(checkpoint_kwargs)
    selects = _selector(where)
    selected = [(name, module) for name, module in model.named_modules() if selects(name, module)]
    if not selected:
        seen = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ValueError(f"where selects no module of {type(model).__name__}. Its modules are of the classes {seen}.")
    for name, module in selected:
        _check_free(module, name or type(model).__name__)
    return [_wrap(module, options, _label(module, name)) for name, module in selected]


class _Checkpointed:
    """What wrapped classes have in common: how they are made, copied and pickled."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Stop here: classes that keep a register of their subclasses are not told of wrapped ones."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        base = type(self)._regrow_base  # type: ignore[attr-defined]
        reduced: Any = super().__reduce_ex__(protocol)
        rebuild, args, *rest = reduced
        args = tuple(base if arg is type(self) else arg for arg in args)
        state: dict[str, Any] = self.__dict__
        return _rebuilt, (rebuild, args, state[_OPTIONS], state[_LABEL]), *rest


# Weakly on both sides: a wrapped class lives as long as its base or a module of it.
_subclasses: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()


def _subclass(base: Any) -> Any:
    known = _subclasses.get(base)
    cls = None if known is None else known()
    if cls is None:
        cls = _new_subclass(base)
        _subclasses[base] = ref(cls)
    return cls


def _new_subclass(base: Any) -> Any:
    plain: Any = base.forward
    # A forward that is static or of the class takes no module.
    takes_self = isinstance(getattr_static(base, "forward"), FunctionType)

    @wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = partial(plain, self) if takes_self else plain
        options = self.__dict__.get(_OPTIONS)
        if options is None:  # made by the class itself, as a slice of a Sequential is: nobody asked to wrap that
            return function(*args, **kwargs)
        return run(function, self.__dict__[_LABEL], args, kwargs, options)

    fields = {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__, "_regrow_base": base}
    becomes = getattr(base, "cls_to_become", None)  # of a lazy module, once it has seen an input
    if becomes is not None:
        fields["cls_to_become"] = _subclass(becomes)
    return type(f"Checkpointed{base.__name__}", (_Checkpointed, base), fields)


def _rebuilt(
    rebuild: Callable[..., nn.Module], args: tuple[Any, ...], options: Options | ReentrantOptions, label: str
) -> nn.Module:
    """A wrapped module from what its own class says of how it is copied and pickled."""
    return _wrap(rebuild(*args), options, label)


def _wrap(module: nn.Module, options: Options | ReentrantOptions, label: str) -> nn.Module:
    cls: Any = type(module)
    module.__dict__[_OPTIONS] = options
    module.__dict__[_LABEL] = label
    module.__class__ = _subclass(cls)
    return module


def _label(module: nn.Module, name: str) -> str:
    cls: Any = type(module)
    forward = f"{label_of(cls)}.forward"
    return f"{name} ({forward})" if name else forward


def _check_free(module: nn.Module, name: str) -> None:
    if _OPTIONS in module.__dict__:
        raise ValueError(f"{name} is checkpointed already: {type(module).__name__}. Wrap each module once.")
    if isinstance(module, (torch.fx.GraphModule, torch.jit.ScriptModule)):
        raise ValueError(
            f"{name} is a traced or scripted {type(module).__name__}, whose forward is generated code that a wrapper "
            "would not reach. "
            "Wrap the module before it is traced or scripted, or wrap a function that calls it."
        )
    if "forward" in module.__dict__:
        raise ValueError(
            f"{name} has a forward of its own instance, which a wrapper would not reach. "
            "Wrap the module before that forward is set, or wrap the function itself."
        )


def _checked(checkpoint_kwargs: dict[str, Any]) -> Options | ReentrantOptions:
    unknown = sorted(set(checkpoint_kwargs) - {"use_reentrant", *OPTION_NAMES})
    if unknown:
        allowed = ", ".join(("use_reentrant", *OPTION_NAMES))
        raise ValueError(f"{', '.join(unknown)}: no option of checkpoint. The options are {allowed}.")
    return check_options(**checkpoint_kwargs)


def _wrapped_function(function: Callable[..., Any], options: Options | ReentrantOptions) -> Callable[..., Any]:
    label = label_of(function)

    @wraps(function)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return run(function, label, args, kwargs, options)

    return checkpointed


def _selector(where: Any) -> Callable[[str, nn.Module], bool]:
    classes = where if isinstance(where, tuple) else (where,)
    if classes and all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
        return lambda _, module: isinstance(module, classes)
    if isinstance(where, (type, tuple)) or not callable(where) or not _takes_two(where):
        raise ValueError(
            f"where must be a module class, a tuple of them, or a predicate on (name, module), got {where!r}."
        )
    return where  # type: ignore[no-any-return]


def _takes_two(predicate: Callable[..., Any]) -> bool:
    try:
        signature(predicate).bind("name", None)
    except TypeError:
        return False
    except ValueError:  # written in C, and silent about what it takes
        pass
    return True
