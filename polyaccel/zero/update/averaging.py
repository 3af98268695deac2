"""The exponential moving average of weights (Polyak & Juditsky 1992; "EMA"), kept with the optimizer's states.

Each rank averages the elements that it updates, in float32, after their update. A parameter's average begins at its
weights after its first update, as in `torch.optim.swa_utils.AveragedModel`. Steps that are skipped change nothing.
"""

from __future__ import annotations

from typing import Any

from polyaccel.core.types import DType
from polyaccel.ops.base import CAST, UPDATE, ArrayMath, Formula, Rule, Settings
from polyaccel.zero.plan.policy import WEIGHTS_EMA
from polyaccel.zero.update.optimizers import Shard

_TILE_NUMEL = 2**22


def _average(x: ArrayMath, k: Any, p: Any, g: Any) -> tuple[Any, ...]:
    p *= k[0]
    p += x.mul(g, k[1])
    return (p,)


def _average_meaning(x: ArrayMath, s: Settings, step: int, p: Any, g: Any) -> tuple[Any, ...]:
    return (s["decay"] * p + (1 - s["decay"]) * g,)


AVERAGE = Formula("average", (), lambda s, step: (s["decay"], 1 - s["decay"]), _average, _average_meaning)
"""`master` is the average, and the "gradient" of the call the weights."""


def average_weights(shard: Shard, decay: float) -> None:
    """Add a shard's updated weights to their average."""
    average, rule = shard.states[WEIGHTS_EMA], Rule(AVERAGE, {"decay": decay})
    room = shard.tier.compute.allocate(min(_TILE_NUMEL, shard.master.numel), DType.FLOAT32)
    for piece in shard.slices:
        for start in range(0, piece.length, _TILE_NUMEL):
            window = piece.shard_offset + start, min(_TILE_NUMEL, piece.length - start)
            target, weights = average.view(*window), room.view(0, window[1])
            shard.kernels[CAST](shard.master.view(*window), weights)
            if shard.steps[piece.fqn] <= 1:
                target.copy_from(weights)
            else:
                shard.kernels[UPDATE](rule, target, weights, ())
