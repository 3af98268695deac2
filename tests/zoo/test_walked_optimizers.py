"""Optimizers found by walking modules: torch's, transformers' and optax's, on two ranks at some stages.

Each trains as plain torch or plain optax does, or is refused. `TESTS_OPTIMIZERS=full` takes all; otherwise each takes
one stage, and of optax's every twelfth is tried; `each` tries each of optax's at one stage. With `full`, OPTAX_PAGE
names the file that gets the guide's table of them.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax")

import optax_walk as walk
import torch
from torch import nn

import polyaccel
from polyaccel.comm.default import default_communicator
from polyaccel.errors import PolyaccelError
from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.verify.compare import Tolerances, merge
from polyaccel.verify.prove import threads_run
from polyaccel.verify.variant import Variant

IS_FULL = os.environ.get("TESTS_OPTIMIZERS") == "full"
HAS_EACH = IS_FULL or os.environ.get("TESTS_OPTIMIZERS") == "each"
STAGES = (0, 2, 3)
OF_OPTAX: tuple[int | str, ...] = (0, 2, 3, "native")
"""Stages of views mode, and native mode."""
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "optax.md"
STEPS, RANKS = 3, 2
_LOCK = threading.Lock()


def torch_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    from transformers import optimization

    found = {}
    for module in (torch.optim, optimization):
        for name, kind in sorted(vars(module).items()):
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
                found[f"{module.__name__.partition('.')[0]}.{name}"] = kind
    return found


TORCH = torch_optimizers()
PLAIN_FAILS = {"torch.LBFGS", "torch.SparseAdam", "transformers.LayerWiseDummyOptimizer"}
"""A closure, sparse gradients, and one that changes nothing: plain torch cannot train with these."""


def program(kind: type[torch.optim.Optimizer], stage: int) -> Callable[[], None]:
    def train() -> None:
        with _LOCK:
            torch.manual_seed(0)
            layers = [nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 4, bias="Muon" not in kind.__name__)]
            model = nn.Sequential(*(layers[::3] if kind.__name__ == "Muon" else layers))
            if kind.__name__ == "Muon":
                model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), layers[-1])
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 20},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = polyaccel.initialize(model=model, optimizer=kind, config=config)
        draw = torch.Generator().manual_seed(default_communicator().rank)
        for _ in range(STEPS):
            x, y = torch.randn(4, 5, generator=draw), torch.randn(4, 4, generator=draw)
            engine.backward((engine(x) - y).square().mean())
            engine.step()

    return train


def cases() -> list[tuple[str, int]]:
    names = sorted(set(TORCH) - PLAIN_FAILS)
    if IS_FULL:
        return [(name, stage) for name in names for stage in STAGES]
    return [(name, STAGES[at % 3]) for at, name in enumerate(names)]


@pytest.mark.parametrize(("name", "stage"), cases())
def test_an_optimizer_of_torch_trains_as_alone(name: str, stage: int) -> None:
    run = threads_run(RANKS, program(TORCH[name], stage))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, *moved = (merge(run(Variant(f"{at:+d}", True, at, steps=STEPS))) for at in (0, -1, 1))
        records = run(Variant("engine", steps=STEPS))
    tolerances = Tolerances.of_runs(plain, moved)
    values = merge(records)
    assert not tolerances.findings(values), [str(one) for one in tolerances.findings(values)]
    assert {key for key in plain if "/update/" in key} <= set(values)


@pytest.mark.parametrize("name", sorted(PLAIN_FAILS & set(TORCH)))
def test_what_plain_torch_cannot_train_with_raises(name: str) -> None:
    def run(_: Any) -> None:
        program(TORCH[name], 2)()

    with pytest.raises(Exception):  # noqa: B017
        run_threads(RANKS, run)


def result_of(name: str, stage: int | str, wanted: Any, moved: list[Any], pool: Callable[[int], RankPool]) -> str:
    """Return "equal", "refused", or what is wrong with a transformation at a stage."""
    try:
        if stage == 3:  # threads of one process would share XLA's
            found = pool(RANKS).run(walk.under_engine, name, stage, timeout_s=240.0)[0]
        else:
            ranks = 1 if stage == walk.NATIVE else RANKS
            found = run_threads(ranks, walk.under_engine, name, stage, timeout_s=240.0)[0]
    except PolyaccelError as error:
        return "refused" if error.hint else f"refused without a hint: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if wanted is None:
        return "it trains, and plain optax does not"
    kept, *others = ({f"0/update/{leaf}": one for leaf, one in run.items()} for run in (wanted, *moved, found))
    findings = Tolerances.of_runs(kept, others[:-1]).findings(others[-1])
    if name in WITH_FROZEN and not np.array_equal(found["scale"], walk.start()["scale"]):
        return "a frozen parameter moved"
    return str(findings[0]) if findings else "equal"


def results(names: Sequence[str], stages_of: Callable[[int], Sequence[Any]], pool: Callable[[int], RankPool]) -> Any:
    """Return the result of each name by stage."""
    made = walk.transformations()
    found: dict[str, dict[Any, str]] = {}
    for at, name in enumerate(names):
        wanted, moved = None, list[Any]()
        for passes_loss in (False, True):
            with suppress(Exception), warnings.catch_warnings():  # it needs more than gradients, and more than the loss
                warnings.simplefilter("ignore")
                wanted, *moved = (
                    walk.plainly(made[name], units, passes_loss=passes_loss, name=name) for units in (0, -1, 1)
                )
                break
        found[name] = {stage: result_of(name, stage, wanted, moved, pool) for stage in stages_of(at)}
        print(name, found[name], flush=True)
    return found


WITH_FROZEN = {"multi_transform", "partition", "selective_transform"}


def test_transformations_of_optax_train_as_alone_or_are_refused(rank_pool: Callable[[int], RankPool]) -> None:
    names = sorted(walk.transformations())
    assert len(names) > 100
    if IS_FULL:
        found = results(names, lambda at: OF_OPTAX, rank_pool)
        if page := os.environ.get("OPTAX_PAGE"):
            Path(page).write_text(page_of(found), encoding="utf-8")
    else:
        names = names if HAS_EACH else names[::12]
        found = results(names, lambda at: OF_OPTAX[at % len(OF_OPTAX) :][:1], rank_pool)
    every = [(name, stage, one) for name, by_stage in found.items() for stage, one in by_stage.items()]
    assert [row for row in every if row[2] not in ("equal", "refused")] == []
    assert sum(row[2] == "equal" for row in every) > len(every) // 2


def test_the_page_has_a_row_of_every_transformation() -> None:
    text = PAGE.read_text(encoding="utf-8")
    if f"optax {version('optax')}" not in text:
        pytest.skip("the page was made with another optax")
    rows = {name: cells.split(" | ") for name, cells in re.findall(r"^\| `([\w.]+)` \| (.*) \|$", text, re.MULTILINE)}
    assert set(rows) == set(walk.transformations())
    assert {cell for cells in rows.values() for cell in cells} == {"equal", "refused"}


def page_of(found: dict[str, dict[Any, str]]) -> str:
    """Return the guide's page with `found`."""
    before = PAGE.read_text(encoding="utf-8").partition("| name |")[0] if PAGE.exists() else ""
    before = re.sub(r"optax [\d.]+, JAX [\d.]+", f"optax {version('optax')}, JAX {version('jax')}", before)
    head = ["name", *(stage if isinstance(stage, str) else f"stage {stage}" for stage in OF_OPTAX)]
    rows = [head, ["---"] * len(head)]
    rows += [[f"`{name}`", *(by_stage[stage] for stage in OF_OPTAX)] for name, by_stage in sorted(found.items())]
    return before + "".join(f"| {' | '.join(row)} |\n" for row in rows)
