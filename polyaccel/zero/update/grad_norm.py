"""All-reduce of the gradient norm and of the per-parameter flags "has a gradient".

Each rank sums squares over its own slices only, at every stage, in float64, and the total is rounded to float32; hence
neither the norm nor the clip factor depends on how parameters are cut, or on when a bucket's gradients arrived.

[Note: Gradient norm all-reduce]
At the end of a step each rank knows for each parameter whether it got a gradient here, for each bucket whether
gradients came too late for its reduction, whether a user may have changed parameters by hand, and whether the step took
another schedule than the last one (`Flags`). That is known without any gradient's value, so it can be agreed on while
reductions are under way. The squared norm of each parameter's slice here is known when all of them have ended; overflow
and the culprit's name follow from it. Both travel as vectors of float64, through one small all-reduce where an update
must know the norm before it begins and through one each where it need not. What ranks decide follows from those vectors
alone, so they cannot disagree.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.ops.base import REDUCE, SQUARE_SUMS
from polyaccel.zero.buckets.grad_reducer import GradReducer
from polyaccel.zero.buckets.gradients import GradientBucket
from polyaccel.zero.buckets.user_grad_edits import require_equal, require_same_edits, require_shown_whole
from polyaccel.zero.plan.layout import ShardLayout
from polyaccel.zero.resources import Staging, sum_dtype
from polyaccel.zero.update.global_norm import GradientNorm
from polyaccel.zero.update.stage_rows import StageRow, StageRows
from polyaccel.zero.update.unread_norm import NormReader, UnreadNorm


def allocate_sums(accelerator: Accelerator, communicator: Communicator, count: int) -> Buffer:
    """A zeroed vector of `count` sums to exchange, float64 where the device has it."""
    return communicator.allocate(count, sum_dtype(accelerator))


def sums_in(accelerator: Accelerator, count: int) -> Buffer:
    """A zeroed vector of `count` sums in the accelerator's own memory, float64 where it has that."""
    return accelerator.allocate(count, sum_dtype(accelerator))


class SquareSums:
    """`count` sums of squares, each piece added by kernels that reach it: the device's, or the host's for pieces in its
    memory. Nothing waits for the device before `read`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._sums: dict[Accelerator, Buffer] = {}

    def add(self, compute: Accelerator, pieces: Sequence[tuple[int, Buffer]]) -> None:
        """Add the squared norm of each piece at its index."""
        if compute not in self._sums:
            self._sums[compute] = sums_in(compute, self._count)
        compute.kernels()[SQUARE_SUMS](self._sums[compute], pieces)

    def add_sums(self, compute: Accelerator, sums: Buffer) -> None:
        """Add squared norms that its kernels have added up, one for each index."""
        if compute not in self._sums:
            self._sums[compute] = sums_in(compute, self._count)
        compute.kernels()[REDUCE](self._sums[compute], sums, ReduceOp.SUM)

    def write_to(self, vector: Buffer, accelerator: Accelerator) -> None:
        """Write the sums to `vector`, zeros in the memory of `accelerator`. The host waits for no device, unless
        several accelerators hold sums."""
        if self._sums.keys() == {accelerator}:
            vector.copy_from(self._sums[accelerator])
        elif self._sums:
            write_sums(vector, self.read())

    def are_read_from(self, accelerator: Accelerator) -> bool:
        """Whether `read` waits for the current stream of `accelerator`."""
        return accelerator in self._sums

    def read(self) -> array[float]:
        """The sums, on the host."""
        values = array("d", bytes(8 * self._count))
        for sums in self._sums.values():
            for index, value in enumerate(read_sums(sums)):
                values[index] += value
        return values


def read_sums(sums: Buffer) -> array[float]:
    """The vector on the host; waits for the device."""
    values = array("d" if sums.dtype is DType.FLOAT64 else "f")
    values.frombytes(sums.to_bytes())
    return values


def write_sums(sums: Buffer, values: array[float]) -> None:
    """Overwrite the vector from the host."""
    sums.from_bytes(array("d" if sums.dtype is DType.FLOAT64 else "f", values).tobytes())


@dataclass(frozen=True, slots=True)
class Flags:
    """What a rank says of itself when an update begins, and then what some rank has said."""

    has_changes: bool = False
    """Parameters may have been changed by hand."""
    has_deviated: bool = False
    """Buckets were used in another way than the schedule of the step says."""


@dataclass(frozen=True, slots=True)
class ReadyGrads:
    """`params` holds the parameters with a gradient on some rank, `late_buckets` where one came late on some rank."""

    params: frozenset[str]
    late_buckets: tuple[int, ...]
    flags: Flags


_NO_FLAGS = Flags()


class GradNormReducer:
    """The exchange between ranks of what each knows of the gradients in `buckets`. The methods that begin with
    `agree` are collective."""

    def __init__(
        self,
        layout: ShardLayout,
        reducer: GradReducer,
        communicator: Communicator,
        accelerator: Accelerator,
        staging: Staging,
        beyond: Communicator | None = None,
        host: Communicator | None = None,
    ) -> None:
        """`beyond` joins the stages of a pipeline, `host` the ranks for what they know without the device."""
        self._host = host
        self._reader = NormReader(accelerator)
        self._staging = staging
        self._layout = layout
        self.buckets = reducer.buckets
        self._user_edits = reducer.user_edits
        self._communicator = communicator
        self._accelerator = accelerator
        self._names = [param.fqn for param in layout.params]
        self._stages = None if beyond is None else StageRows(beyond, self._names, len(self.buckets))

    def agree_on_arrivals(self, flags: Flags = _NO_FLAGS) -> ReadyGrads:
        """Which gradients arrived. Waits for no gradient but late ones, which are reduced on the way.

        `flags` are this rank's. Raises ShardingError where user code on different ranks did different things to
        gradients.
        """
        arrivals = self._interpret(self._exchange(self._counts(flags), "arrivals"))
        self._reduce_late(arrivals)
        return arrivals

    def agree_on_norm(self, sums: SquareSums, loss_scale: float) -> GradientNorm:
        """The norm over all ranks, where `sums` has the gradients of all buckets."""
        _, stages = self._exchange_norms(array("d"), "norms", sums)
        return self._of_all(stages, loss_scale)

    @property
    def agrees_on_host(self) -> bool:
        """Whether ranks agree on arrivals without the device."""
        return self._host is not None or self._communicator.world_size == 1

    def start_norm(self, loss_scale: float) -> UnreadNorm:
        """Compute the norm over all ranks of the gradients of all buckets, whose reductions have ended. The host does
        not wait for it. See [Note: Unread norms]."""
        sums = self._sums(measure=True)
        vector = self._add_up(array("d"), "norms", sums)
        return self._reader.start(vector, lambda arrived: self._of_all(self._cut(read_sums(arrived))[1], loss_scale))

    def all_reduce_norm_and_flags(
        self, loss_scale: float, flags: Flags, *, measure: bool
    ) -> tuple[ReadyGrads, GradientNorm]:
        """Both at once, where all reductions have ended. Unless `measure`, the norm is 0."""
        values, stages = self._exchange_norms(self._counts(flags), "norms and arrivals", self._sums(measure))
        arrivals = self._interpret(values)
        if arrivals.late_buckets or any(stage.has_late for stage in stages):
            self._reduce_late(arrivals)
            return arrivals, self.agree_on_norm(self._sums(measure), loss_scale)
        return arrivals, self._of_all(stages, loss_scale) if measure else GradientNorm(0.0, None)

    def _of_all(self, stages: Sequence[StageRow], loss_scale: float) -> GradientNorm:
        """The norm over all parameters of the model."""
        names = [self._names] if self._stages is None else self._stages.names
        return GradientNorm.from_squares(names, [stage.squares for stage in stages], loss_scale)

    def new_sums(self) -> SquareSums:
        """Sums for `add_squares` and `on_norm`."""
        return SquareSums(len(self._layout.params))

    def add_squares(self, sums: SquareSums, gradients: GradientBucket) -> None:
        """Add the squared norms of this rank's slices of a reduced gradient, if there is one."""
        if not gradients.holds_result:
            return
        squares, position = gradients.squares, self._layout.position
        if squares is not None:
            sums.add_sums(self._accelerator, squares)
        else:
            sums.add(gradients.compute, [(position[fqn], part) for fqn, part in gradients.own_slices])

    def _sums(self, measure: bool) -> SquareSums:
        sums = self.new_sums()
        for gradients in self.buckets if measure else ():
            self.add_squares(sums, gradients)
        return sums

    def _counts(self, own: Flags) -> array[float]:
        """How often each parameter got a gradient, then whether each bucket has late ones, the two of `Flags`, and last
        whether user code did something to gradients."""
        count = len(self._layout.params)
        flags = array("d", bytes(8 * (count + len(self.buckets) + 3)))
        flags[-3:] = array("d", (own.has_changes, own.has_deviated, bool(self._user_edits)))
        for index, gradients in enumerate(self.buckets):
            for slot, touched in zip(gradients.bucket.slots, gradients.touched, strict=True):
                flags[self._layout.position[slot.param.fqn]] = touched
            flags[count + index] = gradients.has_late
        return flags

    def _interpret(self, flags: array[float]) -> ReadyGrads:
        names = [param.fqn for param in self._layout.params]
        late = tuple(index for index, flag in enumerate(flags[len(names) : -3]) if flag)
        has_changes, has_deviated, is_by_hand = map(bool, flags[-3:])
        if is_by_hand and self._communicator.world_size > 1:
            self._compare_by_hand(names, late)
        touched = frozenset(name for name, arrived in zip(names, flags, strict=False) if arrived)
        return ReadyGrads(touched, late, Flags(has_changes, has_deviated))

    def _compare_by_hand(self, names: list[str], late: tuple[int, ...]) -> None:
        """See `zero.buckets.user_grad_edits`."""
        ranks = self._communicator.world_size
        counts = self._exchange(self._user_edits.counts(names, [each.bucket.index for each in self.buckets]), "by hand")
        require_shown_whole(late, counts[2 * len(names) :], [each.bucket.slots[0].param.fqn for each in self.buckets])
        require_same_edits(counts, names, ranks)
        written = [(each, slot.param.fqn) for each in self.buckets for slot in each.bucket.slots]
        written = [(each, fqn) for each, fqn in written if fqn in self._user_edits.written]
        replicated = [(each, fqn) for each, fqn in written if each.has_whole_result]
        if replicated:
            mine = self._squares_of(replicated)
            rows = self._communicator.all_gather_object(mine)
            mesh = self._layout.mesh
            for index, (gradients, fqn) in enumerate(replicated):
                for holders in mesh.groups(mesh.others(gradients.bucket.kind.cut)):
                    require_equal([[rows[rank][index]] for rank in holders], [fqn])

    def _squares_of(self, written: list[tuple[GradientBucket, str]]) -> list[float]:
        """The squared norms of whole gradients of parameters."""
        sums = self.new_sums()
        for gradients, fqn in written:
            gradients.finish()
            slot = next(slot for slot in gradients.bucket.slots if slot.param.fqn == fqn)
            part = gradients.result().view(slot.offset, slot.param.numel)
            sums.add(gradients.compute, [(self._layout.position[fqn], part)])
        values = sums.read()
        return [values[self._layout.position[fqn]] for _, fqn in written]

    def _reduce_late(self, arrivals: ReadyGrads) -> None:
        for index in arrivals.late_buckets:
            self.buckets[index].reduce_late()

    def _exchange(self, values: array[float], label: str) -> array[float]:
        """The sums over all ranks of `values`. A single rank exchanges nothing."""
        if self._communicator.world_size == 1:
            return values
        if self._host is not None:
            vector = self._host.allocate(len(values), DType.FLOAT64)
            write_sums(vector, values)
            self._host.all_reduce(vector, label=label)
            return read_sums(vector)
        copies = self._staging.join()
        sums = allocate_sums(self._accelerator, self._communicator, len(values))
        write_sums(sums, values)
        self._communicator.all_reduce(sums, label=label)
        found = read_sums(sums)
        self._staging.know(copies)
        return found

    def _exchange_norms(
        self, values: array[float], label: str, squares: SquareSums
    ) -> tuple[array[float], list[StageRow]]:
        """The sums over all ranks of `values`, those of `_counts` or none, and of `squares`, by pipeline stage. The
        host waits for a device once, for all of it; where nothing is exchanged, for its `squares` alone."""
        copies = self._staging.join()
        if self._communicator.world_size == 1 and self._stages is None:
            own = squares.read()
            if squares.are_read_from(self._accelerator):
                self._staging.know(copies)
            return values, [StageRow(own)]
        found = read_sums(self._add_up(values, label, squares))
        self._staging.know(copies)
        return self._cut(found, len(values))

    def _add_up(self, values: array[float], label: str, squares: SquareSums) -> Buffer:
        """A vector of the device with the sums over all ranks of `squares` and `values`, then what each stage gives."""
        count, numel = len(self._names), len(self._names) + len(values)
        rows_numel = 0 if self._stages is None else self._stages.numel
        sums = allocate_sums(self._accelerator, self._communicator, numel + rows_numel)
        own_sums = sums.view(0, numel)
        squares.write_to(own_sums.view(0, count), self._accelerator)
        if values:
            write_sums(own_sums.view(count, len(values)), values)
        if self._communicator.world_size > 1:
            self._communicator.all_reduce(own_sums, label=label)
        if self._stages is not None:
            late = own_sums.view(2 * count, len(self.buckets)) if values else None
            self._stages.gather(sums.view(numel, rows_numel), own_sums.view(0, count), late)
        return sums

    def _cut(self, found: array[float], others: int = 0) -> tuple[array[float], list[StageRow]]:
        """What `_add_up` gives, on the host: the `others` of its values, and the squared norms of each stage."""
        count = len(self._names)
        numel = count + others
        rows = [StageRow(found[:count])] if self._stages is None else self._stages.cut(found[numel:])
        return found[count:numel], rows
