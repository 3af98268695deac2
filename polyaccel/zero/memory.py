"""The memory of a step by purpose: what its plan estimated, and what this rank holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from polyaccel.core.buffer import Buffer
from polyaccel.zero.buckets.grad_reducer import GradReducer
from polyaccel.zero.buckets.params import ParamBuckets
from polyaccel.zero.plan.bucket_plan import PlannedBuffer, StepPlan, TrainedBucketPlan
from polyaccel.zero.plan.memory import Purpose, in_words, memory_by_purpose
from polyaccel.zero.plan.placement import Place
from polyaccel.zero.resources import Staging
from polyaccel.zero.update.optimizer_step import OptimizerState


class StepMemory:
    """Bytes of this rank by purpose, in the words of `polyaccel plan`: estimated by the plan, and counted from the
    buffers that are there.

    Of what is in use only inside a step, pools keep the most that there was: gradient buckets in flight, gathered
    parameters, staging. What is not kept, a gradient outside its bucket and codes on their way, is estimated and not
    counted.
    """

    def __init__(
        self,
        plan: StepPlan,
        params: ParamBuckets,
        reducer: GradReducer,
        states: OptimizerState,
        staging: Staging,
    ) -> None:
        self._plan = plan
        self._params = params
        self._reducer = reducer
        self._states = states
        self._staging = staging

    def estimated(self) -> list[tuple[str, int]]:
        """What the plan of the buffers estimates."""
        return memory_by_purpose(self._plan)

    def measured(self) -> list[tuple[str, int]]:
        """What is there."""
        found: Counter[tuple[Place, Purpose]] = Counter()

        def add(purpose: Purpose, planned: PlannedBuffer | None, buffers: Iterable[Buffer]) -> None:
            place = Place.DEVICE if planned is None else planned.place
            found[place, purpose] += sum(buffer.nbytes for buffer in buffers)

        for bucket in self._params:
            plan = bucket.plan
            add(Purpose.PARAMS, plan.params, [bucket.own if bucket.full is None else bucket.full])
            if bucket.out is not None and isinstance(plan, TrainedBucketPlan):
                add(Purpose.MASTER, plan.master, [bucket.master])
        plans = {each.bucket.index: each for each in self._plan.trained}
        for shard in self._states.shards:
            for name, state in shard.states.items():
                add(Purpose.OPTIM, plans[shard.bucket.index].states.get(name), [state])
        for gradients in self._reducer.buckets:
            add(Purpose.GRADS, plans[gradients.bucket.index].gradient, gradients.resident())
        gathered = self._params.gathered
        found[Place.DEVICE, Purpose.SECOND] = gathered.second.nbytes
        for purpose, pool in ((Purpose.GRADS_IN_FLIGHT, self._reducer.pool), (Purpose.GATHERED, gathered.pool)):
            found[Place.DEVICE, purpose] = sum(numel * dtype.itemsize for numel, dtype in pool.held())
        for place, nbytes in self._staging.held().items():
            found[place, Purpose.STAGING] += nbytes
        return in_words(found)
