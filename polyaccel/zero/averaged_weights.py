"""Averaged weights in the place of the trained ones, for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from polyaccel.core.buffer import Buffer
from polyaccel.errors import PolyaccelError
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.plan.policy import WEIGHTS_EMA
from polyaccel.zero.update.optimizers import Group, Shard


@contextmanager
def averaged_weights(step: ZeroEngine, groups: Sequence[Group]) -> Iterator[None]:
    """Inside, the parameters of `step` are the averages of its weights. Collective at both ends.

    Master weights are copied meanwhile, and are back afterwards, to the bit. Raises PolyaccelError where nothing is
    averaged, or averages are in place already.
    """
    optimizer = step.optimizer
    has_own = optimizer is not None and optimizer.averages_weights
    if not (has_own or step.plan.policy.ema_decay):
        raise PolyaccelError(
            "this run averages no weights",
            hint='set "ema": {"decay": 0.999}, or use the optimizer ScheduleFreeAdamW',
        )
    step.require_trained_weights()
    step.adopt_changes()
    step.params.wait_all_gathers()
    step.params.end_fetches()
    kept: list[tuple[Shard, Buffer]] = []
    with step.consistency.changing("the exchange of averaged weights"):
        step.has_averages = True
        for shard in step.shards:
            before = shard.tier.compute.allocate(shard.master.numel, shard.master.dtype)
            before.copy_from(shard.master)
            kept.append((shard, before))
            if step.plan.policy.ema_decay:
                shard.steps = {slot.param.fqn: step.steps[slot.param.fqn] for slot in shard.bucket.slots}
                for piece in shard.slices:
                    if shard.steps[piece.fqn]:  # else there is no average yet
                        window = piece.shard_offset, piece.length
                        shard.master.view(*window).copy_from(shard.states[WEIGHTS_EMA].view(*window))
            elif optimizer is not None:
                optimizer.write_averages(shard, groups[shard.bucket.kind.group])
        step.params.all_gather_masters()
    try:
        yield
    finally:
        with step.consistency.changing("the exchange of averaged weights"):
            step.params.wait_all_gathers()
            step.params.end_fetches()
            for shard, before in kept:
                shard.master.copy_from(before)
            step.params.all_gather_masters()
        step.has_averages = False
