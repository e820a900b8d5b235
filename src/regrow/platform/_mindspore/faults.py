"""What a replay on MindSpore can find wrong: the names and fields of the errors on torch. Must never hold a tensor."""

from __future__ import annotations

from collections.abc import Hashable

from regrow import errors


class CheckpointError(errors.RegrowError):
    """A checkpointed call cannot be replayed, or its replay differs from its forward.

    Attributes:
        label: the checkpointed function.
    """

    def __init__(self, message: str, *, label: str = "") -> None:
        super().__init__(message)
        self.label = label


class FrameBusyError(CheckpointError):
    """Another session is active on the call. Nothing was changed.

    Attributes:
        owner: the id of the session that is active.
        wanted: the id of the session that was refused.
    """

    def __init__(self, label: str, owner: Hashable, wanted: Hashable) -> None:
        super().__init__(errors.busy_frame(label, owner, wanted), label=label)
        self.owner = owner
        self.wanted = wanted


class InputChangedError(CheckpointError):
    """An input was changed in place between forward and replay.

    Attributes:
        names: the arguments, as written in the call.
    """

    def __init__(self, label: str, names: list[str], details: list[str]) -> None:
        super().__init__(errors.changed_input(label, names, details), label=label)
        self.names = names


class ReplayMismatchError(CheckpointError):
    """The replay saved more or fewer tensors than forward did.

    Attributes:
        forward: how many tensors forward saved.
        replay: how many the replay saved, at least.
    """

    def __init__(self, label: str, forward: int, replay: int) -> None:
        super().__init__(errors.other_saved_count(label, forward, replay), label=label)
        self.forward = forward
        self.replay = replay
