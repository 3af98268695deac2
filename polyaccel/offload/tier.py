"""The contract of a tier plugin: `Tier` stores buffers and lends them, group by group, to kernels.

The *device* tier keeps everything in the accelerator's own memory, *host* in the host's, *nvme* in files.
`Tier.compute` is the accelerator whose kernels reach the lent buffers. They compute the update, so states are never
moved to the device only to be updated there (Ren et al. 2021, "ZeRO-Offload", section 4).

[Note: Non-resident buffers]
`allocate` returns a `Buffer` under every tier, which can be cut, filled, copied from and to, and saved as bytes at any
time. Where `is_resident` is False its contents are not in memory, so each of these is an access to a file, and `raw`
and `data_ptr` raise InvariantError: kernels use the buffers that `stream_groups` yields instead.
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
    """Settings of tiers. Each tier reads those that concern it.

    Attributes:
        run_id: Id that is the same on all ranks of a job and on no other job.
        rank: Global rank of this process.
        path: Directory for files.
        pin_memory: Use host memory that the device copies from and to without the processor.
        buffer_count: Host buffers that may stand between kernels and files.
        pipeline_read: Read the next group while one is in use.
        pipeline_write: Write the last group while one is in use.
        piece_numel: Most elements of a host buffer through which contents pass to the device (`Tier.fetch`).
        own: `tier_options` of the config: options of the plugin's own, which `open` checks.
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
    """A copy of a buffer's contents to the device, under way. Until it is over, nothing else may touch source or
    target."""

    @abstractmethod
    def finish(self) -> None:
        """Block until the target has the contents for work that the current stream is given from now on. The fetch is
        over then, but the host leaves the source as it is until `Tier.end_fetches`.

        Raises:
            OffloadError: The contents cannot be read. The fetch is over too.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Block until nothing is under way, and leave the target undefined. Does nothing to a fetch that is over."""


class DoneFetch(Fetch):
    """A fetch that was over when it was started."""

    def finish(self) -> None:
        return None

    def cancel(self) -> None:
        return None


class Tier(ABC):
    """A place for buffers, on one rank.

    It is used from one thread at a time, but not always the same: autograd runs backward in its own threads. The tiers
    of several ranks may work at once in threads of one process.
    """

    API_VERSION: ClassVar[tuple[int, int]] = (2, 1)
    name: ClassVar[str]
    is_resident: ClassVar[bool] = True
    """Whether buffers are always where kernels of `compute` reach them. See [Note: Non-resident buffers]."""

    @classmethod
    def probe(cls) -> Probe:
        """Return whether the tier could be used here. Opens nothing."""
        return Probe(usable=True, reason="always there")

    @property
    @abstractmethod
    def compute(self) -> Accelerator:
        """The accelerator whose kernels update the buffers of this tier.

        Raises:
            InvariantError: The tier is not open.
        """

    @abstractmethod
    def open(self, accelerator: Accelerator, host: Accelerator, options: TierOptions) -> None:
        """Prepare to hold states of a device.

        Args:
            accelerator: The device of the model.
            host: Runs kernels in host memory. The same object as `accelerator` where the device is the host.
            options: Settings of tiers.

        Raises:
            OffloadError: The place cannot be used.
            ConfigError: An option of `options.own` is invalid.
        """

    @abstractmethod
    def allocate(self, key: str, numel: int, dtype: DType) -> Buffer:
        """Allocate zeros in this tier.

        Args:
            key: Unique name of the buffer, such as `bucket3.exp_avg`.
            numel: Elements of the buffer. 0 is allowed.
            dtype: Element type.

        Returns:
            A buffer that stays valid until `close`. See [Note: Non-resident buffers].

        Raises:
            OffloadError: There is no room.
            InvariantError: The tier is closed.
        """

    def stage(self, numel: int, dtype: DType) -> Buffer:
        """Allocate zeros through which gradients and parameters pass between kernels and the device.

        Args:
            numel: Elements of the buffer.
            dtype: Element type.

        Returns:
            Memory of `compute`, owned by the caller.
        """
        return self.compute.allocate(numel, dtype)

    def fetch(self, source: Buffer, target: Buffer) -> Fetch:
        """Start to copy a whole buffer to the device.

        Args:
            source: Buffer from `allocate`.
            target: Buffer on the device, of equal type and length.

        Returns:
            The fetch. Until it is over, nothing else may touch `source` or `target`.
        """
        target.copy_from(source)
        return DoneFetch()

    def end_fetches(self) -> None:  # noqa: B027 - fetches of most tiers are over when they are finished
        """Return when the host may write to the source of every fetch that is over."""

    @abstractmethod
    def stream_groups(self, groups: Sequence[Sequence[Buffer]]) -> Generator[list[Buffer], None, None]:
        """Walk over groups of buffers and lend their contents to kernels. One walk at a time, and meanwhile no other
        access to its buffers.

        Args:
            groups: Buffers from `allocate`, each in one group at most.

        Yields:
            For each group, in order, buffers with its contents, in memory that kernels of `compute` reach. They are
            valid until the walk moves on. Changes are kept then, also when the walk ends or is closed early.

        Raises:
            OffloadError: At once when contents cannot be read. At the end of the walk when contents could not be
                written: every group was lent by then, and those contents stay in memory and are lent from there.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all buffers and the place. May be called again."""


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
    """Memory that kernels of the host reach and a device copies to and from.

    `is_the_devices` is True where the device works in host memory itself.

    Args:
        accelerator: The device.
        host: Runs kernels in host memory. The same object as `accelerator` where the device is the host.
        pin: Use page-locked memory where the device supports it.
    """

    def __init__(self, accelerator: Accelerator, host: Accelerator, *, pin: bool) -> None:
        self.host = host
        self.is_the_devices = accelerator is host
        pins = pin and accelerator is not host and accelerator.capabilities().host_pinning
        self._pinned_by = accelerator if pins else None
        self.queues_for = accelerator if pins and accelerator.capabilities().streams else None
        """The device, where its streams copy from and to this memory while the host continues."""

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        """Allocate zeros.

        Args:
            numel: Elements of the buffer.
            dtype: Element type.

        Returns:
            A buffer in host memory, owned by the caller.
        """
        if self._pinned_by is not None:
            return self._pinned_by.allocate(numel, dtype, pinned=True)
        return self.host.allocate(numel, dtype)
