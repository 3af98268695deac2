"""Comparison of recorded runs, with tolerances that follow from the spread of plain runs.

A quantity has the key `step/kind/name`. Kinds in `EXACT` have to be equal bit by bit; of all others the largest
absolute difference counts. Quantities of `OF_RANKS` are those of each rank: the name ends in `@` and the rank. Names of
the second engine of a script begin with `1:`.

[Note: Derived tolerances]
The spread of a quantity is the largest difference of the moved plain runs from the plain one, and at least one unit in
the last place of its largest value, or of the parameter's for an update. Both moved runs begin with other weights, and
one adds its products up in another order, as a rewrite does: each alone misses quantities that it does not touch, such
as the gradients of zeros. The limit in spreads is `MARGIN` times the ratio of the farthest to the second farthest moved
run, which nine in ten quantities do not exceed. Right programs reach a few spreads, and wrong ones begin in the
thousands.

The engine's run differs from the plain one as a moved run does, by two roundings, so the plain run is the reference. A
run in float64 would cost a fifth run of each verification, and decides only where something differs: there it shows by
how much rounding has moved the plain run itself (`widened`). It counts only where it is the same computation, within
the limit for nine in ten quantities: random numbers of another type would excuse any error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polyaccel.verify.variant import Array, Record

MARGIN = 16.0
_OF_NOISE = 2.0
_QUANTILE = 0.9  # of ratios: one moved run that agrees with the plain one by chance says nothing
EXACT = frozenset({"attribute", "random"})
OF_RANKS = frozenset({"input", "buffer", "kept", *EXACT})
"""Kinds of which each rank has its own, for its own samples."""
MAGNITUDE = "magnitude"
"""Kind of the largest absolute value of a parameter, in whose last place its update is rounded."""
KINDS = ("gradient", "input", "norm", "update", "state", "buffer", "kept", "attribute", "random", "loss")
"""Kinds of quantities: causes come before what follows from them. An `input` is the gradient of one, and `kept` is a
tensor that is an attribute."""
OF_SHAPES = frozenset({"input", "kept"})
"""Kinds of which a rank may have a part by design; then it is not compared. Where bins hide the shape, the name has
the number of elements."""
_QUANTITY = re.compile(r"^(?:(?P<engine>\d+):)?(?P<name>.*?)(?:@(?P<rank>\d+))?$", re.DOTALL)
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
        """Name of the parameter, buffer or attribute; a state's is that of its parameter and its own."""
        return self.key.split("/", 2)[2]

    @property
    def engine(self) -> int:
        """Number of the engine, in the order in which the script made them."""
        return int(_parts(self.key)["engine"] or 0)

    @property
    def rank(self) -> int | None:
        """Rank that has it; None for what all ranks have, or the first."""
        rank = _parts(self.key)["rank"]
        return None if rank is None else int(rank)

    @property
    def parameter(self) -> str:
        """Name of the parameter, buffer or attribute alone, without the engine, the rank and the state."""
        name: str = _parts(self.key)["name"] or ""
        return name.rpartition(" ")[0] if self.kind == "state" else name

    def __str__(self) -> str:
        name = " ".join(part for part in (self.kind, _parts(self.key)["name"]) if part)
        where = f" of engine {self.engine}" if self.engine else ""
        where += "" if self.rank is None else f" on rank {self.rank}"
        return f"step {self.step}: {name}{where}: {self.found:.6g}, not {self.wanted:.6g}"


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

    def widened(self, reference: Values) -> Tolerances:
        """Return these tolerances with spreads that reach to `reference`, the plain run in float64.

        They stay as they are where the reference is another computation. See [Note: Derived tolerances].
        """
        shared = [key for key in self.spreads if key in reference and reference[key].shape == self.plain[key].shape]
        apart = {key: _distance(self.plain[key], reference[key]) for key in shared}
        ratios = [apart[key] / self.spreads[key] for key in shared]
        if not ratios or not np.quantile(ratios, _QUANTILE) <= self.limit:
            return self
        return replace(self, spreads={**self.spreads, **{key: max(self.spreads[key], apart[key]) for key in shared}})

    def around(self, run: Values) -> Tolerances:
        """Return tolerances around a plain run with noise, of the same quantities, which its noise moves too."""
        if run.keys() != self.plain.keys():
            return self
        return replace(self, plain=run, limit=_OF_NOISE * self.limit)

    def findings(self, run: Values, names: Sequence[str] = (), events: Sequence[str] = ()) -> list[Finding]:
        """Return what differs in `run`, the first cause first.

        Args:
            run: Values of the engine's run.
            names: Parameters in the order of the forward pass.
            events: Updates in the order in which they were recorded, see `Record.events`.

        Returns:
            Findings by update, kind and place in `names`. A quantity that one of the two runs lacks is not one.
        """
        shared = [key for key in run if key in self.spreads or key in self.exact]
        return in_order((one for key in shared if (one := self._finding(key, run[key])) is not None), names, events)

    def worst(self, run: Values) -> float:
        """Return the largest difference in spreads, over quantities that need not be equal bit by bit."""
        shared = [key for key in self.spreads if key in run and self._is_compared(key, run[key])]
        return max((_distance(self.plain[key], run[key]) / self.spreads[key] for key in shared), default=0.0)

    def _is_compared(self, key: str, value: Array) -> bool:
        return value.shape == self.plain[key].shape or key.split("/", 2)[1] not in OF_SHAPES

    def _finding(self, key: str, value: Array) -> Finding | None:
        wanted = self.plain[key]
        if not self._is_compared(key, value):
            return None
        if wanted.shape != value.shape:
            return Finding(key, float(value.size), float(wanted.size), float("inf"))
        if key not in self.spreads:
            same = np.array_equal(wanted, value)
            return None if same else Finding(key, *_where_they_differ(value, wanted), float("inf"))
        spreads = _distance(wanted, value) / self.spreads[key]
        return Finding(key, *_where_they_differ(value, wanted), spreads) if not spreads <= self.limit else None


def in_order(findings: Iterable[Finding], names: Sequence[str], events: Sequence[str] = ()) -> list[Finding]:
    """Return `findings`, the first cause first: by update, kind and place in `names`.

    Without `events` updates come by step and engine.
    """
    at = {name: index for index, name in enumerate(names)}
    when = {event: index for index, event in enumerate(events)}

    def place(one: Finding) -> tuple[Any, ...]:
        name = f"{one.engine}:{one.parameter}" if one.engine else one.parameter
        update = when.get(f"{one.engine}/{one.step}", len(when))
        return update, one.step, one.engine, KINDS.index(one.kind), at.get(name, len(at)), one.name

    return sorted(findings, key=place)


def last_of_backward(findings: Sequence[Finding]) -> Finding | None:
    """Return the last gradient in forward order that differs in the first update, where the loss of its step agrees.

    Then the forward pass is right. A backward pass goes wrong at that parameter or behind it, and all before follow.
    None where the forward pass differs too, or no gradient does.
    """
    if not findings:
        return None
    of_first = [one for one in findings if (one.engine, one.step) == (findings[0].engine, findings[0].step)]
    gradients = [one for one in of_first if one.kind == "gradient"]
    return gradients[-1] if gradients and not any(one.kind == "loss" for one in of_first) else None


def merge(records: Iterable[Record]) -> dict[str, Array]:
    """Return one run's values of all ranks: losses averaged, and everything else of the first rank that has it.

    Of several ranks each later one has its quantities of `OF_RANKS` too, under its own name.
    """
    values: dict[str, Array] = {}
    losses: dict[str, list[Array]] = {}
    ranks = sorted(records, key=lambda one: one.rank)
    for record in ranks:
        for key, value in record.values.items():
            kind = key.split("/", 2)[1]
            if kind == "loss":
                losses.setdefault(key, []).append(value)
                continue
            values.setdefault(key, value)
            if kind in OF_RANKS and record.rank and len(ranks) > 1:
                values[f"{key}@{record.rank}"] = value
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


def _parts(key: str) -> Mapping[str, str | None]:
    """The engine, the name and the rank of a quantity."""
    found = _QUANTITY.match(key.split("/", 2)[2])
    assert found is not None  # it matches all
    return found.groupdict()


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
