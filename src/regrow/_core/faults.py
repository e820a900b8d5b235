"""What a replay can find wrong, as errors that are torch's as well as regrow's. Must never format on the hot path."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch.utils.checkpoint

from regrow import errors


class CheckpointError(errors.RegrowError, torch.utils.checkpoint.CheckpointError):
    """A checkpointed call cannot be replayed, or its replay differs from its forward.

    Attributes:
        label: the checkpointed function, with its module path where known.
    """

    __module__ = "regrow"

    def __init__(self, message: str, *, label: str = "") -> None:
        super().__init__(message)
        self.label = label

    def __reduce__(self) -> Any:
        """Errors travel between processes with their fields."""
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(cls: type[CheckpointError], args: tuple[Any, ...], fields: dict[str, Any]) -> CheckpointError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class FrameBusyError(CheckpointError):
    """Another session is active on the call. Nothing was changed.

    Attributes:
        owner: the id of the session that is active.
        wanted: the id of the session that was refused.
    """

    __module__ = "regrow"

    def __init__(self, label: str, owner: Hashable, wanted: Hashable) -> None:
        super().__init__(errors.busy_frame(label, owner, wanted), label=label)
        self.owner = owner
        self.wanted = wanted


class InputChangedError(CheckpointError):
    """An input was changed in place between forward and replay.

    Attributes:
        names: the arguments, as written in the call.
    """

    __module__ = "regrow"

    def __init__(self, label: str, names: list[str], details: list[str]) -> None:
        super().__init__(errors.changed_input(label, names, details), label=label)
        self.names = names


class StateChangedError(CheckpointError):
    """A parameter, a buffer or a captured tensor was changed between forward and replay.

    Attributes:
        names: what was changed in place, as the function reaches it.
        rebound: names that stand for another tensor or module than in forward.
    """

    __module__ = "regrow"

    def __init__(self, label: str, names: list[str], rebound: list[str]) -> None:
        super().__init__(errors.changed_state(label, names, rebound), label=label)
        self.names = names
        self.rebound = rebound


class RegionError(CheckpointError):
    """A replay cannot go around a SAVE region.

    Attributes:
        region: the function or module that is the region.
    """

    __module__ = "regrow"

    def __init__(self, message: str, *, label: str, region: str) -> None:
        super().__init__(message, label=label)
        self.region = region


class PlaceholderError(CheckpointError):
    """The values of a SAVE region's output were asked for in a replay, but ``save_output=False`` does not keep them.

    Attributes:
        region: the function or module that is the region.
        operator: what asked.
    """

    __module__ = "regrow"

    def __init__(self, region: str, operator: str) -> None:
        super().__init__(errors.misused_placeholder(region, operator), label=region)
        self.region = region
        self.operator = operator


class ValueChangedError(CheckpointError):
    """A tensor saved for backward was overwritten after the replay saved it.

    Attributes:
        index: which saved tensor, in the order forward saved them; None if a SAVE region kept it.
    """

    __module__ = "regrow"

    def __init__(self, label: str, index: int | None) -> None:
        super().__init__(errors.changed_value(label, index), label=label)
        self.index = index


class ReplayMismatchError(CheckpointError):
    """The replay saved other tensors than forward did, or, where values are compared, computed others.

    Attributes:
        forward: how many tensors forward saved.
        replay: how many the replay saved; with early stop it is not asked for more than forward had.
        indices: the saved tensors that differ, in the order forward saved them.
        operator: the first operator of the replay that differs; None where operators are not listed.
        module: the module in which it ran, empty for the function itself; None where it is not known.
        line: the line of user code that called it.
        causes: what is likely, those with evidence first; empty where operators are not listed.
    """

    __module__ = "regrow"

    def __init__(  # noqa: PLR0913 - fields
        self,
        message: str,
        *,
        label: str,
        forward: int,
        replay: int,
        indices: tuple[int, ...],
        operator: str | None = None,
        module: str | None = None,
        line: str | None = None,
        causes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, label=label)
        self.forward = forward
        self.replay = replay
        self.indices = indices
        self.operator = operator
        self.module = module
        self.line = line
        self.causes = causes
