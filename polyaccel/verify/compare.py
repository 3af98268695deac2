"""Comparison of recorded runs, with tolerances that follow from the spread of plain runs.

A quantity has the key `step/kind/name`. Kinds in `EXACT` have to be equal bit by bit; of all others the largest
absolute difference counts.

[Note: Derived tolerances]
The spread of a quantity is the largest difference of the moved plain runs from the plain one, and at least one unit in
the last place of its largest value, or of the parameter's for an update. The limit in spreads is `MARGIN` times the
ratio of the farthest to the second farthest moved run, which nine in ten quantities do not exceed. Right programs reach
a few spreads, and wrong ones begin in the thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polyaccel.verify.variant import Array, Record

MARGIN = 16.0
_QUANTILE = 0.9  # of ratios: one moved run that agrees with the plain one by chance says nothing
EXACT = frozenset({"attribute", "random"})
MAGNITUDE = "magnitude"
"""Kind of the largest absolute value of a parameter, in whose last place its update is rounded."""
KINDS = ("gradient", "norm", "update", "state", "buffer", "attribute", "random", "loss")
"""Kinds of quantities: causes come before what follows from them."""
Values = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Finding:
    """A quantity of the engine's run that differs from the plain run by more than its limit."""

    key: str
    found: float
    """The engine's value where the two differ most."""
    wanted: float
    """The plain run's value there."""
    spreads: float
    """Their difference in spreads; infinite for quantities that have to be equal."""

    @property
    def step(self) -> int:
        """Number of the optimizer step, from 0."""
        return int(self.key.split("/", 2)[0])

    @property
    def kind(self) -> str:
        """Kind of the quantity."""
        return self.key.split("/", 2)[1]

    @property
    def name(self) -> str:
        """Name of the parameter, buffer or attribute."""
        return self.key.split("/", 2)[2]

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind} {self.name}: {self.found:.6g}, not {self.wanted:.6g}"


@dataclass(frozen=True, slots=True)
class Tolerances:
    """The plain run's values, the spread of each, and the limit in spreads."""

    plain: Values
    spreads: Mapping[str, float]
    limit: float
    exact: frozenset[str] = frozenset()
    """Keys that have to be equal, as they are in all plain runs; generators that a script does not seed are not."""
    loss_noise: float = 0.0
    """The largest spread of a loss, as a share of the loss."""

    @staticmethod
    def of_runs(plain: Values, moved: Sequence[Values]) -> Tolerances:
        """Return the tolerances that follow from a plain run and at least two moved ones."""
        spreads, ratios, exact = {}, [1.0], set[str]()
        for key, value in plain.items():
            step, kind, name = key.split("/", 2)
            if kind == MAGNITUDE:
                continue
            if kind in EXACT:
                if all(key in run and np.array_equal(value, run[key]) for run in moved):
                    exact.add(key)
                continue
            magnitude = plain.get(f"{step}/{MAGNITUDE}/{name}") if kind == "update" else None
            largest = _largest(value) if magnitude is None else max(_largest(value), float(magnitude))
            floor = float(np.spacing(np.float32(largest)))
            ranked = sorted(max(floor, _distance(value, run[key])) for run in moved if key in run)
            spreads[key] = ranked[-1] if ranked else floor
            if len(ranked) > 1:
                ratios.append(ranked[-1] / ranked[-2])
        losses = [key for key in spreads if key.split("/", 2)[1] == "loss"]
        noise = max((spreads[key] / max(_largest(plain[key]), 1e-30) for key in losses), default=0.0)
        return Tolerances(plain, spreads, MARGIN * float(np.quantile(ratios, _QUANTILE)), frozenset(exact), noise)

    def findings(self, run: Values, names: Sequence[str] = ()) -> list[Finding]:
        """Return what differs in `run`, the first cause first.

        Args:
            run: Values of the engine's run.
            names: Parameters in the order of the forward pass.

        Returns:
            Findings by step, kind and place in `names`. A quantity that one of the two runs lacks is not one.
        """
        shared = [key for key in run if key in self.spreads or key in self.exact]
        return in_order((one for key in shared if (one := self._finding(key, run[key])) is not None), names)

    def worst(self, run: Values) -> float:
        """Return the largest difference in spreads, over quantities that need not be equal bit by bit."""
        shared = [key for key in self.spreads if key in run]
        return max((_distance(self.plain[key], run[key]) / self.spreads[key] for key in shared), default=0.0)

    def _finding(self, key: str, value: Array) -> Finding | None:
        wanted = self.plain[key]
        if wanted.shape != value.shape:
            return Finding(key, float(value.size), float(wanted.size), float("inf"))
        if key not in self.spreads:
            same = np.array_equal(wanted, value)
            return None if same else Finding(key, *_where_they_differ(value, wanted), float("inf"))
        spreads = _distance(wanted, value) / self.spreads[key]
        return Finding(key, *_where_they_differ(value, wanted), spreads) if not spreads <= self.limit else None


def in_order(findings: Iterable[Finding], names: Sequence[str]) -> list[Finding]:
    """Return `findings`, the first cause first: by step, kind and place in `names`."""
    at = {name: index for index, name in enumerate(names)}
    return sorted(findings, key=lambda one: (one.step, KINDS.index(one.kind), at.get(one.name, len(at)), one.name))


def merge(records: Iterable[Record]) -> dict[str, Array]:
    """Return one run's values of all ranks: losses averaged, and everything else of the first rank that has it."""
    values: dict[str, Array] = {}
    losses: dict[str, list[Array]] = {}
    for record in sorted(records, key=lambda one: one.rank):
        for key, value in record.values.items():
            if key.split("/", 2)[1] == "loss":
                losses.setdefault(key, []).append(value)
            else:
                values.setdefault(key, value)
    return values | {key: np.mean(np.stack(all_), axis=0) for key, all_ in losses.items()}


def differing_ranks(records: Sequence[Record], limit: float, spreads: Mapping[str, float]) -> list[str]:
    """Return the gradients, updates and norms that are not the same on all ranks that have them."""
    first: dict[str, Array] = {}
    found = []
    for record in records:
        for key, value in record.values.items():
            if key.split("/", 2)[1] not in ("gradient", "update", "norm"):
                continue
            other = first.setdefault(key, value)
            if other.shape != value.shape or not _distance(other, value) <= limit * spreads.get(key, np.inf):
                found.append(key)
    return sorted(set(found))


def _largest(value: Array) -> float:
    return float(np.max(np.abs(value), initial=0.0, where=np.isfinite(value)))


def _distance(one: Array, other: Array) -> float:
    """The largest absolute difference; infinite where only one is finite."""
    if one.shape != other.shape:
        return float("inf")
    if one.size == 0:
        return 0.0
    with np.errstate(invalid="ignore"):
        difference = np.abs(one.astype(np.float64) - other.astype(np.float64))
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    return float(np.max(np.where(same, 0.0, np.where(np.isfinite(difference), difference, np.inf))))


def _where_they_differ(one: Array, other: Array) -> tuple[float, float]:
    if one.size == 0:
        return 0.0, 0.0
    with np.errstate(invalid="ignore"):
        difference = np.abs(one.astype(np.float64) - other.astype(np.float64)).reshape(-1)
    index = int(np.argmax(np.where(np.isnan(difference), np.inf, difference)))
    return float(one.reshape(-1)[index]), float(other.reshape(-1)[index])
