"""Formulas of optimizers after 2022, as rows of `polyaccel.ops.optimizers` use them.

They are run on arrays on every device; csrc and Triton have no kernels for them.
"""

from __future__ import annotations

from functools import cache
from math import sqrt
from typing import Any

from polyaccel.ops.base import ArrayMath, Formula, Settings, StateRole

_AVERAGE, _MAGNITUDE = StateRole.AVERAGE, StateRole.MAGNITUDE


# Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682, algorithm 1), as the package schedulefree 1.4 has it. The
# weights are y, at which gradients are computed. Instead of z the state is z - y, which begins at zero; the average x
# that is evaluated is y - (z - y) (1 - beta1) / beta1. The learning rate is constant after the warmup.


@cache
def _warmup_sum(steps: int, warmup: int, power: float) -> float:
    """The sum of the weights of the first `steps` updates of a warmup."""
    return float(sum((at / warmup) ** power for at in range(1, steps + 1)))


def _rate_and_share(s: Settings, step: int) -> tuple[float, float]:
    """The learning rate of an update, and its share of the average."""
    warmup, power = int(s["warmup_steps"]), s["weight_lr_power"]
    factor = min(1.0, step / warmup) if warmup else 1.0
    total = _warmup_sum(min(step, warmup), warmup, power) + max(0, step - warmup)
    return s["lr"] * factor, factor**power / total


def _schedule_free_constants(s: Settings, step: int) -> tuple[float, ...]:
    rate, share = _rate_and_share(s, step)
    return (
        *(s["beta2"], 1 - s["beta2"], 1 / sqrt(1 - s["beta2"] ** step), s["eps"], s["weight_decay"]),
        *(share, 1 - share, rate * (1 - s["beta1"] * (1 - share)), rate * s["beta1"]),
    )


def _schedule_free(x: ArrayMath, k: Any, p: Any, g: Any, apart: Any, v: Any) -> tuple[Any, ...]:
    beta2, rest2, correction, eps, decay, share, kept, rate, back = k
    square = x.mul(g, g)
    square *= rest2
    v *= beta2
    v += square
    denominator = x.sqrt(v, 1)
    denominator *= correction
    denominator += eps
    g /= denominator
    g = x.plus_decay(g, p, decay)
    p += x.mul(apart, share)
    p -= x.mul(g, rate)
    apart -= x.mul(g, back)
    apart *= kept
    return p, apart, v


def _schedule_free_meaning(x: ArrayMath, s: Settings, step: int, p: Any, g: Any, apart: Any, v: Any) -> tuple[Any, ...]:
    rate, share = _rate_and_share(s, step)
    v = s["beta2"] * v + (1 - s["beta2"]) * g * g
    direction = g / (x.sqrt(v / (1 - s["beta2"] ** step)) + s["eps"]) + s["weight_decay"] * p
    z = p + apart
    after = (1 - share) * p + share * z + rate * (s["beta1"] * (1 - share) - 1) * direction
    return after, z - rate * direction - after, v


SCHEDULE_FREE = Formula(
    "schedule_free",
    (("z_minus_y", _AVERAGE), ("exp_avg_sq", _MAGNITUDE)),
    _schedule_free_constants,
    _schedule_free,
    _schedule_free_meaning,
)


# Sophia (Liu et al. 2023, arXiv 2305.14342, algorithm 3) as SophiaG of its authors has it, with one change: the
# diagonal of the Gauss-Newton matrix is estimated by the squared gradient of the loss itself (the empirical Fisher)
# every `hessian_interval` updates, and not by a second pass over labels that the model draws.


def _sophia_constants(s: Settings, step: int) -> tuple[float, ...]:
    is_due = (step - 1) % int(s["hessian_interval"]) == 0
    return (
        *(s["beta1"], 1 - s["beta1"]),
        *((s["beta2"], 1 - s["beta2"]) if is_due else (1.0, 0.0)),
        *(s["rho"] * s["bs"], 1e-15, s["lr"], 1 - s["lr"] * s["weight_decay"]),
    )


def _sophia(x: ArrayMath, k: Any, p: Any, g: Any, m: Any, h: Any) -> tuple[Any, ...]:
    beta1, rest1, beta2, rest2, factor, eps, lr, keep = k
    m *= beta1
    m += x.mul(g, rest1)
    square = x.mul(g, rest2)
    square *= g
    h *= beta2
    h += x.choose(rest2, square, x.mul(h, 0.0, 1))  # 0 times an infinite gradient is NaN
    bound = x.mul(h, factor, 1)
    bound += eps
    bound = x.maximum(bound, x.abs(m, 2))
    step = x.mul(m, lr)
    step /= bound
    p *= keep
    p -= step
    return p, m, h


def _sophia_meaning(x: ArrayMath, s: Settings, step: int, p: Any, g: Any, m: Any, h: Any) -> tuple[Any, ...]:
    """Clipping `m / (rho * bs * h)` to 1 is dividing `m` by the larger of that and `|m|`."""
    m = s["beta1"] * m + (1 - s["beta1"]) * g
    if (step - 1) % int(s["hessian_interval"]) == 0:
        h = s["beta2"] * h + (1 - s["beta2"]) * g * g
    clipped = m / x.maximum(s["rho"] * s["bs"] * h + 1e-15, abs(m))
    return p * (1 - s["lr"] * s["weight_decay"]) - s["lr"] * clipped, m, h


SOPHIA = Formula(
    "sophia", (("exp_avg", _AVERAGE), ("hessian", _MAGNITUDE)), _sophia_constants, _sophia, _sophia_meaning
)
