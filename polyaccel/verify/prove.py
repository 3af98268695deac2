"""`prove`: the runs of a verification, in order, and what they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from polyaccel.comm.init.threads import run_threads
from polyaccel.errors import PolyaccelError
from polyaccel.verify.compare import Finding, Tolerances, differing_ranks, in_order, merge
from polyaccel.verify.variant import Array, Record, Variant, VerificationEnd, running

Run = Callable[[Variant], Sequence[Record]]
"""Runs the user's program as a variant, on all ranks; returns the records of the ranks."""
Merge = Callable[[Sequence[Finding]], Sequence[Finding]]
"""Returns the findings of all ranks, the same on each, where every rank compares what it has."""
_MOST_LOSS_NOISE = 1e-4
NOISES = 8
"""Plain runs with noise at most. Each flips a choice that rounding can flip in one of three or four."""
_NEVER_OFF = frozenset({"deferred_init", "device", "mpu", "optimizer"})
"""Rewrites without which no run is possible."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What a verification found."""

    findings: tuple[Finding, ...]
    """Quantities that differ, the first cause first."""
    differing: tuple[str, ...] = ()
    """Quantities that are not the same on all ranks."""
    blamed: tuple[str, ...] = ()
    """Rewrites without which the first finding goes away: each, or all together where no single one is to blame."""
    acted: dict[str, int] = field(default_factory=dict)
    """How many modules and parameters each rewrite changed."""
    worst: float = 0.0
    """The largest difference in spreads."""
    limit: float = 0.0
    """The largest difference in spreads that is allowed."""
    quantities: int = 0
    """How many quantities were compared."""
    loss_noise: float = 0.0
    """How far the losses of plain runs are apart, as a share of the loss."""
    plain: str = "torch"
    """What was compared with: the framework of the plain run."""

    @property
    def is_proven(self) -> bool:
        """Whether all quantities agree."""
        return not self.findings and not self.differing

    @property
    def is_weak(self) -> bool:
        """Whether plain runs differ by more than rounding: the program draws other numbers in each run."""
        return self.loss_noise > _MOST_LOSS_NOISE


def prove(run: Run, *, steps: int = 2, variant: Variant | None = None, all_findings: Merge = list) -> Proof:
    """Run a program as plain torch or JAX and with the engine, and compare them. See [Note: Shadow runs].

    Args:
        run: Runs the program as a variant.
        steps: Optimizer steps of each engine to compare.
        variant: What all runs have in common, in place of `steps`.
        all_findings: Exchanges the findings where each rank has records of its quantities alone.

    Returns:
        The comparison. Rewrites are blamed where the first finding goes away without them.
    """
    base = replace(variant or Variant("", steps=steps), name="plain", is_plain=True)
    of_plain = run(base)
    plain = merge(of_plain)
    names, events = _forward_order(of_plain, plain), of_plain[0].events if of_plain else []
    engine = replace(base, name="engine", is_plain=False)
    records = run(engine)
    values = merge(records)

    def found_in(values: Mapping[str, Array]) -> list[Finding]:
        return in_order(all_findings(tolerances.findings(values, names, events)), names, events)

    def differing_in(records: Sequence[Record]) -> list[str]:
        return differing_ranks(records, tolerances.limit, tolerances.spreads)

    below, above = replace(base, name="plain-1", moved=-1), replace(base, name="plain+1", moved=1, reorders=True)
    moved: list[Mapping[str, Array]] = []
    tolerances = Tolerances.of_runs(plain, moved)
    while ((findings := found_in(values)) or differing_in(records)) and len(moved) < 2:
        moved.append(merge(run((below, above)[len(moved)])))
        tolerances = Tolerances.of_runs(plain, moved)
    if findings:
        tolerances = _widened(tolerances, run, base)
        findings = found_in(values)
    has_choices, noise = True, 0
    while findings and has_choices and noise < NOISES:  # see [Note: Choices that rounding flips]
        noise += 1
        with_noise = run(replace(base, name=f"plain with noise {noise}", noise=noise))
        has_choices = any(one.has_choices for one in with_noise)
        around = tolerances.around(merge(with_noise))
        if not all_findings(around.findings(values)):
            tolerances, findings = around, []
    differing = differing_in(records)
    acted: dict[str, int] = {}
    for record in records:
        for name, count in record.acted.items():
            acted[name] = max(acted.get(name, 0), count)

    def agrees(without: tuple[str, ...]) -> bool:
        """Whether the first finding is gone; what is left has another cause."""
        try:
            found = run(replace(engine, name=f"without {' and '.join(without)}", without=without))
        except PolyaccelError:
            return False  # the rest of the rewrites does not run without them
        return findings[0].key not in {one.key for one in found_in(merge(found))}

    blamed = _blamed(agrees, [name for name in acted if name not in _NEVER_OFF]) if findings else ()
    return Proof(
        tuple(findings),
        tuple(differing),
        blamed,
        acted,
        tolerances.worst(values),
        tolerances.limit,
        sum(key in values for key in plain),
        tolerances.loss_noise,
        " and ".join(sorted({record.plain for record in of_plain})) or "torch",
    )


def _forward_order(records: Sequence[Record], values: Mapping[str, Array]) -> list[str]:
    """Parameters and buffers in the order of the forward pass, as far as it was recorded."""
    recorded = records[0].order if records else []
    trained = [key.split("/", 2)[2] for key in values if key.startswith("0/gradient/")]
    return list(dict.fromkeys([*recorded, *trained]))


def _widened(tolerances: Tolerances, run: Run, base: Variant) -> Tolerances:
    """The tolerances by a run in float64, where the program runs in it."""
    try:
        return tolerances.widened(merge(run(replace(base, name="plain, float64", is_double=True))))
    except PolyaccelError:
        return tolerances


def _blamed(agrees: Callable[[tuple[str, ...]], bool], names: Sequence[str]) -> tuple[str, ...]:
    """The rewrites without each of which the run agrees; else the pair, else all of them, without which it does."""
    alone = tuple(name for name in names if agrees((name,)))
    if alone or len(names) < 2 or not agrees(tuple(names)):
        return alone
    pairs = combinations(names, 2) if len(names) > 2 else ()
    return next((pair for pair in pairs if agrees(pair)), tuple(names))


def threads_run(world_size: int, program: Callable[[], object]) -> Run:
    """Return what runs `program` on ranks that are threads of this process, for `prove`."""

    def guarded(_: object) -> None:
        try:
            program()
        except VerificationEnd:
            return

    def run(variant: Variant) -> Sequence[Record]:
        with running(variant) as active:
            run_threads(world_size, guarded)
            return list(active.records.values())

    return run
