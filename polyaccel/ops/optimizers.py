"""Optimizers as data: each row of `OPTIMIZERS` has the states, the keys of a group, and the formula.

A formula is written here twice: as in the literature, in float64, and in the order of operations that every kernel
keeps, on arrays of any library. It is written again in csrc/kernels/updates.h and in `polyaccel.ops.triton.updates`,
under the same name and with the same constants; a device that has neither runs it on arrays. To add an optimizer, add a
row here, its formula there, and its parameters to `polyaccel.config`; staging, casts, rounding, cutting and tests are
the same for all.

[Note: Bit-exact formulas]
`arrays` rounds each operation once, in the order in which csrc and Triton compute. numpy's results, csrc's and Triton's
are the same bits therefore; torch's and JAX's own compilers may fuse a product and a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

from polyaccel.ops.base import ArrayMath, Formula, Rule, Settings, StateRole
from polyaccel.ops.formulas import SCHEDULE_FREE, SOPHIA

_AVERAGE, _MAGNITUDE, _DIRECTION = StateRole


@dataclass(frozen=True, slots=True, eq=False)
class Optimizer:
    """One optimizer: its states, the keys that it reads of a group, and its formula.

    Attributes:
        kind: Name in checkpoints.
        config_names: Names in configs.
        states: States that are kept for each element, in float32, and the group's key of their initial value (None:
            zero).
        keys: Keys of the group that an update reads, with their defaults (None: required). `betas` is read as `beta1`
            and `beta2`.
        formula: Chooses the formula by these settings.
    """

    kind: str
    config_names: tuple[str, ...]
    states: Mapping[str, str | None]
    keys: Mapping[str, float | None]
    formula: Callable[[Settings], Formula]

    def rule(self, group: Mapping[str, Any], step: int) -> Rule:
        """Make the rule of one update.

        Args:
            group: Optimizer group of the parameter.
            step: Number of the update, from 1.

        Returns:
            The formula with the group's hyperparameters.
        """
        settings: dict[str, float] = {}
        for key, default in self.keys.items():
            value = group[key] if default is None else group.get(key, default)
            if key == "betas":
                settings["beta1"], settings["beta2"] = map(float, value)
            else:
                settings[key] = float(value)
        return Rule(self.formula(settings), settings, step)


# Adam (Kingma & Ba 2015, algorithm 1), AdamW (Loshchilov & Hutter 2019, algorithm 2), LAMB (You et al. 2020, 2).


def _adam_constants(s: Settings, step: int, *, decoupled: bool) -> tuple[float, ...]:
    """The last is what decoupled decay leaves of a weight, else the weight decay."""
    correction1 = 1 - s["beta1"] ** step if s["bias_correction"] else 1.0
    correction2 = 1 - s["beta2"] ** step if s["bias_correction"] else 1.0
    return (
        *(s["beta1"], 1 - s["beta1"], s["beta2"], 1 - s["beta2"]),
        *(1 / correction1, 1 / sqrt(correction2), s["eps"], s["lr"]),
        1 - s["lr"] * s["weight_decay"] if decoupled else s["weight_decay"],
    )


def _moments(x: ArrayMath, k: Any, g: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
    """(bias-corrected direction, both moments with `g`)."""
    beta1, rest1, beta2, rest2, correction1, correction2, eps, *_ = k
    m *= beta1
    m += x.mul(g, rest1)
    square = x.mul(g, g)
    square *= rest2
    v *= beta2
    v += square
    denominator = x.sqrt(v, 1)
    denominator *= correction2
    denominator += eps
    direction = x.mul(m, correction1)
    direction /= denominator
    return direction, m, v


def _adam(x: ArrayMath, k: Any, p: Any, g: Any, m: Any, v: Any, *, decoupled: bool) -> tuple[Any, ...]:
    *_, lr, decay = k
    if not decoupled:
        g = x.plus_decay(g, p, decay)
    direction, m, v = _moments(x, k, g, m, v)
    if decoupled:
        p *= decay
    direction *= lr
    p -= direction
    return p, m, v


def _lamb(x: ArrayMath, k: Any, p: Any, g: Any, m: Any, v: Any) -> tuple[Any, ...]:
    direction, m, v = _moments(x, k, g, m, v)
    return p, m, v, x.plus_decay(direction, p, k[-1])


def _moments_meaning(x: ArrayMath, s: Settings, step: int, g: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
    m = s["beta1"] * m + (1 - s["beta1"]) * g
    v = s["beta2"] * v + (1 - s["beta2"]) * g * g
    correction1 = 1 - s["beta1"] ** step if s["bias_correction"] else 1.0
    correction2 = 1 - s["beta2"] ** step if s["bias_correction"] else 1.0
    return (m / correction1) / (x.sqrt(v / correction2) + s["eps"]), m, v


def _adam_reference(
    x: ArrayMath, s: Settings, step: int, p: Any, g: Any, m: Any, v: Any, *, decoupled: bool
) -> tuple[Any, ...]:
    if decoupled:
        p = p * (1 - s["lr"] * s["weight_decay"])
    else:
        g = g + s["weight_decay"] * p
    direction, m, v = _moments_meaning(x, s, step, g, m, v)
    return p - s["lr"] * direction, m, v


def _lamb_meaning(x: ArrayMath, s: Settings, step: int, p: Any, g: Any, m: Any, v: Any) -> tuple[Any, ...]:
    """Before the trust ratio."""
    direction, m, v = _moments_meaning(x, s, step, g, m, v)
    return p, m, v, direction + s["weight_decay"] * p


_ADAM_STATES = (("exp_avg", _AVERAGE), ("exp_avg_sq", _MAGNITUDE))
ADAMW, ADAM = (
    Formula(
        name,
        _ADAM_STATES,
        partial(_adam_constants, decoupled=decoupled),
        partial(_adam, decoupled=decoupled),
        partial(_adam_reference, decoupled=decoupled),
    )
    for name, decoupled in (("adamw", True), ("adam", False))
)
LAMB = Formula(
    "lamb",
    (*_ADAM_STATES, ("direction", _DIRECTION)),
    partial(_adam_constants, decoupled=False),
    _lamb,
    _lamb_meaning,
    writes_weights=False,
)


# The second half of an update that wrote a direction. The "gradient" of the call is that direction.


def _apply(x: ArrayMath, k: Any, p: Any, g: Any) -> tuple[Any, ...]:
    p -= x.mul(g, k[0])
    return (p,)


def _apply_meaning(x: ArrayMath, s: Settings, step: int, p: Any, g: Any) -> tuple[Any, ...]:
    return (p - s["rate"] * g,)


APPLY = Formula("apply", (), lambda s, step: (s["rate"],), _apply, _apply_meaning)


def apply_direction(rate: float) -> Rule:
    """Make the rule `master -= rate * direction`, the second half of a rule without `writes_weights`.

    The call passes as gradient the direction that the first half wrote.

    Args:
        rate: Learning rate times trust ratio.

    Returns:
        The rule.
    """
    return Rule(APPLY, {"rate": rate})


# SGD with momentum (Sutskever et al. 2013) as torch.optim.SGD has it: the first momentum is the gradient itself.


def _sgd_constants(s: Settings, step: int) -> tuple[float, ...]:
    return s["lr"], s["momentum"], 1 - s["dampening"], s["weight_decay"], float(step == 1)


def _sgd(x: ArrayMath, k: Any, p: Any, g: Any) -> tuple[Any, ...]:
    lr, _, _, decay, _ = k
    g = x.plus_decay(g, p, decay)
    p -= x.mul(g, lr)
    return (p,)


def _momentum(x: ArrayMath, k: Any, p: Any, g: Any, average: Any, *, nesterov: bool) -> tuple[Any, ...]:
    lr, momentum, rest, decay, first = k
    g = x.plus_decay(g, p, decay)
    average *= momentum
    average += x.mul(g, rest)
    average = x.choose(first, g, average)
    step = average
    if nesterov:
        step = x.mul(average, momentum, 1)
        step += g
    p -= x.mul(step, lr)
    return p, average


def _sgd_meaning(x: ArrayMath, s: Settings, step: int, p: Any, g: Any) -> tuple[Any, ...]:
    return (p - s["lr"] * (g + s["weight_decay"] * p),)


def _momentum_meaning(
    x: ArrayMath, s: Settings, step: int, p: Any, g: Any, average: Any, *, nesterov: bool
) -> tuple[Any, ...]:
    g = g + s["weight_decay"] * p
    average = g if step == 1 else s["momentum"] * average + (1 - s["dampening"]) * g
    direction = g + s["momentum"] * average if nesterov else average
    return p - s["lr"] * direction, average


SGD = Formula("sgd", (), _sgd_constants, _sgd, _sgd_meaning)
MOMENTUM, NESTEROV = (
    Formula(
        name,
        (("momentum_buffer", _AVERAGE),),
        _sgd_constants,
        partial(_momentum, nesterov=nesterov),
        partial(_momentum_meaning, nesterov=nesterov),
    )
    for name, nesterov in (("momentum", False), ("nesterov", True))
)


def _sgd_formula(s: Settings) -> Formula:
    if not s["momentum"]:
        return SGD
    return NESTEROV if s["nesterov"] else MOMENTUM


# Adagrad (Duchi et al. 2011) as torch.optim.Adagrad has it.


def _adagrad_rate(s: Settings, step: int) -> float:
    return s["lr"] / (1 + (step - 1) * s["lr_decay"])


def _adagrad_constants(s: Settings, step: int) -> tuple[float, ...]:
    return _adagrad_rate(s, step), s["eps"], s["weight_decay"]


def _adagrad(x: ArrayMath, k: Any, p: Any, g: Any, total: Any) -> tuple[Any, ...]:
    rate, eps, decay = k
    g = x.plus_decay(g, p, decay)
    total += x.mul(g, g)
    denominator = x.sqrt(total)
    denominator += eps
    g *= rate
    g /= denominator
    p -= g
    return p, total


def _adagrad_meaning(x: ArrayMath, s: Settings, step: int, p: Any, g: Any, total: Any) -> tuple[Any, ...]:
    g = g + s["weight_decay"] * p
    total = total + g * g
    return p - _adagrad_rate(s, step) * g / (x.sqrt(total) + s["eps"]), total


ADAGRAD = Formula("adagrad", (("sum", _MAGNITUDE),), _adagrad_constants, _adagrad, _adagrad_meaning)


# Adamax (Kingma & Ba 2015, algorithm 2) as torch.optim.Adamax has it: `eps` is added to the gradient's magnitude.


def _adamax_constants(s: Settings, step: int) -> tuple[float, ...]:
    rate = s["lr"] / (1 - s["beta1"] ** step)
    return s["beta1"], 1 - s["beta1"], s["beta2"], rate, s["eps"], s["weight_decay"]


def _adamax(x: ArrayMath, k: Any, p: Any, g: Any, m: Any, largest: Any) -> tuple[Any, ...]:
    beta1, rest1, beta2, rate, eps, decay = k
    g = x.plus_decay(g, p, decay)
    m *= beta1
    m += x.mul(g, rest1)
    magnitude = x.abs(g)
    magnitude += eps
    largest *= beta2
    largest = x.maximum(largest, magnitude)
    step = x.mul(m, rate)
    step /= largest
    p -= step
    return p, m, largest


def _adamax_meaning(x: ArrayMath, s: Settings, step: int, p: Any, g: Any, m: Any, largest: Any) -> tuple[Any, ...]:
    g = g + s["weight_decay"] * p
    m = s["beta1"] * m + (1 - s["beta1"]) * g
    largest = x.maximum(s["beta2"] * largest, abs(g) + s["eps"])
    return p - s["lr"] / (1 - s["beta1"] ** step) * m / largest, m, largest


ADAMAX = Formula(
    "adamax", (("exp_avg", _AVERAGE), ("exp_inf", _MAGNITUDE)), _adamax_constants, _adamax, _adamax_meaning
)


# Lion (Chen et al. 2023, algorithm 2).


def _lion_constants(s: Settings, step: int) -> tuple[float, ...]:
    betas = (s["beta1"], 1 - s["beta1"], s["beta2"], 1 - s["beta2"])
    return *betas, s["lr"], 1 - s["lr"] * s["weight_decay"]


def _lion(x: ArrayMath, k: Any, p: Any, g: Any, average: Any) -> tuple[Any, ...]:
    beta1, rest1, beta2, rest2, lr, keep = k
    blend = x.mul(average, beta1, 1)
    blend += x.mul(g, rest1)
    direction = x.sign(blend)
    direction *= lr
    p *= keep
    p -= direction
    g *= rest2
    average *= beta2
    average += g
    return p, average


def _lion_meaning(x: ArrayMath, s: Settings, step: int, p: Any, g: Any, average: Any) -> tuple[Any, ...]:
    direction = x.sign(s["beta1"] * average + (1 - s["beta1"]) * g)
    decayed = p * (1 - s["lr"] * s["weight_decay"])
    return decayed - s["lr"] * direction, s["beta2"] * average + (1 - s["beta2"]) * g


LION = Formula("lion", (("exp_avg", _AVERAGE),), _lion_constants, _lion, _lion_meaning)


_ROWS = (
    Optimizer(
        "Adam",
        ("Adam", "AdamW"),
        {"exp_avg": None, "exp_avg_sq": None},
        {"lr": None, "betas": None, "eps": None, "weight_decay": 0.0, "decoupled": True, "bias_correction": True},
        lambda s: ADAMW if s["decoupled"] else ADAM,
    ),
    Optimizer(
        "Sgd",
        ("SGD",),
        {"momentum_buffer": None},
        {"lr": None, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
        _sgd_formula,
    ),
    Optimizer(
        "Adagrad",
        ("Adagrad",),
        {"sum": "initial_accumulator_value"},
        {"lr": None, "eps": 1e-10, "weight_decay": 0.0, "lr_decay": 0.0},
        lambda s: ADAGRAD,
    ),
    Optimizer(
        "Adamax",
        ("Adamax",),
        {"exp_avg": None, "exp_inf": None},
        {"lr": None, "betas": None, "eps": None, "weight_decay": 0.0},
        lambda s: ADAMAX,
    ),
    Optimizer("Lion", ("Lion",), {"exp_avg": None}, {"lr": None, "betas": None, "weight_decay": 0.0}, lambda s: LION),
    Optimizer(
        "Lamb",
        ("Lamb",),
        {"exp_avg": None, "exp_avg_sq": None},
        {"lr": None, "betas": None, "eps": None, "weight_decay": 0.0, "bias_correction": True}
        | {"min_coeff": 0.01, "max_coeff": 10.0},
        lambda s: LAMB,
    ),
    Optimizer(
        "ScheduleFreeAdamW",
        ("ScheduleFreeAdamW",),
        {"z_minus_y": None, "exp_avg_sq": None},
        {"lr": None, "betas": None, "eps": None, "weight_decay": 0.0, "warmup_steps": 0, "weight_lr_power": 2.0},
        lambda s: SCHEDULE_FREE,
    ),
    Optimizer(
        "Sophia",
        ("Sophia",),
        {"exp_avg": None, "hessian": None},
        {"lr": None, "betas": None, "rho": 0.04, "weight_decay": 0.0, "bs": 5120, "hessian_interval": 10},
        lambda s: SOPHIA,
    ),
)

OPTIMIZERS: Mapping[str, Optimizer] = {name: row for row in _ROWS for name in row.config_names}
"""By the names that a resolved config uses."""
