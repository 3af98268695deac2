"""The config's Muon for JAX functions: the paper's formula in float64, stages, ranks, schedules, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
from jax_models import leaves
from optax_runs import STEPS, batches, data, loss, start

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads

SETTINGS = {"lr": 0.02, "adam_lr": 0.004, "momentum": 0.9, "weight_decay": 0.1}


def by_singular_values(matrix):
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    s = s / (np.linalg.norm(matrix) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ np.diag(s) @ v


def in_float64(world, rates=None):
    """The paper's update of matrices, and AdamW's of all else."""
    params = {name: np.asarray(value, np.float64) for name, value in leaves(start()).items()}
    structure = jax.tree.structure(start())
    names = list(leaves(start()))
    first, second = ({name: np.zeros_like(value) for name, value in params.items()} for _ in range(2))
    for at in range(STEPS):
        tree = jax.tree.unflatten(structure, [np.float32(params[name]) for name in names])
        found = [leaves(jax.grad(loss)(tree, batch, None)) for batch in batches(world, at)]
        for name in names:
            grad = sum(np.asarray(each[name], np.float64) for each in found) / world
            muon_lr, adam_lr = (0.02, 0.004) if rates is None else (rates[at], rates[at])
            value = params[name]
            if value.ndim > 1:
                first[name] = 0.9 * first[name] + 0.1 * grad
                update = by_singular_values(0.1 * grad + 0.9 * first[name])
                scale = max(1.0, value.shape[1] / value.shape[0]) ** 0.5
                params[name] = value * (1 - muon_lr * 0.1) - muon_lr * scale * update
            else:
                first[name] = 0.9 * first[name] + 0.1 * grad
                second[name] = 0.95 * second[name] + 0.05 * grad * grad
                way = first[name] / (1 - 0.9 ** (at + 1)) / (np.sqrt(second[name] / (1 - 0.95 ** (at + 1))) + 1e-10)
                params[name] = value * (1 - adam_lr * 0.1) - adam_lr * way
    return params


def engine_at(stage, native, **changes):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Muon", "params": SETTINGS | changes.pop("params", {})},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 12, "param_persistence_threshold": 0},
        **({"jax": {"execution": "native"}} if native else {}),
        **changes,
    }
    return polyaccel.initialize(model=loss, params=start(), config=config)


def train(world, stage, native=False, folder=None, resume=False, **changes):
    def go(communicator):
        engine = engine_at(stage, native, **changes)
        if resume:
            engine.load_checkpoint(str(folder))
        for at in range(STEPS // 2 if resume else 0, STEPS if resume or folder is None else STEPS // 2):
            engine.train_batch(data(at, communicator.rank))
        if folder is not None and not resume:
            engine.save_checkpoint(str(folder))
        found = {name: np.asarray(value) for name, value in leaves(engine.params).items()}
        engine.destroy()
        return found

    return run_threads(world, go)


def compare(found, wanted):
    for each in found:
        for name, value in wanted.items():
            np.testing.assert_allclose(each[name], value, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("world", "stage", "native"),
    [(1, 0, False), (2, 0, False), (2, 2, False), (3, 1, False), (1, 0, True), (1, 2, True), (1, 3, True)],
)
def test_training_follows_the_paper_s_formula(world, stage, native):
    compare(train(world, stage, native), in_float64(world))


def test_momentum_goes_along(tmp_path):
    train(2, 2, folder=tmp_path)
    compare(train(2, 0, folder=tmp_path, resume=True), in_float64(2))


@pytest.mark.parametrize("native", [False, True])
def test_schedules_move_both_rates(native):
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 4}}
    rates = []

    def go(_):
        engine = engine_at(2, native, scheduler=schedule)
        for at in range(STEPS):
            rates.append(engine.get_lr()[0])
            engine.train_batch(data(at, 0))
        assert len(engine.get_lr()) == 2
        found = {name: np.asarray(value) for name, value in leaves(engine.params).items()}
        engine.destroy()
        return found

    compare(run_threads(1, go), in_float64(1, rates))


@pytest.mark.parametrize(("key", "value"), [("per_head_muon", True), ("tp_mode", "blockwise")])
def test_what_jax_has_no_form_of_is_refused(key, value):
    with pytest.raises(ConfigError) as caught:
        engine_at(0, False, params={key: value})
    assert caught.value.problems[0].key == f"optimizer.params.{key}"
