"""Where states rest between uses: a `Tier` holds buffers and lends them, group by group, to the kernels of a machine.

The *device* tier keeps everything in the accelerator's own memory, *host* in the host's, *nvme* in files.
`Tier.compute` is the accelerator whose kernels reach the lent buffers. They do the update, so states are never moved to
the device only to be updated there (Ren et al. 2021, "ZeRO-Offload", section 4).

[Note: Buffers that rest elsewhere]
`allocate` returns a `Buffer` under every tier, which can be cut, filled, copied from and to, and saved as bytes at any
time. Where `is_resident` is False its contents are not in memory, so each of these is an access to a file, and
`raw` and `data_ptr` raise InvariantError: kernels get the buffers that `stream_groups` yields instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import InvariantError


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The settings of tiers. Each tier reads those that concern it.

    `run_id` is the same on all ranks of a job and on no other job, `path` a directory for files. `pin_memory` asks for
    host memory that the device copies from and to without the processor. `buffer_count` is how many host buffers may
    stand between kernels and files, `pipeline_read` and `pipeline_write` whether the next group is read, and the last
    one written, while one is in use. `piece_numel` bounds what a host buffer holds where contents only pass through it
    to the device (`Tier.fetch`). `own` are `tier_options` of the config: options of the plugin's own, which `open`
    checks, raising ConfigError.
    """

    run_id: str = "0"
    rank: int = 0
    path: str | None = None
    pin_memory: bool = True
    buffer_count: int = 4
    pipeline_read: bool = False
    pipeline_write: bool = False
    piece_numel: int = 100_000_000
    own: Mapping[str, Any] = field(default_factory=dict)


class Fetch(ABC):
    """A buffer's contents on their way to the device. Until the fetch is over, nothing else may touch source or
    target."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the target has the contents. Raises OffloadError when they cannot be read; it is over then too."""

    @abstractmethod
    def cancel(self) -> None:
        """Wait until nothing is under way, and leave the target undefined. Does nothing to a fetch that is over."""


class DoneFetch(Fetch):
    """A fetch that was over when it was started."""

    def finish(self) -> None:
        return None

    def cancel(self) -> None:
        return None


class Tier(ABC):
    """A place for buffers, on one rank. Used from one thread at a time, and not always from the same: autograd walks
    backward in threads of its own. The tiers of several ranks may be at work at once in threads of one process."""

    API_VERSION: ClassVar[tuple[int, int]] = (2, 0)
    name: ClassVar[str]
    is_resident: ClassVar[bool] = True
    """Whether buffers are always where kernels of `compute` reach them. See [Note: Buffers that rest elsewhere]."""

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason="always there")

    @property
    @abstractmethod
    def compute(self) -> Accelerator:
        """The accelerator whose kernels update the buffers of this tier. Raises InvariantError before `open`."""

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
    def stream_groups(self, groups: Sequence[Sequence[Buffer]]) -> Generator[list[Buffer], None, None]:
        """Walk over groups of buffers that `allocate` gave, each buffer in one group at most.

        The buffers that are yielded for a group have its contents, in memory that kernels of `compute` reach; changes
        are kept when the walk moves on, ends, or is closed early. There is one walk at a time, and meanwhile no other
        access to its buffers. Raises OffloadError at once when contents cannot be read, and at the end of the walk when
        contents could not be written: every group was lent by then, and those contents stay in memory and are lent from
        there.
        """

    @abstractmethod
    def close(self) -> None:
        """Forget all buffers and give back the place. May be called again."""


class HostBackedTier(Tier):
    """Base of tiers whose buffers pass through the host's memory, where the host's kernels update them."""

    def __init__(self) -> None:
        self._memory: HostMemory | None = None

    @property
    def compute(self) -> Accelerator:
        return self._opened.host

    @property
    def _opened(self) -> HostMemory:
        if self._memory is None:
            raise InvariantError(f"the {self.name} tier was used before it was opened, or after it was closed")
        return self._memory

    def stage(self, numel: int, dtype: DType) -> Buffer:
        return self._opened.allocate(numel, dtype)


class HostMemory:
    """Memory that kernels of `host` reach and `accelerator` copies to and from; `pin` asks for page-locked memory.

    `is_the_devices`: the device works in host memory itself.
    """

    def __init__(self, accelerator: Accelerator, host: Accelerator, *, pin: bool) -> None:
        self.host = host
        self.is_the_devices = accelerator is host
        pins = pin and accelerator is not host and accelerator.capabilities().host_pinning
        self._pinned_by = accelerator if pins else None

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        """Zeros."""
        if self._pinned_by is not None:
            return self._pinned_by.allocate(numel, dtype, pinned=True)
        return self.host.allocate(numel, dtype)
