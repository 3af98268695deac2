"""From the runs of a sitting to one row a variant: medians, the distributed tax, and whether its losses are right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean, median

from bench.steps.cases import VARIANTS, Case, Run

LOSS_TOLERANCE = 1e-4
"""How far fp32 losses may be from DDP's, in nats, at any step. At 126 M parameters DDP's own are up to 3.2e-5 from
those of float64 in the first steps, where the loss jumps; the engine's are within 5e-7."""
_REFERENCE = "ddp"
_QUIET_CPUS = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """A variant's figures over all rounds of a case."""

    variant: str
    step_s: float
    """Median of all measured steps."""
    fastest_s: float
    tokens_per_s: float
    tax: float | None
    """Step over `local`'s step of the same round, minus one; the median over rounds."""
    cpu_s: float
    """CPU seconds a step and rank, the median over rounds."""
    peak_nbytes: int
    """Peak RSS in training of the rank and round that needed most."""
    pss_nbytes: int
    """PSS at the end, likewise."""
    minor_faults: float
    deviation: float | None
    """The largest distance of a loss from the reference's; None for the reference itself, or where there is none."""
    is_wrong: bool
    other_cpus: float
    """The most that other processes used in any round."""

    @property
    def was_disturbed(self) -> bool:
        return self.other_cpus > _QUIET_CPUS


def by_case(runs: Iterable[Run]) -> dict[Case, list[Run]]:
    """Runs grouped by case, cases in the order in which they first appear."""
    cases: dict[Case, list[Run]] = {}
    for run in runs:
        cases.setdefault(run.job.case, []).append(run)
    return cases


def summarise(runs: Sequence[Run]) -> list[Row]:
    """The rows of one case, in the order of `VARIANTS`."""
    grouped = {name: [run for run in runs if run.job.variant == name] for name in VARIANTS}
    grouped = {name: own for name, own in grouped.items() if own}
    local_s = {run.job.round: median(run.step_s) for run in grouped.get("local", [])}
    reference = choose_reference(grouped)
    return [_row(name, own, local_s, reference) for name, own in grouped.items()]


def choose_reference(grouped: Mapping[str, Sequence[Run]]) -> Run | None:
    """Whose losses the others must have: DDP's, without it those of the first variant whose ranks exchange anything."""
    names = [_REFERENCE, *(name for name in grouped if VARIANTS[name].communicates)]
    return next((grouped[name][0] for name in names if name in grouped), None)


def deviation(run: Run, reference: Run) -> float:
    """The largest distance between losses of the same step; infinite if one is not a number.

    Without communication only the first loss is comparable: it comes before the first update.
    """
    count = None if VARIANTS[run.job.variant].communicates else 1
    pairs = list(zip(run.losses, reference.losses, strict=False))[:count]
    distances = [abs(loss - expected) for loss, expected in pairs]
    return max(distance if isfinite(distance) else inf for distance in distances)


def _row(name: str, runs: Sequence[Run], local_s: Mapping[int, float], reference: Run | None) -> Row:
    case = runs[0].job.case
    step_s = median(step for run in runs for step in run.step_s)
    taxes = [median(run.step_s) / local_s[run.job.round] - 1.0 for run in runs if run.job.round in local_s]
    compared = [deviation(run, reference) for run in runs if reference is not None and run is not reference]
    farthest = max(compared, default=None)
    is_exact = case.dtype == "fp32" and not VARIANTS[name].is_quantised
    limit = LOSS_TOLERANCE if is_exact else inf  # bf16 policies differ, so their losses do
    ranks = [rank for run in runs for rank in run.memory]
    return Row(
        variant=name,
        step_s=step_s,
        fastest_s=min(step for run in runs for step in run.step_s),
        tokens_per_s=case.tokens_per_step / step_s,
        tax=median(taxes) if taxes and VARIANTS[name].communicates else None,
        cpu_s=median(run.cpu_s for run in runs),
        peak_nbytes=max(rank.peak_nbytes for rank in ranks),
        pss_nbytes=max(rank.pss_nbytes for rank in ranks),
        minor_faults=median(run.minor_faults for run in runs),
        deviation=farthest,
        is_wrong=not all(isfinite(loss) for run in runs for loss in run.losses) or (farthest or 0.0) > limit,
        other_cpus=max(run.other_cpus for run in runs),
    )


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One variant's peak memory a rank beside the formula, in bytes."""

    variant: str
    base: float
    """Before there was a model: imports, process group, corpus."""
    states: int | None
    """Model states by the formula; None where there is none."""
    rest: float
    """Activations and the framework's own memory: what `local` needs beyond its base and its states."""
    peak: float
    pss: float

    @property
    def expected(self) -> float | None:
        return None if self.states is None else self.base + self.states + self.rest


LOCAL_STATE_NBYTES = {"fp32": 16, "bf16": 18}
"""Bytes a parameter of plain AdamW: the parameter, its gradient and two states, all fp32, and under autocast the weight
in bf16, which backward needs too. The engines compute with the parameters that they have."""


def compare_memory(runs: Sequence[Run]) -> list[MemoryRow]:
    """The rows of one case, in the order of `VARIANTS`; figures are means over ranks and rounds. Needs `local`."""
    grouped = {name: [run for run in runs if run.job.variant == name] for name in VARIANTS}
    local = grouped["local"]
    local_states = LOCAL_STATE_NBYTES[local[0].job.case.dtype] * local[0].param_numel
    rest = _mean(local, "peak_nbytes") - _mean(local, "base_nbytes") - local_states
    rows = []
    for name, own in grouped.items():
        if own:
            estimate = own[0].estimate_nbytes
            states = local_states if name == "local" else sum(estimate.values()) if estimate else None
            base, peak, pss = (_mean(own, field) for field in ("base_nbytes", "peak_nbytes", "pss_nbytes"))
            rows.append(MemoryRow(name, base, states, rest, peak, pss))
    return rows


def _mean(runs: Sequence[Run], field: str) -> float:
    return fmean(getattr(rank, field) for run in runs for rank in run.memory)
