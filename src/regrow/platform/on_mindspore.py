"""The MindSpore platform: the same verbs on MindSpore's own recompute. Must never import torch, nor what imports it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from regrow import arguments, errors
from regrow.platform.base import Platform, Wrapped


class MindSporePlatform(Platform):
    """regrow on MindSpore 2.10, in PyNative mode, CPU included.

    Forward and replays are those of ``mindspore.recompute(..., use_reentrant=False)``, and so are the sessions. regrow
    adds what the verbs promise beyond it: named sessions that own calls, random numbers that repeat, handles that keep
    nothing alive, a failed replay that leaves nothing, and the checks of arguments.

    Raises:
        ImportError: MindSpore is not installed, or lacks a private name that regrow needs.
    """

    name = "mindspore"

    def __init__(self) -> None:
        backend = "regrow.platform._mindspore"
        self._calls: Any = import_module(f"{backend}.calls")
        self._cells: Any = import_module(f"{backend}.cells")
        self._collecting: Any = import_module(f"{backend}.collecting")
        self._sessions: Any = import_module(f"{backend}.sessions")

    def checkpoint(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Platform.checkpoint`, for functions and cells.

        Raises:
            NotImplementedError: ``use_reentrant=True``, ``policy_fn``, ``debug=True``; graph mode; on CPU a cell of the
                family of ``nn.Dropout`` in training.
        """
        names = [name for name in self._calls.OPTION_NAMES if name in kwargs]
        options = self._calls.check_options(**{name: kwargs.pop(name) for name in names})
        if function is None:
            if args or kwargs:
                raise ValueError(arguments.missing_function(kwargs))
            return self._decorator(options)
        arguments.check_callable("function", function, "the function or module to run")
        return self._calls.run(function, arguments.label_of(function), args, kwargs, options)

    def checkpoint_wrapper(self, module_or_fn: Wrapped, **checkpoint_kwargs: Any) -> Wrapped:
        """As `Platform.checkpoint_wrapper`, for cells and functions."""
        wrapped: Wrapped = self._cells.wrapped(module_or_fn, self._cells.checked(checkpoint_kwargs))
        return wrapped

    def checkpoint_exclude_wrapper(self, module_or_fn: Wrapped, *, save_output: bool = True) -> Wrapped:
        """Not there: MindSpore's recompute replays every part of the function.

        Raises:
            ValueError: a bad argument.
            NotImplementedError: always otherwise.
        """
        arguments.check_flag("save_output", save_output)
        arguments.check_callable("module_or_fn", module_or_fn, "a module or a function")
        raise NotImplementedError(
            errors.mindspore_lacks(
                "checkpoint_exclude_wrapper",
                "its recompute replays every part of the function",
                "End the checkpointed call before that part and begin another one behind it.",
            )
        )

    def recompute_handle_collector_ctx(self) -> AbstractContextManager[list[Any]]:
        """As `Platform.recompute_handle_collector_ctx`."""
        context: AbstractContextManager[list[Any]] = self._collecting.collector()
        return context

    def recompute_handle(self, handle: Any, session_id: Hashable, carrier: bool = False) -> None:
        """As `Platform.recompute_handle`.

        Raises:
            NotImplementedError: ``carrier=True``.
        """
        arguments.check_session_id(session_id)
        arguments.check_flag("carrier", carrier)
        if carrier:
            raise NotImplementedError(
                errors.mindspore_lacks(
                    "carrier=True", "its replays run outside of any backward", "Leave carrier at False."
                )
            )
        self._calls.prefire(handle, session_id)

    def recompute_session_ctx(
        self, session_id: Hashable, retain_on_unpack: bool = False
    ) -> AbstractContextManager[None]:
        """As `Platform.recompute_session_ctx`. A call that backward reaches inside belongs to the session from then on.

        Raises:
            regrow.RegrowError: when it is left: inside it, with ``retain_on_unpack=False``, a value was read twice.
        """
        arguments.check_session_id(session_id)
        arguments.check_flag("retain_on_unpack", retain_on_unpack)
        context: AbstractContextManager[None] = self._sessions.Opened(session_id, retain=retain_on_unpack)
        return context

    def clear_recompute_session(self, session_id: Hashable) -> None:
        """As `Platform.clear_recompute_session`."""
        self._sessions.clear(arguments.check_session_id(session_id))

    def _decorator(self, options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            arguments.check_callable("function", function, "the function to decorate")
            checkpointed: Callable[..., Any] = self._cells.wrapped_function(function, options)
            return checkpointed

        return decorate
