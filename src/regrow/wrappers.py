"""Wrappers: modules and functions that checkpoint each call, or are never replayed. Must never change a name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import getattr_static, signature
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

from torch import nn

from regrow import arguments
from regrow._core import regions
from regrow._engines.function.replay import ReentrantOptions
from regrow._engines.hooks.replay import Options
from regrow.arguments import label_of
from regrow.becoming import STATE, become, check_free
from regrow.call import OPTION_NAMES, Result, check_options, run

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
    options = checked_options(checkpoint_kwargs)
    if not isinstance(module_or_fn, nn.Module):
        arguments.check_callable("module_or_fn", module_or_fn, "a module or a function")
        return cast("Wrapped", _wrapped_function(module_or_fn, options))
    check_free(module_or_fn, "module_or_fn")
    become(module_or_fn, _checkpointed, (options, _label(module_or_fn, "")))
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
    options = checked_options(checkpoint_kwargs)
    selects = _selector(where)
    selected = [(name, module) for name, module in model.named_modules() if selects(name, module)]
    if not selected:
        seen = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ValueError(f"where selects no module of {type(model).__name__}. Its modules are of the classes {seen}.")
    for name, module in selected:
        check_free(module, name or type(model).__name__)
    return [become(module, _checkpointed, (options, _label(module, name))) for name, module in selected]


def checkpoint_exclude_wrapper(module_or_fn: Wrapped, *, save_output: bool = True) -> Wrapped:
    """Make a module or a function a SAVE region: inside a checkpointed call it runs once, and is never replayed.

    For what is dear to run again, or must not run twice: attention, a grouped matrix product, a collective, a router.
    A replay goes around it and finds its output as it was; gradients through it are those of plain autograd. Outside
    checkpointed calls, inside another region and while torch.compile or export traces it is a plain call.

    Args:
        module_or_fn: an ``nn.Module``, which is changed in place and returned, or any other callable, which is wrapped.
        save_output: keep the output for replays. False where it goes into another region and nowhere else: replays
            get a tensor without memory then, which may be viewed and handed on, and raises where its values are read.

    Returns:
        The module, now an instance of a subclass of its class, or a function with the callable's name. A region is the
        whole call of a module: its hooks run once, too.

    Raises:
        ValueError: a bad argument, or a module that is wrapped already, has a ``forward`` of its own instance, or is
            traced or scripted code.
        regrow.CheckpointError: from the checkpointed call: the region wrote into its arguments, its output was changed
            in place although a replay needs it, it raised and the function went on, it was called under a torch.func
            transform, or it returned tensors in an object that cannot be taken apart. From backward: the replay
            reaches regions in another order or number than forward, an output that is not kept is read, or something
            that the region keeps was changed in place.

    Memory: from the call until the graph of the checkpointed call dies it holds the outputs, unless ``save_output`` is
        False, and what its operators save, but for tensors that it is given, and views of them: those are brought back
        by the replay. Where saved-tensor hooks surround the call, such as ``save_on_cpu``, both pass through them.

    Threads: a region is one where it runs on the thread of the checkpointed call.
    """
    arguments.check_flag("save_output", save_output)
    if not isinstance(module_or_fn, nn.Module):
        arguments.check_callable("module_or_fn", module_or_fn, "a module or a function")
        return cast("Wrapped", _saved_function(module_or_fn, _Saving(label_of(module_or_fn), save_output)))
    check_free(module_or_fn, "module_or_fn")
    become(module_or_fn, _saved, _Saving(label_of(type(module_or_fn)), save_output))
    return module_or_fn


def save_region(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function as a SAVE region: the form of `checkpoint_exclude_wrapper` for one call.

    Args:
        function: what to run.
        *args: its positional arguments.
        **kwargs: its keyword arguments.

    Returns:
        What the function returns; in a replay, what it returned in forward.

    Raises:
        ValueError: the function is none.
        regrow.CheckpointError: as `checkpoint_exclude_wrapper`.
    """
    arguments.check_callable("function", function, "the function or module to run")
    result: Result = regions.run(function, label_of(function), args, kwargs, save_output=True)
    return result


def _checkpointed(base: Any) -> dict[str, Any]:
    """Checkpointed: ``forward`` is."""
    plain: Any = base.forward
    # A forward that is static or of the class takes no module.
    takes_self = isinstance(getattr_static(base, "forward"), FunctionType)

    @wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = partial(plain, self) if takes_self else plain
        state = self.__dict__.get(STATE)
        if state is None:  # made by the class itself, as a slice of a Sequential is: nobody asked to wrap that
            return function(*args, **kwargs)
        options, label = state
        return run(function, label, args, kwargs, options)

    return {"forward": forward}


def _saved(base: Any) -> dict[str, Any]:
    """A SAVE region: the whole call is, hooks included."""
    plain: Any = base.__call__

    @wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__.get(STATE)
        if state is None:
            return plain(self, *args, **kwargs)
        return regions.run(partial(plain, self), state.label, args, kwargs, save_output=state.save_output)

    return {"__call__": call}


class _Saving(NamedTuple):
    """How a module or function is a SAVE region."""

    label: str
    save_output: bool


def _label(module: nn.Module, name: str) -> str:
    cls: Any = type(module)
    forward = f"{label_of(cls)}.forward"
    return f"{name} ({forward})" if name else forward


def checked_options(checkpoint_kwargs: dict[str, Any]) -> Options | ReentrantOptions:
    """Checked options of a call that were given as keywords; ValueError names one that there is not."""
    arguments.check_names(checkpoint_kwargs, ("use_reentrant", *OPTION_NAMES))
    return check_options(**checkpoint_kwargs)


def _saved_function(function: Callable[..., Any], saving: _Saving) -> Callable[..., Any]:
    @wraps(function)
    def saved(*args: Any, **kwargs: Any) -> Any:
        return regions.run(function, saving.label, args, kwargs, save_output=saving.save_output)

    return saved


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
