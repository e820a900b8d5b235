"""Cells that checkpoint each call: instances of a subclass of their class. Must never add a level to a cell's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from regrow import arguments
from regrow.platform._mindspore import _compat
from regrow.platform._mindspore.calls import OPTION_NAMES, Options, check_options, run

# How a cell is checkpointed, in its own dict: parts of it that the class makes are not.
_STATE = "_regrow_state"


def checked(checkpoint_kwargs: dict[str, Any]) -> Options:
    """Checked options of a wrapper."""
    arguments.check_names(checkpoint_kwargs, OPTION_NAMES)
    return check_options(**checkpoint_kwargs)


def wrapped(cell_or_fn: Any, options: Options) -> Any:
    """A cell, changed in place, or a function around any other callable."""
    if isinstance(cell_or_fn, _compat.mindspore.nn.Cell):
        _check_free(cell_or_fn)
        return _become(cell_or_fn, options)
    arguments.check_callable("module_or_fn", cell_or_fn, "a cell or a function")
    return wrapped_function(cell_or_fn, options)


def wrapped_function(function: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """A function that checkpoints each call of another."""
    label = arguments.label_of(function)

    @wraps(function)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return run(function, label, args, kwargs, options)

    return checkpointed


def _check_free(cell: Any) -> None:
    if _STATE in cell.__dict__:
        raise ValueError(f"module_or_fn is wrapped already: {type(cell).__name__}. Wrap each cell once.")
    if "construct" in cell.__dict__:
        raise ValueError(
            "module_or_fn has a construct of its own instance, which a wrapper would not reach. "
            "Wrap the cell before that construct is set, or wrap the function itself."
        )


def _become(cell: Any, options: Options) -> Any:
    base = type(cell)
    if base not in _subclasses:
        _subclasses[base] = _new_subclass(base)
    cell.__dict__[_STATE] = options
    cell.__class__ = _subclasses[base]
    return cell


# By the class that they checkpoint. Classes are few and live long.
_subclasses: dict[Any, Any] = {}


def _new_subclass(base: Any) -> Any:
    plain: Any = base.construct
    label = f"{arguments.label_of(base)}.construct"

    @wraps(plain)
    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = partial(plain, self)
        options = self.__dict__.get(_STATE)
        return function(*args, **kwargs) if options is None else run(function, label, args, kwargs, options)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        """Copies and pickles are those of the class itself, and become what the cell became."""
        reduced: Any = base.__reduce_ex__(self, protocol)
        rebuild, parts, *rest = reduced
        parts = tuple(base if part is type(self) else part for part in parts)
        return _rebuilt, (rebuild, parts, self.__dict__[_STATE]), *rest

    fields = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "construct": construct,
        "__reduce_ex__": reduce_ex,
    }
    return type(f"Checkpointed{base.__name__}", (base,), fields)


def _rebuilt(rebuild: Callable[..., Any], parts: tuple[Any, ...], options: Options) -> Any:
    """A checkpointed cell, from what its own class says of how it is copied and pickled."""
    return _become(rebuild(*parts), options)
