"""Where states rest between uses: a `Tier` holds buffers and lends them, group by group, to the kernels of a machine.

The *device* tier keeps everything in the accelerator's own memory, *host* in the host's, *nvme* in files. A tier says
whose kernels reach what it lends (`compute`); the step asks those for the update, so states are never moved to the
device only to be updated there (Ren et al. 2021, "ZeRO-Offload", section 4).

[Note: Buffers that rest elsewhere]
What `allocate` returns is a `Buffer` under every tier: it can be cut, filled, copied from and to, and saved as bytes at
any time. Where `is_resident` is False its contents are not in memory, so each of these is an access to a file, and
`raw` and `data_ptr` raise InvariantError: kernels get the buffers that `lend` yields instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.buffer import Buffer
from polyaccel.types import DType


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What a tier may be told. Each takes what concerns it.

    `run_id` is the same on all ranks of a job and on no other job, `path` a directory for files. `pin_memory` asks for
    host memory that the device copies from and to without the processor. `buffer_count` is how many host buffers may
    stand between kernels and files, `pipeline_read` and `pipeline_write` whether the next group is read, and the last
    one written, while one is in use. `piece_numel` bounds what a host buffer holds where contents only pass through it
    to the device (`Tier.fetch`).
    """

    run_id: str = "0"
    rank: int = 0
    path: str | None = None
    pin_memory: bool = True
    buffer_count: int = 4
    pipeline_read: bool = False
    pipeline_write: bool = False
    piece_numel: int = 100_000_000


class Fetch(ABC):
    """A buffer's contents on their way to the device. Source and target are the fetch's until it is over."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the target has the contents. Raises OffloadError when they cannot be read; it is over then too."""

    @abstractmethod
    def drop(self) -> None:
        """Wait until nothing is under way; what the target has then is undefined. Does nothing to one that is over."""


class DoneFetch(Fetch):
    """One that was over when it was started."""

    def finish(self) -> None:
        return None

    def drop(self) -> None:
        return None


class Tier(ABC):
    """A place for buffers, on one rank. Used from one thread at a time."""

    API_VERSION: ClassVar[tuple[int, int]] = (1, 0)
    name: ClassVar[str]
    is_resident: ClassVar[bool] = True
    """Whether buffers are always where kernels of `compute` reach them. See [Note: Buffers that rest elsewhere]."""

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason="always there")

    @property
    @abstractmethod
    def compute(self) -> Accelerator:
        """Whose kernels update what this tier holds. Raises InvariantError before `open`."""

    @abstractmethod
    def open(self, accelerator: Accelerator, host: Accelerator, options: TierOptions) -> None:
        """Make ready to hold states of `accelerator`'s device; `host` runs kernels in host memory and is the same
        object where the device is the host. Raises OffloadError when the place cannot be used."""

    @abstractmethod
    def allocate(self, key: str, numel: int, dtype: DType) -> Buffer:
        """Zeros in this tier. No two buffers have the same `key`, such as `bucket3.exp_avg`.

        Raises OffloadError when there is no room.
        """

    def stage(self, numel: int, dtype: DType) -> Buffer:
        """Memory of `compute` through which gradients and parameters pass between its kernels and the device."""
        return self.compute.allocate(numel, dtype)

    def fetch(self, source: Buffer, target: Buffer) -> Fetch:
        """Start to copy a whole buffer that `allocate` gave to `target` on the device, of equal type and length."""
        target.copy_from(source)
        return DoneFetch()

    @abstractmethod
    def lend(self, groups: Sequence[Sequence[Buffer]]) -> Generator[list[Buffer], None, None]:
        """Walk over groups of buffers that `allocate` gave, each buffer in one group at most.

        What is yielded for a group has its contents, where kernels of `compute` reach them; changes are kept when the
        walk moves on, ends, or is closed early. Only one walk at a time, and no other access to its buffers meanwhile.
        Raises OffloadError when contents cannot be read, at once, or not be written, at the end of the walk: by then
        every group was lent, and what could not be written stays in memory and is lent from there.
        """

    @abstractmethod
    def close(self) -> None:
        """Forget all buffers and give back the place. May be called again."""
