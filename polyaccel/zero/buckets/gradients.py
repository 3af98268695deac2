"""The life of a bucket's gradients: they arrive, fill the bucket, are reduced, and rest for the update.

[Note: Gradient arrival and launch]
Reductions are launched in bucket order on every rank, whatever the order in which gradients appear, for a collective
must meet its like. A bucket is launched early, overlapping the backward pass, once every gradient that it has ever seen
has arrived again; the end of the pass launches the rest, with zeros for what did not come. A gradient that arrives
after its bucket was launched (a parameter used again, a second backward pass, an order never seen before) is *late*: it
is kept aside, and through the step's small all-reduce all ranks reduce that bucket once more before the update.

[Note: Gradient accumulation buffers]
With replicated gradients each rank accumulates in one full buffer and reduces it at the accumulation boundary. With
sharded gradients every pass reduces at once and accumulates in the rank's own slice, through a full buffer borrowed
from a pool only while the bucket is under way. That slice is on the device, or in host memory where the host's kernels
will update it: it leaves the device when its reduction has settled, on its own stream, so that it waits for nothing
that the device computes after the launch ([Note: Gradients in host memory]). Passes that must not reduce (`no_sync`)
accumulate in their own full buffer, which the next reducing pass takes along, also while an earlier one is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import ReduceOp
from polyaccel.errors import InvariantError
from polyaccel.ops.base import REDUCE, SCALE
from polyaccel.zero.buckets.grad_accumulator import GradAccumulator, GradientWriter, PassArrivals
from polyaccel.zero.buckets.grad_state import GradState
from polyaccel.zero.buckets.host_gradient import HostGradient, Measured
from polyaccel.zero.buckets.row_exchange import RowExchange, RowSet
from polyaccel.zero.plan.bucket_plan import TrainedBucketPlan
from polyaccel.zero.plan.placement import Place
from polyaccel.zero.plan.policy import Placement, ReductionPolicy
from polyaccel.zero.plan.pool import BufferPool
from polyaccel.zero.resources import Staging, StepResources


class GradientBucket:
    """The gradients of one bucket on one rank, from the first arrival to the update."""

    def __init__(
        self,
        plan: TrainedBucketPlan,
        reduction: ReductionPolicy,
        parts: StepResources,
        pool: BufferPool[Buffer],
        staging: Staging,
        measured: Measured | None,
    ) -> None:
        self.bucket = bucket = plan.bucket
        self._plan = plan
        self._reduction = reduction
        groups = parts.communicators.get_groups(bucket)
        self._communicator = groups.gradients
        self._accelerator = parts.accelerator
        self.row_exchange = RowExchange.of_bucket(bucket, groups.exact, parts.accelerator)
        """Gradients travel as rows; None: whole."""
        self._row_sets: list[RowSet] | None = []
        """The rows of each reduction since the last update; None where one was whole."""
        self._kernels = parts.accelerator.kernels()
        self._pool = pool
        self._staging = staging
        self._keeps_full = plan.zero.grads is Placement.REPLICATED
        self._tier = parts.tiers.states[Place.DEVICE] if self._keeps_full else parts.tiers.of_update(plan)
        is_off_device = self._tier.compute is not parts.accelerator
        self._state = GradState.EMPTY
        self._pending: Callable[[], None] | None = None
        """Ends the reduction under way."""
        self.is_launched = False
        """This pass takes no more gradients for the bucket: its reduction was launched, or no rank has any."""
        self._arrivals = PassArrivals(len(bucket.slots))
        self.sums = GradAccumulator(bucket, self._kernels)
        self._late: GradAccumulator | None = None
        self.meter: Callable[[Buffer], None] | None = None
        """Is called with what this rank gives to each reduction, before it."""
        self._own: Buffer | None = None
        """Sharded gradients: this rank's reduced slice."""
        self.touched = [False] * len(bucket.slots)
        """Slots with a gradient on this rank since the last update."""

        if self._keeps_full:
            self.sums.use(self._allocate_full(), borrowed=False)
        else:
            allocate = self._tier.stage if is_off_device else parts.accelerator.allocate
            self._own = allocate(plan.gradient.numel, plan.gradient.dtype)
        self._on_host = None
        """The gradient is in host memory that the device's kernels do not reach."""
        if self._own is not None and is_off_device and plan.staged_gradient is not None:
            self._on_host = HostGradient(
                *(self._own, self._tier, parts.accelerator, staging, plan.staged_gradient),
                None if measured is None else measured.allocate(),
                [] if measured is None else measured.windows(bucket, self._communicator.rank),
            )

    # The backward pass.

    def begin_backward(self, *, expects_grads: bool = True) -> None:
        """Count arrivals again; unless it `expects_grads`, one that comes is late."""
        self._arrivals.begin_pass(expects_grads=expects_grads)
        has_full_result = self._keeps_full and self._state is not GradState.EMPTY  # so what comes now is late
        self.is_launched = has_full_result or not expects_grads

    def end_backward(self) -> None:
        """A backward pass is over: from now on expect what has ever arrived, as often as it did."""
        self._arrivals.end_pass()

    @property
    def is_ready(self) -> bool:
        """Every expected gradient of this pass has arrived."""
        return self._arrivals.are_complete

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def needs_staging(self) -> bool:
        """Whether the next arrival of a reducing pass must borrow a buffer."""
        return self.sums.buffer is None and not self.is_launched

    def needs_recasting(self) -> bool:
        """Whether the launch must borrow a buffer, for gradients that travel in another type than they rest in."""
        full = self.sums.buffer
        return full is not None and full.dtype is not self._plan.travelling.dtype

    def add(
        self, slot_index: int, gradient: Buffer | GradientWriter, rows: Buffer | None = None, *, reducing: bool
    ) -> None:
        """Add a flat gradient of any floating type, with its `rows` where these travel; `reducing`: this pass ends in a
        reduction."""
        self.touched[slot_index] = True
        self._arrivals.count(slot_index)
        sums = self.sums
        if self.is_launched:
            sums = self._late = self._late or self._late_sums()
        elif sums.buffer is None:
            sums.use(self._borrow() if reducing else self._allocate_full(), borrowed=reducing)
        sums.put(slot_index, gradient, rows)

    def _allocate_full(self) -> Buffer:
        """A buffer for the whole bucket, in which gradients accumulate."""
        return self._communicator.allocate(self.bucket.numel, self._plan.gradient.dtype)

    def _borrow(self) -> Buffer:
        """A buffer for the whole bucket, in which gradients are reduced."""
        return self._pool.acquire(self._plan.travelling.numel, self._plan.travelling.dtype)

    def _late_sums(self) -> GradAccumulator:
        sums = GradAccumulator(self.bucket, self._kernels)
        sums.use(self._allocate_full(), borrowed=False)
        return sums

    def launch(self) -> None:
        """Start reducing what accumulated, zeros for the missing. Raises InvariantError if launched."""
        if self.is_launched:
            raise InvariantError("a bucket's reduction was launched twice in a pass", value=self.bucket.index)
        self.is_launched = True
        self.finish()
        if self.sums.buffer is None:
            self.sums.use(self._borrow(), borrowed=True)
        borrowed, rows = self.sums.is_borrowed, self.sums.rows
        source = self.sums.take(keep=self._keeps_full)
        if self.meter is not None:
            self.meter(source)
        self._pending = self._reduce(source, rows, is_late=False, borrowed=borrowed)

    def finish(self) -> None:
        """Wait for the reduction under way, if any, and put its result where the update reads."""
        if self._pending is not None:
            settle, self._pending = self._pending, None
            settle()

    def reduce_late(self) -> None:
        """Reduce what came late on any rank and add it to the result. Every rank calls this for the same buckets."""
        self.finish()
        late, self._late = self._late or self._late_sums(), None
        rows = late.rows
        self._reduce(late.take(keep=False), rows, is_late=True, borrowed=False)()

    @property
    def has_late(self) -> bool:
        return self._late is not None

    def result(self) -> Buffer:
        """Return this rank's reduced gradient, to read and to write: a slice, or the bucket under a replicated
        optimizer. Waits for its copy to the host where it rests there."""
        if self._state is GradState.REDUCING:
            raise InvariantError("a gradient was read before its reduction ended", value=self.bucket.index)
        self._expose()
        return self._result

    def _expose(self) -> None:
        """Let the host read and write the result."""
        if self._on_host is not None:
            self._on_host.expose()

    @property
    def has_whole_result(self) -> bool:
        """Whether `result` is the whole bucket."""
        return self._plan.updates_all

    @cached_property
    def _result(self) -> Buffer:
        """The same memory in every step."""
        if self._keeps_full:
            full = self.sums.buffer
            assert full is not None  # allocated for good
            low, high = self._own_bounds() if self._plan.updates_shard else (0, self.bucket.numel)
            return full.view(low, high - low)
        assert self._own is not None  # likewise
        return self._own

    @property
    def squares(self) -> Buffer | None:
        """Squared norms of this rank's part, one a parameter, on the device; None: they come from `own_slices`."""
        return None if self._on_host is None else self._on_host.squares

    @property
    def own_slices(self) -> tuple[tuple[str, Buffer], ...]:
        """This rank's own part of `result`, to be read: the parameters that lie there by name, each with its part."""
        if self._on_host is not None:
            self._on_host.wait()
        return self._own_slices

    @cached_property
    def _own_slices(self) -> tuple[tuple[str, Buffer], ...]:
        low = 0 if self._plan.updates_shard else self._own_bounds()[0]
        slices = self.bucket.slices(self._communicator.rank)
        return tuple((piece.fqn, self._result.view(low + piece.shard_offset, piece.length)) for piece in slices)

    def rows(self) -> RowSet | None:
        """The rows of `result` that had a gradient on some rank; None where it is whole."""
        if self.row_exchange is None or self._row_sets is None:
            return None
        return self.row_exchange.unite([one.indices.view(0, one.count) for one in self._row_sets])

    @property
    def compute(self) -> Accelerator:
        """Whose kernels reach `result`."""
        return self._tier.compute

    @property
    def holds_result(self) -> bool:
        return self._state is GradState.REDUCED

    @property
    def has_content(self) -> bool:
        """Gradients are held that no update has used yet."""
        return any(self.touched) or self._state is not GradState.EMPTY

    def resident(self) -> Iterator[Buffer]:
        """The buffers that this bucket holds now, apart from borrowed ones."""
        own = None if self.sums.is_borrowed else self.sums.buffer
        for buffer in (self._own, own, None if self._late is None else self._late.buffer):
            if buffer is not None:
                yield buffer

    @property
    def holds_unreduced(self) -> bool:
        """Gradients of this rank have accumulated, and no reduction of them was launched."""
        return bool(self.sums.filled)

    def unreduced(self, slot_index: int) -> Buffer | None:
        """The sum that has accumulated on this rank for a slot; None if nothing has."""
        return self.sums.at(slot_index)

    def provide_result(self) -> None:
        """Let there be a reduced gradient to write to: zeros, if nothing of the bucket was reduced or accumulated."""
        self.finish()
        self._expose()
        if self._state is not GradState.REDUCED:
            self._result.fill(0.0)
            self._state = GradState.REDUCED
            self.is_launched |= self._keeps_full

    def drop(self, slot_index: int) -> None:
        """Forget what arrived for a slot. A reduced gradient stays where it is, to be overwritten."""
        self.finish()
        self.touched[slot_index] = False
        self.sums.filled.discard(slot_index)
        if self._late is not None:
            self._late.filled.discard(slot_index)

    def discard(self) -> None:
        """Forget all gradients, reduced or not. The buffers stay."""
        self.finish()
        full = self.sums.buffer
        if full is not None and not self._keeps_full:
            if self.sums.is_borrowed:
                self._pool.release(full)
            self.sums.forget_buffer()
        self.sums.forget_sums()
        self._late, self._row_sets = None, []
        self._state, self.is_launched = GradState.EMPTY, False
        self.touched = [False] * len(self.touched)

    def _own_bounds(self) -> tuple[int, int]:
        return self.bucket.shard_bounds(self._communicator.rank)

    def _reduce(
        self, source: Buffer, rows: Sequence[Buffer] | None, *, is_late: bool, borrowed: bool
    ) -> Callable[[], None]:
        """Launch the collective on `source`; the returned function waits for it and settles the result. `rows`: what is
        not zero in it, None for all of it."""
        adds = self._state is GradState.REDUCED
        self._state = GradState.REDUCING
        label = "late gradients" if is_late else "gradients"
        union = None if self.row_exchange is None else self._agree_on_rows(rows)
        if union is not None and self.row_exchange is not None:
            reduced, wait, staged = *self._launch_rows(self.row_exchange, union, source, label), source
        else:
            reduced, wait, staged = self._launch_whole(source, label, adds=adds)
        stream, launched = self._staging.stream, self._accelerator.current_stream().record()
        departures = self._staging.departures

        def settle() -> None:
            stream.wait(launched)
            with stream.use():
                wait()
                self._settle(reduced, departures, adds=adds)
            self._accelerator.current_stream().wait(stream.record())
            if staged is not source:
                self._pool.release(staged)
            if borrowed:
                self._pool.release(source)

        return settle

    def _launch_whole(self, source: Buffer, label: str, *, adds: bool) -> tuple[Buffer, Callable[[], None], Buffer]:
        """Launch the collective on the whole of `source`. Return where the result comes, what waits for it, and the
        buffer that travels."""
        staged = source
        if source.dtype is not self._plan.travelling.dtype:
            staged = self._borrow()
            staged.copy_from(source)
        before, after, op = self._reduction.scaling(self._communicator.world_size)
        if before != 1.0:
            self._kernels[SCALE](staged, before)
        overlap, index = self._reduction.overlap, self.bucket.index
        if self._plan.updates_shard:
            reduced = self._reduce_scatter_output(staged, adds=adds)
            counts = self.bucket.counts
            work = self._communicator.reduce_scatter(
                reduced, staged, op, counts=counts, async_op=overlap, label=label, bucket=index
            )
        else:
            reduced = staged
            work = self._communicator.all_reduce(staged, op, async_op=overlap, label=label, bucket=index)

        def wait() -> None:
            work.wait()
            if after != 1.0:
                self._kernels[SCALE](reduced, after)

        return reduced, wait, staged

    def _agree_on_rows(self, own: Sequence[Buffer] | None) -> RowSet | None:
        """The rows that travel; None where the whole bucket does. Collective."""
        assert self.row_exchange is not None  # the caller's condition
        union = self.row_exchange.agree(own)
        if union is None:
            self._row_sets = None
        elif self._row_sets is not None:
            self._row_sets.append(union)
        is_short = union is not None and union.count < self.row_exchange.rows
        return union if is_short and self._communicator.world_size > 1 else None

    def _launch_rows(
        self, exchange: RowExchange, rows: RowSet, source: Buffer, label: str
    ) -> tuple[Buffer, Callable[[], None]]:
        """Launch the collective on `rows` of `source`. Return where the result comes, and what waits for it."""
        low, high = self._own_bounds() if self._plan.updates_shard else (0, self.bucket.numel)
        reduced = source.view(low, high - low)
        if not rows.count:
            return reduced, lambda: None
        wait = exchange.reduce(
            source, rows, self._plan.travelling.dtype, self._reduction, label, scatters=self._plan.updates_shard
        )
        return reduced, wait

    def _reduce_scatter_output(self, staged: Buffer, *, adds: bool) -> Buffer:
        """Return where a reduce-scatter writes: into an empty, fitting slice without a copy, else in place."""
        own = self._own
        if own is not None and not adds and self._on_host is None and own.dtype is staged.dtype:
            return own
        low, high = self._own_bounds()
        return staged.view(low, high - low)

    def _settle(self, reduced: Buffer, departures: int, *, adds: bool) -> None:
        """Put a reduced gradient where the update reads; `adds` to what is there."""
        target = self._result
        if self._on_host is not None:
            self._on_host.put(reduced, departures, adds=adds)
        elif adds:
            self._kernels[REDUCE](target, reduced, ReduceOp.SUM)
        elif target.data_ptr() != reduced.data_ptr():  # else it was reduced in place
            target.copy_from(reduced)
        self._state = GradState.REDUCED
