"""Transformations of optax that need whole trees, in native mode, where processes share a mesh."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("optax")

import optax
from optax_runs import data, engine_at, plainly, train_half

from polyaccel.testkit.ranks.procs import RankPool

pytestmark = pytest.mark.timeout(500)
PATIENCE_S = 240.0


def clipped_adamw():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def native_halves(ranks, folder):
    """A proof, which reads states whole on every process, and the halves of a training with a checkpoint between."""
    engine = engine_at("native 2", clipped_adamw(), verify="always")
    engine.train_batch(data(0, ranks.rank))
    engine.destroy()
    train_half(ranks, clipped_adamw, "native 2", folder, 0)
    return train_half(ranks, clipped_adamw, "native 3", folder, 1)


def test_states_of_a_tree_are_whole_on_every_process(tmp_path):
    pool = RankPool(2, comm_timeout_s=PATIENCE_S)  # a new one: processes connect before they use JAX
    try:
        results = pool.run(native_halves, str(tmp_path), timeout_s=PATIENCE_S)
    finally:
        pool.close()
    for fqn, value in plainly(clipped_adamw, (2, 2)).items():
        np.testing.assert_allclose(results[0][fqn], value, rtol=1e-4, atol=2e-6, err_msg=fqn)
        np.testing.assert_array_equal(results[0][fqn], results[1][fqn])
