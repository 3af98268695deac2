"""Updates that DeepSpeed's kernels compute otherwise than the literature, and polyaccel with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt

from polyaccel.ops.base import Rule
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.zero.update.optimizers import Group, SliceOptimizer, TrustRatioOptimizer


class FusedLambUpdate(TrustRatioOptimizer):
    """LAMB as DeepSpeed's kernel has it: the direction, and with it the trust ratio, is of moments without bias
    correction; the correction multiplies the rate. States are those of LAMB."""

    def direction_rule(self, group: Group, step: int) -> Rule:
        return self.row.rule({**group, "bias_correction": False}, step)

    def rate(self, group: Group, step: int) -> float:
        lr = float(group["lr"])
        if not group.get("bias_correction", True):
            return lr
        beta1, beta2 = map(float, group["betas"])
        return lr * sqrt(1 - beta2**step) / (1 - beta1**step)


SLICE_OPTIMIZERS: Mapping[str, Callable[[], SliceOptimizer]] = {"Lamb": lambda: FusedLambUpdate(OPTIMIZERS["Lamb"])}
"""By the config's names."""
