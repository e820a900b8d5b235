"""Frame: one checkpointed call, and the replays made of it. Abstract: an engine says how a call is replayed.

Who holds whom, so that no cycle is left to the garbage collector:

    autograd graph --> frame --> function, inputs, surroundings
    handle, session  - - weak - - > frame
    frame --> session (while bound)
"""

from __future__ import annotations

import weakref
from _thread import RLock  # threading.RLock is a function around it, and a call makes one lock
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from regrow import errors
from regrow._core.lifecycle import Reason, Replay

if TYPE_CHECKING:
    import torch

    from regrow._core import compat
    from regrow._core.closures import Closure
    from regrow._core.environment import Environment
    from regrow._core.inputs import Inputs
    from regrow._core.regions import Entry
    from regrow._core.session import Session, Unread
    from regrow._core.state import State

# Whose replay it is: a session, the id of a graph task, or an object of its own for a read outside backward.
Owner = Any


class Holding(NamedTuple):
    """A tensor that is held for a call.

    Attributes:
        kind: "input", "generator state", "kept" or "replayed".
        owner: whose replay holds it; None for what belongs to the call.
    """

    kind: str
    owner: Owner
    tensor: torch.Tensor


class Frame(ABC):
    """One checkpointed call.

    Attributes:
        label: the function, with its module path where known.
        bound: the session the call belongs to, from prefire or creation until clear.
        active_session: `bound` while a context of it is open, else None. Read without a lock (Rule 7). While somebody
            listens, what stands for it until it is read for the first time.
        consume: whether a read lets the value go. Read without a lock (Rule 7).
        complete: whether forward has returned.
        replays: what was replayed, by owner.
        lock: held while the call is replayed, never taken under the control lock.
        inner: the calls that forward of this one made, weakly, in order; None if it made none.
        number: how it is told of; 0 until somebody listens.
        around: while forward runs, the call whose forward made this one.
        regions: the SAVE regions that forward reached, in order; None if it reached none.
        outer: the replay that made this call; None for a call of forward.
        function: what is called.
        inputs: what it is called with.
        environment: what surrounded forward.
        respects_hooks: whether what is kept for replays passes through the user's saved-tensor hooks.
        foreign_contexts: whether torch's own selective contexts are around the function.
        state: what the function reaches and forward may have changed; None if it reaches nothing.
        silent: whether forward leaves no graph.
        cells: what the cells of the function held before forward; afterwards None, unless it is numbers and the like.
        closure: what the function closed over when forward returned; None if nothing, or if it is in ``cells``.
        learns: whether what dw reads must be learned by `watch`; else `trim` knows by itself.
    """

    function: Callable[..., Any]
    inputs: Inputs
    environment: Environment

    # On the class, and set only where it differs: a call pays for each field of its own.
    bound: Session | None = None
    inner: list[weakref.ref[Frame]] | None = None
    number = 0
    around: Frame | None = None
    regions: list[Entry] | None = None
    outer: Replay | None = None
    respects_hooks: bool = True
    foreign_contexts: bool = False
    state: State | None = None
    silent: bool = False
    cells: list[Any] | None = None
    closure: Closure | None = None
    learns: bool = True

    def __init__(self, label: str) -> None:
        self.label = label
        self.active_session: Session | Unread | None = None
        self.consume = False
        self.complete = False
        self.replays: dict[Owner, Replay] = {}
        self.lock = RLock()

    def add_inner(self, frame: Frame) -> None:
        """Note a call that forward of this one makes."""
        if self.inner is None:
            self.inner = []
        self.inner.append(weakref.ref(frame))

    def nest(self) -> list[Frame]:
        """This call and those inside it, outer before inner."""
        found: list[Frame] = [self]
        for frame in found:  # grows while it is walked
            if frame.inner is not None:
                found += [inner for inner in (place() for place in frame.inner) if inner is not None]
        return found

    @abstractmethod
    def hooks(self) -> compat.Hooks:
        """The hooks that save a tensor for what replays bring back."""

    @abstractmethod
    def position(self) -> int:
        """How many tensors forward has saved so far, of those that replays bring back."""

    @abstractmethod
    def goes_on(self, position: int) -> bool:
        """Whether a replay may go on from a place in forward, now that forward has come this far."""

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor in a forward without a graph needs no gradient, or takes it as a parameter does."""
        raise NotImplementedError

    @abstractmethod
    def prefire(self, session: Session) -> None:
        """Replay now for a session, under `lock`; nothing happens if that was done already."""

    @abstractmethod
    def release(self, owner: Owner, reason: Reason) -> None:
        """Drop what the replay for an owner holds. The only door out."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what was kept in forward for the replays of this call; they run everything again."""

    @abstractmethod
    def held(self, owner: Owner) -> dict[int, int]:
        """Bytes of what the replay for an owner holds, by the identity of its storage."""

    @abstractmethod
    def values(self, owner: Owner) -> list[torch.Tensor]:
        """What the replay for an owner holds."""

    @abstractmethod
    def holdings(self) -> Iterator[Holding]:
        """What is held for this call now."""

    @abstractmethod
    def watch(self, owner: Owner) -> Callable[[], frozenset[int]]:
        """Note what the replay for an owner holds now; the answer tells which of it nobody has taken away since."""

    @abstractmethod
    def trim(self, owner: Owner, unread: frozenset[int]) -> None:
        """Let go of what `watch` found nobody to take away, in a call of the same function with inputs of this kind."""


class Handle:
    """A checkpointed call as a scheduler sees it: opaque.

    Memory: keeps neither the call nor any tensor alive.
    """

    __slots__ = ("__weakref__", "_frame", "_label", "_saved_nothing")

    def __init__(self, frame: Frame) -> None:
        self._frame = weakref.ref(frame)
        self._label = frame.label
        # Its backward needs no saved tensor: there will never be anything to replay, and the frame dies at once.
        self._saved_nothing = False

    def __repr__(self) -> str:
        return f"<handle of {self._label}>"


def frame_of(handle: Handle) -> Frame:
    """The frame behind a handle; RuntimeError if its graph has died."""
    frame = handle._frame()
    if frame is None:
        raise RuntimeError(errors.released_frame(handle._label))
    return frame
