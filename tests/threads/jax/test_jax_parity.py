"""The GPT of the examples in torch and in JAX: the same weights under the same config give the same run."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

from jax_models import STAGES, jax_gpt, make_config, torch_gpt, train_jax, train_torch
from jax_sharded_models import ZERO, model_of, train_sharded
from pairwise import combinations

from polyaccel.testkit.ranks.threads import run_threads

STEPS = 20
BF16 = {"bf16": {"enabled": True}}


def both(world, config, steps=STEPS):
    """(torch's run, JAX's run) on rank 0. All ranks of JAX must end with the same parameters."""
    models = [torch_gpt() for _ in range(world)]
    of_torch = run_threads(world, lambda ranks: train_torch(ranks, models[ranks.rank], config, steps))
    of_jax = run_threads(world, train_jax, jax_gpt(), config, steps)
    for run in of_jax[1:]:
        assert run.norms == of_jax[0].norms
        for fqn, value in run.params.items():
            np.testing.assert_array_equal(value, of_jax[0].params[fqn])
    return of_torch[0], of_jax[0]


@combinations(world=[1, 2, 3], stage=STAGES, accumulation=[1, 3])
def test_torch_and_jax_agree_in_fp32(world, stage, accumulation):
    of_torch, of_jax = both(world, make_config(stage, accumulation=accumulation))
    assert of_jax.losses == pytest.approx(of_torch.losses, rel=1e-5)
    assert of_jax.norms == pytest.approx(of_torch.norms, rel=1e-4)
    assert max(of_torch.norms) > 0.7  # clipping did something
    assert of_torch.losses[-1] < 0.9 * of_torch.losses[0]
    for fqn, value in of_jax.params.items():
        np.testing.assert_allclose(value, of_torch.params[fqn], atol=2e-4, err_msg=fqn)


@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 0), (2, 2)])
def test_torch_and_jax_agree_in_bf16(world, stage):
    of_torch, of_jax = both(world, make_config(stage, accumulation=3, bf16={"enabled": True}))
    assert of_jax.losses == pytest.approx(of_torch.losses, rel=1e-2)


@pytest.mark.parametrize(("accumulation", "precision", "limit"), [(1, {}, 1e-5), (3, {}, 1e-5), (3, BF16, 1e-2)])
def test_torch_and_jax_agree_at_stage_3_on_one_rank(accumulation, precision, limit):
    """More ranks are processes: tests/procs/jax/test_jax_sharded.py."""
    config = make_config(3, accumulation=accumulation, zero=ZERO, **precision)
    model, _ = torch_gpt(), model_of("units")
    of_torch = run_threads(1, train_torch, model, config, STEPS)[0]
    of_jax = run_threads(1, train_sharded, "units", config, STEPS)[0]
    assert of_jax.losses[:-1] == pytest.approx(of_torch.losses, rel=limit)
    assert of_jax.norms == pytest.approx(of_torch.norms, rel=10 * limit)


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_stages_agree_bitwise(precision):
    runs = [run_threads(2, train_jax, jax_gpt(), make_config(stage, **precision), 3)[0] for stage in STAGES]
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        for fqn, value in run.params.items():
            np.testing.assert_array_equal(value, runs[0].params[fqn])
