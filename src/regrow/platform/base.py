"""Platform: what a scheduler may rely on, whichever framework runs underneath. Must never import one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])


class Platform(ABC):
    """The verbs of regrow on one framework: the same names, arguments, checks and sentences on each.

    Where a framework cannot do what an argument asks for, the verb raises ``NotImplementedError``, which names what is
    missing and another way. ``docs/platforms.md`` lists where the platforms differ.

    Wrong arguments raise ``ValueError``. What fails later is a `regrow.RegrowError`, or a plain ``RuntimeError`` where
    a graph has died; on both platforms the classes carry the same names and fields.

    Attributes:
        name: what `get_platform` calls it.
    """

    name: str

    def __repr__(self) -> str:
        return f"<platform {self.name}>"

    @abstractmethod
    def checkpoint(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Run a function without keeping its activations; regrow them when backward, or a scheduler, asks.

        Without a positional argument it is a decorator, also for methods; the parentheses are required. Where nothing
        is recorded for backward it is a plain call, without a handle.

        Args:
            function: what to run; it runs again for every replay, so it must do the same again.
            *args: its positional arguments.
            **kwargs: its keyword arguments, and the options of `regrow.checkpoint`: ``use_reentrant``,
                ``preserve_rng_state``, ``context_fn``, ``policy_fn``, ``determinism_check``, ``debug``,
                ``early_stop``, ``respect_saved_tensors_hooks``.

        Returns:
            What the function returns, or a decorator.

        Raises:
            ValueError: a bad option.
            NotImplementedError: an option that the framework has nothing for.
            regrow.RegrowError: from backward: the replay differs from forward, or an input was changed in place.
        """

    @abstractmethod
    def checkpoint_wrapper(self, module_or_fn: Wrapped, **checkpoint_kwargs: Any) -> Wrapped:
        """Make a module (torch) or cell (MindSpore), or a function, checkpoint each of its calls.

        Args:
            module_or_fn: a module or cell, which is changed in place and returned, or any other callable, which is
                wrapped.
            **checkpoint_kwargs: options of `checkpoint`.

        Returns:
            The module, whose names of parameters and state do not change, or a function with the callable's name.

        Raises:
            ValueError: a bad option, or a module that is wrapped already or has a forward of its own instance.
        """

    @abstractmethod
    def checkpoint_exclude_wrapper(self, module_or_fn: Wrapped, *, save_output: bool = True) -> Wrapped:
        """Make a module or a function a SAVE region: inside a checkpointed call it runs once, and is never replayed.

        Args:
            module_or_fn: a module, which is changed in place and returned, or any other callable, which is wrapped.
            save_output: keep the output for replays. False where it goes into another region and nowhere else.

        Returns:
            The module, or a function with the callable's name.

        Raises:
            ValueError: a bad argument.
            NotImplementedError: the framework has no SAVE regions.
        """

    @abstractmethod
    def recompute_handle_collector_ctx(self) -> AbstractContextManager[list[Any]]:
        """A context that yields a list, which fills with one opaque handle per checkpointed call made inside.

        Handles come in forward order. A call whose forward raises is taken out again; calls that are plain and calls
        made by a replay are not collected. Collectors nest: the innermost collects. A handle keeps no tensor alive.

        Returns:
            The context manager.
        """

    @abstractmethod
    def recompute_handle(self, handle: Any, session_id: Hashable, carrier: bool = False) -> None:
        """Replay a checkpointed call now and keep what it brings back under a session. The caller's RNG does not move.

        A second call for the same session does nothing. Call it inside a retaining context of the same session, or
        outside any session context. If the replay raises, nothing is held and the call is free for any session.

        Args:
            handle: from `recompute_handle_collector_ctx` of this platform.
            session_id: any hashable name that can be given again.
            carrier: replay inside a small backward of its own, for code that asks whether a backward runs (FSDP2).

        Raises:
            ValueError: a foreign handle, a bad id or flag, or a context of another session or one that lets go is open.
            NotImplementedError: the framework has no carrier.
            RuntimeError: the graph of the call has died, or its forward has not returned.
            regrow.RegrowError: another session is active on the call (nothing is changed), the replay differs from
                forward, or an input was changed in place.
        """

    @abstractmethod
    def recompute_session_ctx(
        self, session_id: Hashable, retain_on_unpack: bool = False
    ) -> AbstractContextManager[None]:
        """A context in which backward reads what a session holds, however many calls backward is cut into.

        A checkpointed call belongs to the session if it was prefired for it, or made while a context of it was open.
        The first backward that reaches such a call without a prefire replays it once; later passes read the same.

        Args:
            session_id: any hashable name that can be given again.
            retain_on_unpack: True keeps what is read for the next pass, False lets each value go as it is read.

        Returns:
            The context manager. Contexts nest only with the same id; the inner ``retain_on_unpack`` holds inside.

        Raises:
            ValueError: a bad argument, or a context of another id is open.
        """

    @abstractmethod
    def clear_recompute_session(self, session_id: Hashable) -> None:
        """Free everything a session holds, read or not. Again, or for an unknown id, it does nothing.

        A later plain backward of the same graph works: it replays for itself.

        Args:
            session_id: the name of the session.

        Raises:
            ValueError: a bad id.
        """
