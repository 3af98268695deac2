"""The update: agree on what the ranks must know, then bucket by bucket wait for the gradient, update, publish.

[Note: While gradients arrive]
Which parameters were touched and which gradients came late is known without any gradient's value. Unless the norm
decides something (clipping, skipping an overflow), the update of a bucket therefore begins as soon as that bucket's own
reduction has ended and its gradient is where the kernels are; later ones are still under way: in the network, or
because the device has not computed them yet. Buckets come in layout order on every rank, which is the order in which
gradients appear. Norms are added up on the way and agreed on after the last bucket was published. How much this gains
depends on the communicator: one that carries calls out strictly one after the other ends the reductions before it
agrees on anything.

[Note: Half an update]
Something may fail when some buckets have been updated and others not: a rank is lost, a file cannot be read. What is in
memory then belongs to two steps, and nothing may be trained on or saved from it until a checkpoint has been loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field

from polyaccel.comm.base import Communicator
from polyaccel.errors import OffloadError, PolyaccelError
from polyaccel.zero.agreement import Agreement, Arrivals
from polyaccel.zero.gathering import GatherPolicy
from polyaccel.zero.gradients import GradientBucket, ReductionPolicy
from polyaccel.zero.norms import GradientNorm
from polyaccel.zero.optimizers import Group, Shard, SliceOptimizer
from polyaccel.zero.params import ParamStore
from polyaccel.zero.rounding import WeightRounding
from polyaccel.zero.states import StateStore, find_runs


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """What the update does. `clip_norm` 0 is off. `skip_overflow`: a gradient that is not finite skips the update
    (mixed precision); otherwise it goes through, as in plain fp32 training. `defer_publish`: the all-gather of updated
    parameters may last into the next forward pass, and whoever reads parameters calls `wait_published` or `fence`
    first. `measure_norm` False saves the norm where nobody needs it. `require_all` makes a trained parameter without a
    gradient an error. `stochastic_rounding` is how parameters of 16 bits follow from master weights (`WeightRounding`).
    """

    clip_norm: float = 0.0
    skip_overflow: bool = False
    defer_publish: bool = False
    measure_norm: bool = True
    require_all: bool = False
    stochastic_rounding: bool = False
    reduction: ReductionPolicy = field(default_factory=ReductionPolicy)
    gathering: GatherPolicy = field(default_factory=GatherPolicy)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an update did. `grad_norm` is before clipping, `clipped_norm` after."""

    applied: bool
    grad_norm: float
    clipped_norm: float
    culprit: str | None


class Update:
    """One rank's part in the updates of a step: the shards of `states`, their `gradients`, the parameters.

    `waiting` is entered around waits for gradients. `steps` counts the updates of each trained parameter. `is_queued`:
    the device's streams keep the order, and the host waits for nothing between the backward pass and the next forward.
    """

    def __init__(
        self,
        policy: StepPolicy,
        optimizer: SliceOptimizer,
        states: StateStore,
        gradients: Sequence[GradientBucket],
        params: ParamStore,
        steps: dict[str, int],
        rounding: WeightRounding,
        agreement: Agreement,
        communicator: Communicator,
        waiting: Callable[[], AbstractContextManager[object]],
        *,
        is_queued: bool,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._states = states
        self._gradients = {gradients.bucket.index: gradients for gradients in gradients}
        self._params = params
        self._steps = steps
        self._rounding = rounding
        self._agreement = agreement
        self._communicator = communicator
        self._waiting = waiting
        self._begun = self._updated = 0
        """Shards of the present update that the optimizer was given, and that are published."""

        decides = policy.clip_norm > 0.0 or policy.skip_overflow
        self.measures = policy.measure_norm or decides
        """Whether anybody asks for the norm."""
        self.is_early = not (decides or policy.defer_publish or is_queued)
        """Whether the update begins before all gradients have arrived, and the norm is agreed on last: not where the
        norm decides something, where it would wait for what may be published later, or where nothing is gained."""

    def require_whole(self) -> None:
        """Raise PolyaccelError after half an update. See [Note: Half an update]."""
        if self._begun:
            raise PolyaccelError(
                f"an update failed when {self._updated} of {len(self._states.shards)} buckets were updated: "
                "parameters and optimizer states belong to two steps",
                cure="load the last checkpoint, with its optimizer states",
                value=self._updated,
            )

    def mend(self) -> None:
        """Parameters and states are one again: all of them were loaded."""
        self._begun = self._updated = 0

    def apply(
        self,
        groups: Sequence[Group],
        arrivals: Arrivals,
        norm: GradientNorm | None,
        loss_scale: float,
        discard_gradients: Callable[[], None],
    ) -> StepResult:
        """Update every shard with its gradient and publish its bucket, then discard the gradients. Collective.

        `norm` is None where it is not known before. Raises OffloadError as `Tier.lend` does: at the end of the walk,
        with everything updated and published. After an error in the middle, `require_whole` raises.
        """
        before = dict(self._steps)
        for fqn in arrivals.touched:
            self._steps[fqn] += 1
        factor = 1.0 if norm is None else norm.clip_factor(self._policy.clip_norm)
        sums = self._agreement.new_sums()

        def prepare(shard: Shard) -> None:
            bucket = shard.bucket
            gradients = self._gradients[bucket.index]
            with self._waiting():
                gradients.finish()
            if norm is None and self.measures:
                self._agreement.add_squares(sums, gradients)
            shard.grad = gradients.result()
            shard.steps = {slot.param.fqn: self._steps[slot.param.fqn] for slot in bucket.slots}
            origin = self._params[bucket.index].origin
            shard.runs = tuple(find_runs(shard, origin, arrivals.touched, self._steps, self._rounding))

        unwritten: OffloadError | None = None
        try:
            with closing(self._states.walk(prepare)) as walk:
                lent = self._counted(walk)
                for shard in self._optimizer.update(lent, groups, factor / loss_scale, self._communicator):
                    self._states.hand_over(shard)
                    self._params.publish(shard.bucket.index)
                    self._updated += 1
        except BaseException as error:
            if self._updated < len(self._states.shards) or not isinstance(error, OffloadError):
                self._steps.update(before)
                raise
            unwritten = error  # all was updated: no reason to leave the other ranks alone
        if norm is None:
            norm = self._agreement.on_norm(sums, loss_scale) if self.measures else GradientNorm(0.0, None)
        if not self._policy.defer_publish:
            self._params.fence()
        self._states.forget_gradients()
        discard_gradients()
        self.mend()
        if unwritten is not None:
            raise unwritten
        return StepResult(True, norm.norm, norm.norm * factor, norm.culprit)

    def _counted(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        for shard in shards:
            self._begun += 1
            yield shard
