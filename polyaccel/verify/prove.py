"""`prove`: the runs of a verification, in order, and what they show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from polyaccel.comm.init.threads import run_threads
from polyaccel.verify.compare import Finding, Tolerances, differing_ranks, merge
from polyaccel.verify.variant import Record, Variant, VerificationEnd, running

Run = Callable[[Variant], Sequence[Record]]
"""Runs the user's program as a variant, on all ranks; returns the records of the ranks."""
_MOST_LOSS_NOISE = 1e-4


@dataclass(frozen=True, slots=True)
class Proof:
    """What a verification found."""

    findings: tuple[Finding, ...]
    """Quantities that differ, the first cause first."""
    differing: tuple[str, ...] = ()
    """Quantities that are not the same on all ranks."""
    blamed: tuple[str, ...] = ()
    """Rewrites without which the findings go away."""
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

    @property
    def is_proven(self) -> bool:
        """Whether all quantities agree."""
        return not self.findings and not self.differing

    @property
    def is_weak(self) -> bool:
        """Whether plain runs differ by more than rounding: the program draws other numbers in each run."""
        return self.loss_noise > _MOST_LOSS_NOISE


def prove(run: Run, *, steps: int = 2) -> Proof:
    """Run a program as plain torch and with the engine, and compare them. See [Note: Shadow runs].

    Args:
        run: Runs the program as a variant.
        steps: Optimizer steps of each engine to compare.

    Returns:
        The comparison. Rewrites are blamed where the program agrees without them.
    """
    base = Variant("plain", is_plain=True, steps=steps)
    plain = merge(run(base))
    moved = [merge(run(replace(base, name=f"plain{shift:+d}", moved=shift))) for shift in (-1, 1)]
    tolerances = Tolerances.of_runs(plain, moved)
    engine = Variant("engine", steps=steps)
    records = run(engine)
    values = merge(records)
    names = [key.split("/", 2)[2] for key in plain if key.startswith("0/gradient/")]
    findings = tolerances.findings(values, names)
    differing = differing_ranks(records, tolerances.limit, tolerances.spreads)
    acted: dict[str, int] = {}
    for record in records:
        for name, count in record.acted.items():
            acted[name] = max(acted.get(name, 0), count)
    blamed = []
    if findings:
        for name in acted:
            without = replace(engine, name=f"without {name}", without=(name,))
            if name != "optimizer" and not tolerances.findings(merge(run(without))):
                blamed.append(name)
    return Proof(
        tuple(findings),
        tuple(differing),
        tuple(blamed),
        acted,
        tolerances.worst(values),
        tolerances.limit,
        sum(key in values for key in plain),
        tolerances.loss_noise,
    )


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
