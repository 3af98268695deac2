"""The contract of a comm plugin: `CommBackend` connects ranks, `Communicator` moves buffers between them, `Work` is a
collective under way.

A communicator belongs to one group of ranks and is used by one thread at a time. Every rank of the group calls the same
collectives in the same order. Buffers are flat and contiguous; sizes are in elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.buffer import Buffer
from polyaccel.errors import CommError, ShardingError
from polyaccel.types import DType, ReduceOp

API_VERSION = (1, 0)
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Who this process is and where the ranks meet. Found by `comm.discovery`.

    `source` says what it was read from, for messages. `address` is None at world size 1, where nobody needs to meet.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str | None
    port: int | None
    source: str
    init_method: str | None = None
    """A torch-style URL (`file:///...`, `tcp://...`) that replaces address and port."""


@dataclass(frozen=True, slots=True)
class CallInfo:
    """What a collective is for: read by the recorder and by error messages. A new field breaks no plugin."""

    label: str = ""
    bucket: int | None = None


NO_INFO = CallInfo()


class Work(ABC):
    """A collective under way. Owns the buffers that it reads and writes until waited for."""

    @abstractmethod
    def wait(self) -> None:
        """Make the result visible: to the host on synchronous devices, to the current stream on others.

        Raises CommTimeout or CommError. Waiting twice is allowed.
        """

    @abstractmethod
    def is_done(self) -> bool: ...


class DoneWork(Work):
    """A collective that finished inside its call."""

    def wait(self) -> None:
        return None

    def is_done(self) -> bool:
        return True


class Board(ABC):
    """A small shared notice board beside the collectives: still readable when one of them hangs."""

    @abstractmethod
    def post(self, rank: int, text: str) -> None:
        """Replace what `rank` says of itself. Never blocks longer than a second; raises nothing."""

    @abstractmethod
    def read(self, world_size: int) -> Mapping[int, str]:
        """What each rank said last; ranks that said nothing, or cannot be read, are absent."""


class Communicator(ABC):
    """One group of ranks. `rank` and `world_size` count inside the group; `ranks[i]` is the global rank of member i."""

    rank: int
    world_size: int
    ranks: tuple[int, ...]
    backend: str
    accelerator: Accelerator
    timeout_s: float
    deterministic: bool = False
    """The order in which a reduction adds depends on nothing but the ranks: not on sizes, offsets or timing."""
    summed_first: tuple[tuple[int, ...], ...] = ()
    """Of a deterministic reduction: the ranks that are added first, in order, and whose sums, rounded to the element
    type, are then added in order; empty where all ranks are added one after another."""
    sent_numel: int = 0
    """Elements that this rank has sent to others so far, by the formulas of `comm.record`; 0 where nobody counts."""

    # Eleven methods to provide. With async_op=False the returned work is done.

    @abstractmethod
    def all_reduce(
        self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False, info: CallInfo = NO_INFO
    ) -> Work:
        """Combine `buffer` over all ranks, in place."""

    @abstractmethod
    def reduce_scatter(
        self,
        out: Buffer,
        source: Buffer,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
        info: CallInfo = NO_INFO,
    ) -> Work:
        """Combine `source` over all ranks and keep this rank's part: `out.numel * world_size == source.numel`.

        `out` may be the view of `source` at `rank * out.numel` (in place); the rest of `source` is then undefined.
        """

    @abstractmethod
    def all_gather(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        """Put every rank's `source` side by side into `out`: `source.numel * world_size == out.numel`.

        `source` may be the view of `out` at `rank * source.numel` (in place).
        """

    @abstractmethod
    def broadcast(self, buffer: Buffer, root: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        """Overwrite `buffer` with rank `root`'s (a rank of this group)."""

    @abstractmethod
    def all_to_all(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        """Part j of `source` goes to rank j, part i of `out` comes from rank i; equal parts. Not in place."""

    @abstractmethod
    def send(self, buffer: Buffer, to: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work: ...

    @abstractmethod
    def recv(self, buffer: Buffer, source: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work: ...

    @abstractmethod
    def barrier(self, *, info: CallInfo = NO_INFO) -> None: ...

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, which must pickle, in rank order."""

    @abstractmethod
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of those `ranks` of this group, in that order; None on ranks outside. All ranks call it."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Waits for nobody; calling it twice is allowed."""

    # What has a default.

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        """Zeroed memory that this communicator moves best (registered, pinned, shared: its own business)."""
        return self.accelerator.allocate(numel, dtype)

    def allocate_shared(self, numel: int, dtype: DType) -> Buffer | None:
        """One zeroed memory that every rank of the group maps, or None where there is no such thing.

        Collective: all ranks ask for the same sizes in the same order and get the same answer. What a rank writes there
        the others see after the next collective. An in-place `all_gather` of such a buffer moves nothing: every part
        stands where it belongs, and the call is the moment from which all ranks may read it.
        """
        return None

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Rank `root`'s `value`, on every rank."""
        return self.all_gather_object(value if self.rank == root else None)[root]

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """Every rank's `value` on rank `root`, None elsewhere."""
        values = self.all_gather_object(value)
        return values if self.rank == root else None

    def scatter_object(self, values: Sequence[Any] | None, root: int = 0) -> Any:
        """Element `rank` of rank `root`'s `values`."""
        return self.broadcast_object(values, root)[self.rank]

    def board(self) -> Board | None:
        """Where ranks can leave notes while a collective hangs; None if the backend has no such place."""
        return None


class CommBackend(ABC):
    """A way to connect ranks, such as gloo, nccl or MPI. The entry point names a class of this kind."""

    API_VERSION: ClassVar[tuple[int, int]] = (1, 0)
    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Whether the backend could be used here. Initialises nothing and connects to nobody."""

    @abstractmethod
    def connect(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        """Join the group of all ranks. Raises CommTimeout when they do not come, CommError when they cannot."""


def unusable_error(backend: str, reason: str) -> CommError:
    """The error of a comm backend that was asked for and cannot be used here."""
    return CommError(
        f"comm backend {backend!r} cannot be used: {reason}",
        cure="choose another one: POLYACCEL_COMM or init_distributed(dist_backend=...)",
        value=backend,
    )


def check_collective(kind: str, out: Buffer, source: Buffer, *, world_size: int, parts_of: str) -> None:
    """Refuse sizes and types that no backend can mean. `parts_of` is which of the two holds one part for every rank."""
    whole, part = (out, source) if parts_of == "out" else (source, out)
    if part.numel * world_size != whole.numel:
        raise ShardingError(
            f"{kind}: {part.numel} elements a rank times {world_size} ranks are not {whole.numel}",
            cure="pad the whole so that every rank has an equal part",
            value=(part.numel, whole.numel),
        )
    if out.dtype is not source.dtype:
        raise ShardingError(
            f"{kind}: {source.dtype.value} in, {out.dtype.value} out",
            cure="cast first",
            value=(source.dtype, out.dtype),
        )
