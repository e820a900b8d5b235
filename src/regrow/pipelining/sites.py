"""Sites: what is known of the checkpointed calls of a stage, by their place in forward. Learned once, then used.

Every micro-batch of a stage makes the same calls in the same order. What dw read of the first one is what it will read
of the next; where it is not, that call is replayed once more, and the site is learned anew.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regrow._core import compat
from regrow._core.frame import Frame, Owner


class Sites:
    """The sites of one stage.

    Attributes:
        misses: how many calls were replayed once more because dw read what had been let go.

    Memory: a few numbers per site.
    """

    __slots__ = ("_bytes", "_module", "_unread", "misses")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._unread: dict[tuple[int, str], frozenset[int]] = {}
        self._bytes: dict[tuple[int, str], int] = {}
        self.misses = 0

    def unread(self, index: int, frame: Frame) -> frozenset[int] | None:
        """What dw does not read of a call; None where that is not known yet."""
        return self._unread.get((index, frame.label))

    def learn(self, index: int, frame: Frame, unread: frozenset[int]) -> None:
        """Note what dw did not read."""
        self._unread[index, frame.label] = unread

    def missed(self, index: int, frame: Frame) -> None:
        """Forget what was learned: it was wrong."""
        self.misses += 1
        self._unread.pop((index, frame.label), None)

    def bytes_of(self, index: int, frame: Frame) -> int | None:
        """What the replay of a call holds, without parameters; None where that is not known yet."""
        return self._bytes.get((index, frame.label))

    def measure(self, index: int, frame: Frame, owner: Owner) -> int:
        """Note what the replay that an owner holds takes."""
        held = frame.held(owner)
        own = {compat.storage_key(parameter) for parameter in self._module.parameters()}
        taken = sum(size for storage, size in held.items() if storage not in own)
        self._bytes[index, frame.label] = taken
        return taken


Watch = Callable[[], frozenset[int]]
