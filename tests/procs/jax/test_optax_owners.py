"""Transformations of optax that need whole parameters, at stage 3, where ranks are processes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("optax")

import optax
from optax_runs import plainly, train_half

pytestmark = pytest.mark.timeout(500)
PATIENCE_S = 240.0


def clipped_muon():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.contrib.muon(1e-2))


def halves(ranks, folder):
    """The first half at stage 2, the other at stage 3."""
    train_half(ranks, clipped_muon, 2, folder, 0)
    return train_half(ranks, clipped_muon, 3, folder, 1)


def test_owners_update_whole_parameters_at_stage_3(rank_pool, tmp_path):
    results = rank_pool(2).run(halves, str(tmp_path), timeout_s=PATIENCE_S)
    for fqn, value in plainly(clipped_muon, (2, 2)).items():
        np.testing.assert_allclose(results[0][fqn], value, rtol=1e-4, atol=2e-6, err_msg=fqn)
        np.testing.assert_array_equal(results[0][fqn], results[1][fqn])
