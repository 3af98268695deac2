"""The GPT of the examples in torch and in JAX: the same weights under the same config give the same run."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

from jax_models import STAGES, jax_gpt, make_config, torch_gpt, train_jax, train_torch

from polyaccel.testkit.threads import run_threads

STEPS = 20


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


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_torch_and_jax_agree_in_fp32(world, accumulation, stage):
    of_torch, of_jax = both(world, make_config(stage, accumulation=accumulation))
    assert of_jax.losses == pytest.approx(of_torch.losses, rel=1e-5)
    assert of_jax.norms == pytest.approx(of_torch.norms, rel=1e-4)
    assert max(of_torch.norms) > 0.7  # clipping did something
    assert of_torch.losses[-1] < 0.9 * of_torch.losses[0]
    for fqn, value in of_jax.params.items():
        np.testing.assert_allclose(value, of_torch.params[fqn], atol=2e-4, err_msg=fqn)


@pytest.mark.parametrize("stage", STAGES[::2])
def test_torch_and_jax_agree_in_bf16(stage):
    of_torch, of_jax = both(2, make_config(stage, accumulation=3, bf16={"enabled": True}))
    assert of_jax.losses == pytest.approx(of_torch.losses, rel=1e-2)


def test_stages_agree_bitwise():
    runs = [run_threads(2, train_jax, jax_gpt(), make_config(stage), 3)[0] for stage in STAGES]
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        for fqn, value in run.params.items():
            np.testing.assert_array_equal(value, runs[0].params[fqn])
