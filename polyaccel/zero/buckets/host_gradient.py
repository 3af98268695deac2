"""A bucket's reduced gradient where it waits for the update in host memory, and the device's copies to it.

[Note: Gradients in host memory]
The device copies each reduced gradient to page-locked memory of the host on a separate stream, and the host waits
for none of these copies before it reads the gradient itself. Gradients of later micro-batches are added by the device,
which takes what is there in small pieces and brings the sums back: the host need not follow. The squares of the norm
are added on the way, from what the device has; user code that writes to the gradient makes them void.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import ReduceOp
from polyaccel.offload.tier import Tier
from polyaccel.ops.base import REDUCE, SQUARE_SUMS
from polyaccel.zero.plan.bucket_plan import PlannedBuffer
from polyaccel.zero.plan.layout import Bucket, ShardLayout
from polyaccel.zero.resources import Copies, Staging, sum_dtype


class Measured:
    """The squared norms that the gradients of `layout` have on this rank's `accelerator`."""

    def __init__(self, layout: ShardLayout, accelerator: Accelerator) -> None:
        self._layout = layout
        self._accelerator = accelerator

    def allocate(self) -> Buffer:
        """Zeros, one for each parameter of the layout."""
        return self._accelerator.allocate(len(self._layout.params), sum_dtype(self._accelerator))

    def windows(self, bucket: Bucket, rank: int) -> list[tuple[int, int, int]]:
        """The parameters' parts of a rank's shard: the index of the parameter, the first element and their number."""
        position = self._layout.position
        return [(position[piece.fqn], piece.shard_offset, piece.length) for piece in bucket.slices(rank)]


class HostGradient:
    """`target` in the memory of `tier`, filled by copies from `accelerator` on the stream of `staging`.

    `piece` is memory of the device for what is added or changes its type. `squares` has room for the squared norms of
    all parameters, None where nothing asks for them; `windows` are those that `target` has: the index of the sum, the
    first element and the number of elements.
    """

    def __init__(
        self,
        target: Buffer,
        tier: Tier,
        accelerator: Accelerator,
        staging: Staging,
        piece: PlannedBuffer,
        squares: Buffer | None,
        windows: Sequence[tuple[int, int, int]],
    ) -> None:
        self._target = target
        self._tier = tier
        self._kernels = accelerator.kernels()
        self._staging = staging
        self._piece = piece
        self._squares = squares
        self._windows = windows
        self._are_squares_good = False
        self._copies: Copies | None = None

    @property
    def squares(self) -> Buffer | None:
        """The squared norms of its parameters in the device's memory, in the order of the current stream; None where
        they must be computed from the gradient itself."""
        return self._squares if self._are_squares_good else None

    def put(self, reduced: Buffer, departures: int, *, adds: bool) -> None:
        """Start to copy a reduced gradient from the device; `adds` to what is there. Called on the stream of staging,
        which has waited for so many `departures`."""
        target = self._target
        widens = target.dtype is reduced.dtype or target.dtype.itemsize > reduced.dtype.itemsize
        self._are_squares_good = self._squares is not None and widens
        if self._squares is not None and self._are_squares_good:
            self._squares.fill(0.0)
        if adds or target.dtype is not reduced.dtype:
            self._put_pieces(reduced, adds=adds)
        else:
            self._add_squares(reduced, 0)
            target.start_copy(reduced)
        self._copies = self._staging.mark_arrivals(departures)

    def _put_pieces(self, reduced: Buffer, *, adds: bool) -> None:
        length = min(self._piece.numel, reduced.numel)
        near = self._staging.borrow(self._tier, "grad", self._piece, length)
        for low in range(0, reduced.numel, max(length, 1)):
            window = (low, min(length, reduced.numel - low))
            there, part, new = self._target.view(*window), near.view(0, window[1]), reduced.view(*window)
            if adds:
                part.start_copy(there)
                self._kernels[REDUCE](part, new, ReduceOp.SUM)
            else:
                part.copy_from(new)
            self._add_squares(part, low)
            there.start_copy(part)

    def _add_squares(self, part: Buffer, low: int) -> None:
        """Add the squares of what `part` has, which begins at element `low` of the gradient."""
        if self._squares is None or not self._are_squares_good:
            return
        found = []
        for index, first, numel in self._windows:
            begin, end = max(low, first), min(low + part.numel, first + numel)
            if begin < end:
                found.append((index, part.view(begin - low, end - begin)))
        if found:
            self._kernels[SQUARE_SUMS](self._squares, found)

    def wait(self) -> None:
        """Return when the host finds the gradient in its memory."""
        copies, self._copies = self._copies, None
        if copies is not None:
            self._staging.wait_for(copies)

    def expose(self) -> None:
        """Return when the host may read the gradient and write to it."""
        self.wait()
        self._are_squares_good = False
