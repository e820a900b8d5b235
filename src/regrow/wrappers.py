"""Wrappers: modules and functions that checkpoint each call. Must never add a level to a module's names.

A wrapped module is the same object with another class: its class becomes a subclass whose ``forward`` is
checkpointed. Names of parameters, buffers and state, attributes, hooks and ``isinstance`` are therefore those of the
module itself, and nothing points back from it, so it dies with its last reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

from torch import nn

from regrow import arguments
from regrow._engines.hooks.replay import Options
from regrow.call import OPTION_NAMES, check_options, label_of, run

_OPTIONS = "_regrow_options"
_LABEL = "_regrow_label"


def checkpoint_wrapper(module_or_fn: Any, **checkpoint_kwargs: Any) -> Any:
    """Make a module or a function checkpoint each of its calls.

    Args:
        module_or_fn: an ``nn.Module``, which is changed in place and returned, or any other callable, which is wrapped.
        **checkpoint_kwargs: options of `regrow.checkpoint`.

    Returns:
        The module, now an instance of a subclass of its class, or a function with the callable's name. Hooks of the
        module run once, around the checkpoint; hooks of its submodules run again in a replay.

    Raises:
        ValueError: a bad option, a module that is wrapped already or has a ``forward`` of its own instance.

    Memory: as `regrow.checkpoint`; the wrapper itself holds nothing.

    Threads: as `regrow.checkpoint`.
    """
    options = _checked(checkpoint_kwargs)
    if not isinstance(module_or_fn, nn.Module):
        arguments.check_callable("module_or_fn", module_or_fn, "a module or a function")
        return _wrapped_function(module_or_fn, options)
    _check_free(module_or_fn, "module_or_fn")
    return _wrap(module_or_fn, options, "")


def apply_checkpointing(
    model: nn.Module,
    where: type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool],
    **checkpoint_kwargs: Any,
) -> list[nn.Module]:
    """Wrap every submodule that ``where`` selects, the model itself included. All are checked before one is changed.

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
    return [_wrap(module, options, name) for name, module in selected]


class _Checkpointed:
    """What wrapped classes have in common: how they are copied and pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        base = _base_of(type(self))
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _bare, (base,), state


@cache
def _subclass(base: Any) -> type[nn.Module]:
    plain: Any = base.forward

    @wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(partial(plain, self), self.__dict__[_LABEL], args, kwargs, self.__dict__[_OPTIONS])

    fields = {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__, "_regrow_base": base}
    return type(f"Checkpointed{base.__name__}", (_Checkpointed, base), fields)


def _bare(base: Any) -> nn.Module:
    """An empty instance of a wrapped class, for pickle and copy to fill."""
    cls: Any = _subclass(base)
    module: nn.Module = cls.__new__(cls)
    return module


def _base_of(cls: Any) -> Any:
    return cls._regrow_base


def _wrap(module: nn.Module, options: Options, name: str) -> nn.Module:
    cls: Any = type(module)
    label = f"{label_of(cls)}.forward"
    module.__dict__[_OPTIONS] = options
    module.__dict__[_LABEL] = f"{name} ({label})" if name else label
    module.__class__ = _subclass(cls)
    return module


def _check_free(module: nn.Module, name: str) -> None:
    if isinstance(module, _Checkpointed):
        raise ValueError(f"{name} is checkpointed already: {type(module).__name__}. Wrap each module once.")
    if "forward" in module.__dict__:
        raise ValueError(
            f"{name} has a forward of its own instance, which a wrapper would not reach. "
            "Wrap the module before that forward is set, or wrap the function itself."
        )


def _checked(checkpoint_kwargs: dict[str, Any]) -> Options:
    unknown = sorted(set(checkpoint_kwargs) - {"use_reentrant", *OPTION_NAMES})
    if unknown:
        allowed = ", ".join(("use_reentrant", *OPTION_NAMES))
        raise ValueError(f"{', '.join(unknown)}: no option of checkpoint. The options are {allowed}.")
    return check_options(**checkpoint_kwargs)


def _wrapped_function(function: Callable[..., Any], options: Options) -> Callable[..., Any]:
    label = label_of(function)

    @wraps(function)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return run(function, label, args, kwargs, options)

    return checkpointed


def _selector(where: Any) -> Callable[[str, nn.Module], bool]:
    classes = where if isinstance(where, tuple) else (where,)
    if classes and all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
        return lambda _, module: isinstance(module, classes)
    if isinstance(where, (type, tuple)) or not callable(where):
        raise ValueError(
            f"where must be a module class, a tuple of them, or a predicate on (name, module), got {where!r}."
        )
    return where  # type: ignore[no-any-return]
