"""Norms that stay on the device until they are asked for.

[Note: Unread norms]
Where a norm decides nothing, an update need not know it: the device computes and sums it, and copies it to page-locked
memory of the host. The host reads it when the copy is over, or waits for that where it is asked for (by a monitor, a
save or `get_global_grad_norm`). What is read is what a host that waits would read, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

from polyaccel.accelerators.base import Accelerator, Event
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.zero.update.global_norm import GradientNorm


class UnreadNorm:
    """A norm on its way to the host. `interpret` makes it of the vector that has arrived."""

    def __init__(
        self,
        event: Event,
        vectors: tuple[Buffer, Buffer],
        interpret: Callable[[Buffer], GradientNorm],
        give_back: Callable[[Buffer], None],
    ) -> None:
        self._event = event
        self._vectors: tuple[Buffer, Buffer] | None = vectors
        """The vector of the device, which lives as long as it is copied, and that of the host."""
        self._interpret = interpret
        self._give_back = give_back
        self._found: GradientNorm | None = None

    def has_arrived(self) -> bool:
        """Whether `read` waits for nothing."""
        return self._vectors is None or self._event.is_reached()

    def read(self) -> GradientNorm:
        """The norm. Waits for the device where it has not come so far."""
        if self._vectors is not None:
            if not self._event.is_reached():
                self._event.synchronize()
            _, arrived = self._vectors
            self._found = self._interpret(arrived)
            self._give_back(arrived)
            self._vectors = None
        assert self._found is not None  # set where the vectors are released
        return self._found


class NormReader:
    """Starts copies of norms to the host, through page-locked memory that is used again."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._free: list[Buffer] = []

    def start(self, vector: Buffer, interpret: Callable[[Buffer], GradientNorm]) -> UnreadNorm:
        """Copy `vector` once the current stream has computed it."""
        fits = bool(self._free) and self._free[-1].numel == vector.numel
        target = self._free.pop() if fits else self._allocate(vector.numel, vector.dtype)
        target.start_copy(vector)
        event = self._accelerator.current_stream().record()
        return UnreadNorm(event, (vector, target), interpret, self._free.append)

    def _allocate(self, numel: int, dtype: DType) -> Buffer:
        return self._accelerator.allocate(numel, dtype, pinned=True)
