"""States that go from one plan of a step to the next, when parameters that were frozen are trained from now on.

[Note: New layout after unfreezing]
Frozen parameters have no master weights, no optimizer states and no gradients, so their buckets are of another kind
than those of trained ones. When one of them requires a gradient, everything is laid out again between two optimizer
steps: the module takes its values back, a second `ZeroEngine` is built as for a new engine, and what the first one has
of its parameters moves over. For that moment both exist, and under sharded parameters the whole module too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError, ShardingError
from polyaccel.torch.api.client_optimizer import ClientOptimizer
from polyaccel.torch.api.whole_states import unpack_states
from polyaccel.torch.sharding.module_adapter import TorchAdapter
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.fragments import PARAM, fragment, read_whole, state_names


def is_due(adapter: TorchAdapter, step: ZeroEngine, resumed: Collection[str] = ()) -> bool:
    """Return whether a new plan is due, for unfrozen or `resumed` parameters, outside accumulation."""
    if resumed and step.holds_gradients:
        fqn = min(resumed)
        raise ShardingError(
            f"a checkpoint with optimizer states of {fqn!r}, which is frozen here, was loaded while gradients are held",
            hint="load between optimizer steps, or call engine.zero_grad() first",
            value=fqn,
        )
    return bool(resumed) or (adapter.has_unfrozen() and not step.holds_gradients)


def migrate_optimizer_state(adapter: TorchAdapter, before: ZeroEngine, lay_out: Callable[[], ZeroEngine]) -> None:
    """Continue `before` in the step of `lay_out`, shown by `adapter`. Collective; may raise ShardingError first."""
    adapter.require_nothing_away()
    adapter.adopt_changes()
    states = _States.gather(before)
    adapter.release(is_followed=True)
    after = lay_out()
    _carry_over(before, after, states)
    if isinstance(after.optimizer, ClientOptimizer):
        after.optimizer.restore(after.shards, states.numbers, states.has, names=before.steps)
        if states.kept:
            after.optimizer.take_whole_states(states.kept)
    before.close()


@dataclass(frozen=True)
class _States:
    """The optimizer states of a step's parameters, the same on all ranks: element types of those with a value for each
    element, and numbers, each by parameter and name; `kept`, those of whole parameters that only their owners had. An
    optimizer of ours has states of the first kind alone."""

    flat: dict[str, dict[str, DType]]
    numbers: dict[str, dict[str, float]]
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)

    def has(self, fqn: str, name: str) -> bool:
        return name in self.flat.get(fqn, ())

    @staticmethod
    def gather(step: ZeroEngine) -> _States:
        """Gather the states of all ranks. Collective. Raises ShardingError on all ranks for a state that is neither."""
        optimizer = step.optimizer
        if not isinstance(optimizer, ClientOptimizer):
            return _States({fqn: dict.fromkeys(state_names(step, fqn), DType.FLOAT32) for fqn in step.steps}, {})
        flat, numbers = dict[str, dict[str, DType]](), dict[str, dict[str, float]]()
        ours, blob = optimizer.states_by_kind(), b""
        if ours.kept:
            try:
                blob = optimizer.whole_state() or b""
            except CheckpointError:
                ours.others.extend(ours.kept)
        gathered = step.communicator.all_gather_object((ours.flat, ours.numbers, ours.others, blob))
        for their_flat, their_numbers, others, _ in gathered:
            if others:
                fqn, name = others[0]
                raise ShardingError(
                    f"layers were unfrozen, and the optimizer keeps a state {name!r} of parameter {fqn!r} that "
                    "it alone can read, so it cannot be laid out again",
                    hint="let all layers that will be trained require a gradient at polyaccel.initialize, and freeze "
                    "them with requires_grad_(False) after it",
                    value=name,
                )
            for fqn, kinds in their_flat.items():
                flat.setdefault(fqn, {}).update({name: DType(kind) for name, kind in kinds.items()})
            numbers |= their_numbers
        return _States(flat, numbers, unpack_states([each[3] for each in gathered if each[3]]))


def _carry_over(before: ZeroEngine, after: ZeroEngine, states: _States) -> None:
    """Give `after` `before`'s master weights, states and update counts. Collective."""
    after.steps.update(before.steps)  # before master weights are rounded, which depends on it
    if isinstance(after.optimizer, ClientOptimizer):
        after.optimizer.rebind(after.shards)
        for step in (before, after):
            _allocate(step, states.flat)
    kept = before.plan.policy.engine_states
    for fqn in before.steps:
        for kind in (PARAM, *states.flat.get(fqn, ()), *kept):
            whole = read_whole(before, fqn, kind)
            own = fragment(after, fqn, kind)
            if own is not None:
                own.values.copy_from(whole.view(own.start, own.values.numel))
    after.params.all_gather_masters()


def _allocate(step: ZeroEngine, flat: Mapping[str, Mapping[str, DType]]) -> None:
    """Let every shard have the states of its parameters, on this rank too where another one has their elements."""
    for shard in step.shards:
        for slot in shard.bucket.slots:
            for name, dtype in flat.get(slot.param.fqn, {}).items():
                if name not in shard.states:
                    shard.allocate_state(name, dtype)
