"""Optimizers found by walking modules: torch's, transformers' and optax's, on two ranks at some stages.

Each trains as plain torch or plain optax does, or is refused. `TESTS_OPTIMIZERS=full` takes all; otherwise each takes
one stage, and of optax's every eighth is tried; `each` tries each of optax's at one stage.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyaccel
from polyaccel.comm.default import default_communicator
from polyaccel.errors import PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.verify.compare import Tolerances, merge
from polyaccel.verify.prove import threads_run
from polyaccel.verify.variant import Variant

IS_FULL = os.environ.get("TESTS_OPTIMIZERS") == "full"
HAS_EACH = IS_FULL or os.environ.get("TESTS_OPTIMIZERS") == "each"
STAGES = (0, 2, 3)
NATIVE = "native"
OF_OPTAX: tuple[int | str, ...] = (0, 1, 2, NATIVE)
"""Stages of views mode on ranks that are threads, where stage 3 is refused, and native mode."""
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


REFUSED = {"torch.Adafactor", "torch.Muon", "transformers.Adafactor"}
"""Where parameters are cut: their updates look at whole ones."""


@pytest.mark.parametrize(("name", "stage"), cases())
def test_an_optimizer_of_torch_trains_as_alone_or_is_refused(name: str, stage: int) -> None:
    run = threads_run(RANKS, program(TORCH[name], stage))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, *moved = (merge(run(Variant(f"{at:+d}", True, at, steps=STEPS))) for at in (0, -1, 1))
        try:
            records = run(Variant("engine", steps=STEPS))
        except PolyaccelError:
            assert name in REFUSED
            assert stage > 0
            return
    tolerances = Tolerances.of_runs(plain, moved)
    values = merge(records)
    assert not tolerances.findings(values), [str(one) for one in tolerances.findings(values)]
    assert {key for key in plain if "/update/" in key} <= set(values)
    assert name not in REFUSED or stage == 0


@pytest.mark.parametrize("name", sorted(PLAIN_FAILS & set(TORCH)))
def test_what_plain_torch_cannot_train_with_raises(name: str) -> None:
    def run(_: Any) -> None:
        program(TORCH[name], 2)()

    with pytest.raises(Exception):  # noqa: B017
        run_threads(RANKS, run)


def transformations() -> dict[str, Callable[[], Any]]:
    """Return what optax's public functions make, given a rate or nothing."""
    optax = pytest.importorskip("optax")
    found: dict[str, Callable[[], Any]] = {}
    for module, prefix in ((optax, ""), (optax.contrib, "contrib.")):
        for name in sorted(vars(module)):
            make = getattr(module, name)
            if name.startswith("_") or isinstance(make, type) or not callable(make):
                continue
            for arguments in ((1e-2,), ()):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        made = make(*arguments)
                except Exception:  # it needs others
                    continue
                if hasattr(made, "init") and hasattr(made, "update"):
                    # Updates without a rate grow without bound, and any rounding with them.
                    rate = optax.identity if arguments else lambda: optax.scale(-1e-2)
                    found[prefix + name] = lambda make=make, arguments=arguments, rate=rate: optax.chain(
                        make(*arguments), rate()
                    )
                    break
    return found


def start() -> Any:
    draw = np.random.default_rng(0)
    shapes = {"kernel": (3, 5), "scale": (5,), "out": (5, 2)}
    return {name: draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def loss(params: Any, batch: Any, rng: Any) -> Any:
    import jax.numpy as jnp

    found = (jnp.tanh(batch["x"] @ params["kernel"]) * params["scale"]) @ params["out"]
    return jnp.square(found - batch["y"]).mean()


def data(at: int, rank: int) -> Any:
    draw = np.random.default_rng([at, rank])
    return {name: draw.standard_normal((4, size), dtype=np.float32) for name, size in (("x", 3), ("y", 2))}


def plainly(make: Callable[[], Any], units: int = 0) -> Any:
    """The parameters after `STEPS` from weights that are moved by units in the last place."""
    import jax
    import optax

    towards = np.float32(units * np.inf) if units else None
    first = start() if towards is None else {name: np.nextafter(one, towards) for name, one in start().items()}
    transformation, params = make(), jax.tree.map(jax.numpy.asarray, first)
    state = transformation.init(params)
    for at in range(STEPS):
        each = [jax.grad(loss)(params, data(at, rank), None) for rank in range(RANKS)]
        gradients = jax.tree.map(lambda *all_: sum(all_) / RANKS, *each)
        updates, state = transformation.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return {name: np.asarray(one) for name, one in params.items()}


def under_engine(make: Callable[[], Any], stage: int | str) -> Any:
    """The parameters after `STEPS`, at a stage, or in native mode, where one process has the samples of all ranks."""
    is_native = stage == NATIVE
    count = 1 if is_native else RANKS

    def go(ranks: Any) -> Any:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4 * RANKS // count,
            "zero_optimization": {"stage": 2 if is_native else stage, "reduce_bucket_size": 12},
            "jax": {"execution": "native" if is_native else "views"},
        }
        engine = polyaccel.initialize(model=loss, params=start(), optimizer=make(), config=config)
        for at in range(STEPS):
            own = [data(at, rank) for rank in (range(RANKS) if is_native else (ranks.rank,))]
            engine.train_batch({name: np.concatenate([one[name] for one in own]) for name in own[0]})
        found = {name: np.asarray(one) for name, one in engine.params.items()}
        engine.destroy()
        return found

    return run_threads(count, go)[0]


def test_transformations_of_optax_train_as_alone_or_are_refused() -> None:
    made = transformations()
    names = sorted(made) if HAS_EACH else sorted(made)[::8]
    assert len(made) > 60
    results: dict[str, list[str]] = {"equal": [], "refused": [], "plain fails": [], "wrong": []}
    for at, name in enumerate(names):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wanted, *moved = (plainly(made[name], units) for units in (0, -1, 1))
        except Exception:  # it needs more than gradients: a value, a key
            results["plain fails"].append(name)
            continue
        for stage in OF_OPTAX if IS_FULL else OF_OPTAX[at % 4 :][:1]:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = under_engine(made[name], stage)
            except PolyaccelError:
                results["refused"].append(f"{name} at stage {stage}")
                continue
            kept, *others = ({f"0/update/{leaf}": one for leaf, one in run.items()} for run in (wanted, *moved, found))
            findings = Tolerances.of_runs(kept, others[:-1]).findings(others[-1])
            results["wrong" if findings else "equal"].append(f"{name} at stage {stage}")
    print(results)
    assert not results["wrong"]
    assert len(results["equal"]) > len(results["refused"])
