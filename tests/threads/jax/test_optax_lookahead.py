"""Pairs of fast and slow weights (`optax.lookahead`) train under the engine as in plain optax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from flax import linen
from optax_runs import STEPS, data, loss, start

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads


def recipe() -> Any:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.lookahead(optax.adam(0.05), 2, 0.5, reset_state=True))


def pairs() -> Any:
    return optax.LookaheadParams.init_synced(jax.tree.map(jnp.asarray, start()))


def plainly(ranks: int) -> Any:
    params, transformation = pairs(), recipe()
    state = transformation.init(params)
    for step in range(STEPS):
        each = [jax.grad(loss)(params.fast, data(step, rank), None) for rank in range(ranks)]
        mean = jax.tree.map(lambda *of_ranks: sum(of_ranks) / len(of_ranks), *each)
        updates, state = transformation.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return params


def trained(ranks: Any, stage: int, execution: str, folder: Any) -> Any:
    """The pairs after steps in two runs."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 12, "stage3_param_persistence_threshold": 0},
        "jax": {"execution": execution},
    }
    for half in range(2):
        engine = polyaccel.initialize(model=loss, params=pairs(), optimizer=recipe(), config=config)
        if half:
            engine.load_checkpoint(str(folder))
        for step in range(half * STEPS // 2, (half + 1) * STEPS // 2):
            engine.train_batch(data(step, ranks.rank))
        engine.save_checkpoint(str(folder))
        found = jax.tree.map(np.asarray, engine.params)
        engine.destroy()
    return found


@pytest.mark.parametrize(("ranks", "stage", "execution"), [(2, 2, "views"), (3, 0, "views"), (1, 3, "native")])
def test_pairs_train_as_in_plain_optax(ranks: int, stage: int, execution: str, tmp_path: Any) -> None:
    wanted = plainly(ranks)
    assert not np.array_equal(wanted.fast["norm"]["scale"], start()["norm"]["scale"])
    for found in run_threads(ranks, trained, stage, execution, tmp_path):
        assert isinstance(found, optax.LookaheadParams)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), found, wanted)


def test_pairs_of_a_module_are_refused() -> None:
    def build(ranks: Any) -> None:
        with pytest.raises(PolyaccelError) as error:
            polyaccel.initialize(model=linen.Dense(2), params=pairs(), optimizer=recipe(), config={})
        assert error.value.value == "Dense"

    run_threads(1, build)
