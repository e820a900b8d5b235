"""The torch platform: regrow's own verbs, looked up when the platform is made. Must never do what they do."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from regrow.platform.base import Platform, Wrapped


class TorchPlatform(Platform):
    """regrow on PyTorch: every method is the function of `regrow` of the same name."""

    name = "torch"

    def __init__(self) -> None:
        self._call: Any = import_module("regrow.call")
        self._wrappers: Any = import_module("regrow.wrappers")
        self._scheduling: Any = import_module("regrow.scheduling")

    def checkpoint(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `regrow.checkpoint`."""
        return self._call.checkpoint(function, *args, **kwargs)

    def checkpoint_wrapper(self, module_or_fn: Wrapped, **checkpoint_kwargs: Any) -> Wrapped:
        """As `regrow.checkpoint_wrapper`."""
        wrapped: Wrapped = self._wrappers.checkpoint_wrapper(module_or_fn, **checkpoint_kwargs)
        return wrapped

    def checkpoint_exclude_wrapper(self, module_or_fn: Wrapped, *, save_output: bool = True) -> Wrapped:
        """As `regrow.checkpoint_exclude_wrapper`."""
        wrapped: Wrapped = self._wrappers.checkpoint_exclude_wrapper(module_or_fn, save_output=save_output)
        return wrapped

    def recompute_handle_collector_ctx(self) -> AbstractContextManager[list[Any]]:
        """As `regrow.recompute_handle_collector_ctx`."""
        context: AbstractContextManager[list[Any]] = self._scheduling.recompute_handle_collector_ctx()
        return context

    def recompute_handle(self, handle: Any, session_id: Hashable, carrier: bool = False) -> None:
        """As `regrow.recompute_handle`."""
        self._scheduling.recompute_handle(handle, session_id, carrier)

    def recompute_session_ctx(
        self, session_id: Hashable, retain_on_unpack: bool = False
    ) -> AbstractContextManager[None]:
        """As `regrow.recompute_session_ctx`."""
        context: AbstractContextManager[None] = self._scheduling.recompute_session_ctx(session_id, retain_on_unpack)
        return context

    def clear_recompute_session(self, session_id: Hashable) -> None:
        """As `regrow.clear_recompute_session`."""
        self._scheduling.clear_recompute_session(session_id)
