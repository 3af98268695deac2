"""Cost of noticing what users do to parameters and gradients: its share of a step in which they do nothing.

Timed inside the ranks: the checks for changed parameters (the page map where ranks share them, version counters
elsewhere), for unfrozen ones and for gradients that were written to.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any

from bench.measure import measured
from bench.runner import Case, Column, Found, Option, Runs, Settings, Start
from bench.sizes import SHAPES

LIMIT = 0.002
"""The share of a step that this may take."""
_WARMUP = 3


def variants(args: argparse.Namespace) -> Mapping[str, Start | str]:
    """Return the launch of each stage, with parameters in shared memory and in private memory."""
    private = Start(environ={"POLYACCEL_SHM_SYMMETRIC": "0"})
    return {f"{stage} shared": Start() for stage in range(4)} | {f"{stage} private": private for stage in range(4)}


def share(own: Runs) -> float:
    """Return the median share of a step."""
    return float(median(spent / step for step, spent in zip(own.every("seconds"), own.every("noticing"), strict=True)))


def columns(s: Settings) -> Mapping[str, Column]:
    """Return the columns."""
    return {
        "step s": lambda own, found: f"{median(own.every('seconds')):.4f}",
        "noticing ms": lambda own, found: f"{1e3 * median(own.every('noticing')):.3f}",
        "share": lambda own, found: f"{100 * share(own):.3f} %",
    }


def verdict(found: Found) -> tuple[str, bool]:
    """Return whether the limit is missed."""
    worst = max(map(share, found.values()))
    return f"the worst is {'below' if worst < LIMIT else 'NOT BELOW'} {100 * LIMIT:g} % of a step", worst >= LIMIT


def work(variant: str, s: Settings) -> dict[str, Any]:
    """Train; return the figures of `measured`, and seconds of noticing in each step."""
    from bench.cases.steps import build_trainer, load_library
    from bench.training import Gpt, draw_batch, load_corpus

    name = f"pa{variant[0]}"
    library, spent = load_library(name), timed()
    rank, corpus = library.comm.get_rank(), load_corpus()
    trainer = build_trainer(name, s, Gpt(s["size"]), library)
    noticing: list[float] = []

    def step(number: int) -> float:
        before = spent[0]
        loss: float = trainer.step(*draw_batch(corpus, number, rank, s["micro_batch"]))
        noticing.append(spent[0] - before)
        return loss

    figures = measured(step, s["steps"], _WARMUP)
    library.comm.barrier()
    return {**figures, "noticing": noticing[_WARMUP:]}


def timed() -> list[float]:
    """Return one number: the seconds that this process spends in noticing from now on."""
    from polyaccel.torch.sharding.gradients import GradientAccess
    from polyaccel.torch.sharding.module_adapter import TorchAdapter
    from polyaccel.torch.sharding.ownership import OwnedParameters

    spent = [0.0]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            began = perf_counter()
            try:
                return function(*args, **named)
            finally:
                spent[0] += perf_counter() - began

        return call

    for owner, names in (
        (TorchAdapter, ("changed_params", "has_unfrozen")),
        (OwnedParameters, ("check_trained", "on_update")),
        (GradientAccess, ("note_writes", "forget")),
    ):
        for name in names:
            setattr(owner, name, wrap(getattr(owner, name)))
    return spent


_OPTIONS = {
    "size": Option("29m", "model", SHAPES),
    "micro_batch": Option(1, "sequences a rank"),
    "dtype": Option("fp32", "type", ("fp32", "bf16")),
    "steps": Option(20, "measured steps"),
}
_TITLE = "Noticing changes by stage and memory, {size}, micro-batch {micro_batch}, {dtype}, 2 ranks, medians"
CASES = {"ownership": Case("ownership", __doc__ or "", _OPTIONS, variants, columns, _TITLE, rounds=1, verdict=verdict)}
