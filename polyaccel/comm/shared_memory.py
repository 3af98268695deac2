"""Memory that the ranks of a host have in common, and what users of one rank see of it.

[Note: Shared memory, private writes]
Users treat parameters as their own: `p.mul_(0.5)` on every rank means one halving. So they do not get the shared memory
itself but a *face* of it, which has the same values until its user writes there; from then on what was written, and
what lies close to it, is this rank's own. The engine asks what was written, takes over what counts, and lets the face
show the shared values again (`forget`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from polyaccel.core.buffer import Buffer


class SharedMemory(ABC):
    """One memory of all ranks of a group. See [Note: Shared memory, private writes]."""

    whole: Buffer
    """The shared memory itself. What a rank writes here the others see."""
    private_view: Buffer
    """The same elements for this rank's users. What they write here no other rank sees."""

    @abstractmethod
    def written(self) -> Sequence[tuple[int, int]]:
        """Return ranges of elements that cover all writes to `private_view` since the last `forget`."""

    @abstractmethod
    def forget(self) -> None:
        """Let `private_view` have the shared values again; what was written to it is lost."""
