"""Layers of one framework in a model of the other train under ZeRO as the same model of torch alone."""

from __future__ import annotations

import numpy as np
import pytest
from parity_models import SMALL_BUCKET, make_config, train_on_threads
from stage3_models import assert_same_run
from torch import nn

pytest.importorskip("jax")

from jax_layer_models import MIXED, TORCH, JaxOutside, TorchOutside
from jax_models import STAGES, train_jax, train_torch
from jax_models import make_config as make_jax_config
from jax_sharded_models import ZERO, model_of, train_sharded
from pairwise import combinations

from polyaccel.testkit.ranks.threads import run_threads

STEPS = 12
BF16 = {"bf16": {"enabled": True}}
SLOWLY = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 5}}
SHARDED = {"reduce_bucket_size": SMALL_BUCKET, "stage3_param_persistence_threshold": 0}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}}


@pytest.fixture(scope="module")
def programs():
    """A model that lives, so that its layers' programs are compiled once for all tests."""
    return MIXED[None].build()


def run(case, world, stage, steps=STEPS, **changes):
    config = make_config(stage, zero=SHARDED if stage == 3 else {"reduce_bucket_size": SMALL_BUCKET}, **changes)
    return train_on_threads(world, config, steps, build=case.build, loss_fn=case.loss)


@combinations(world=[1, 2, 3], accumulation=[1, 3], stage=[0, 3])
def test_layers_of_jax_in_a_model_of_torch(programs, world, accumulation, stage):
    changes = {"accumulation": accumulation, "gradient_clipping": 0.5, "scheduler": WARMUP}
    wanted = run(TORCH, world, 0, **changes)
    assert max(wanted.norms) > 0.5  # clipping did something
    found = run(MIXED[None], world, stage, **changes)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-5)
    bitwise_alike = {0: 1, 3: 2}[stage]
    start = run(MIXED[None], world, bitwise_alike, steps=4, **changes)
    assert start.losses == found.losses[: len(start.losses)]
    assert start.norms == found.norms[:4]


@combinations(world=[1, 2, 3], stage=STAGES, accumulation=[1, 3])
def test_a_module_of_torch_in_a_function_of_jax(world, stage, accumulation):
    models = [TorchOutside.build() for _ in range(world)]
    config = make_jax_config(0, accumulation=accumulation)
    wanted = run_threads(world, lambda ranks: train_torch(ranks, models[ranks.rank], config, STEPS))[0]
    mixed = JaxOutside()
    config = make_jax_config(stage, accumulation=accumulation)
    found = run_threads(world, train_jax, (mixed, mixed.params), config, STEPS)
    assert found[0].losses == pytest.approx(wanted.losses, rel=1e-5)
    for fqn, value in found[0].params.items():
        np.testing.assert_array_equal(value, found[-1].params[fqn])
        np.testing.assert_allclose(value, wanted.params[fqn], atol=1e-4, err_msg=fqn)


@pytest.mark.parametrize(("accumulation", "precision", "limit"), [(1, {}, 1e-5), (3, {}, 1e-5), (3, BF16, 1e-2)])
def test_a_module_of_torch_in_a_function_of_jax_at_stage_3(accumulation, precision, limit):
    """More ranks are processes: tests/procs/jax/test_jax_layers_processes.py."""
    config = make_jax_config(3, accumulation=accumulation, zero=ZERO, **precision)
    model, _ = TorchOutside.build(), model_of("mixed")
    wanted = run_threads(1, train_torch, model, config, STEPS)[0]
    found = run_threads(1, train_sharded, "mixed", config, STEPS)[0]
    assert found.losses[:-1] == pytest.approx(wanted.losses, rel=limit)


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_of_torch_in_a_function_of_jax_in_bfloat16(stage):
    models = [TorchOutside.build() for _ in range(2)]
    config = make_jax_config(stage, **BF16)
    wanted = run_threads(2, lambda ranks: train_torch(ranks, models[ranks.rank], config, STEPS))[0]
    mixed = JaxOutside()
    found = run_threads(2, train_jax, (mixed, mixed.params), config, STEPS)[0]
    assert found.losses == pytest.approx(wanted.losses, rel=1e-2)


@pytest.mark.parametrize("stage", [0, 3])
def test_in_bfloat16(programs, stage):
    changes = {**BF16, "scheduler": SLOWLY}
    np.testing.assert_allclose(
        run(MIXED[None], 2, stage, **changes).losses, run(TORCH, 2, stage, **changes).losses, rtol=1e-2
    )


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_recomputed_blocks_at_stage_3(programs, how):
    assert_same_run(run(MIXED[how], 2, 3, steps=2), run(MIXED[None], 2, 2, steps=2))


def test_at_stage_3_a_layer_is_gathered_around_itself():
    """As one of torch would be: its parameters are not those of modules that are never called."""
    from polyaccel.torch.sharding.units import find_units

    model = MIXED[None].build()
    assert list(find_units(model)) == ["blocks.0", "blocks.1", "blocks.2", "last"]
    assert isinstance(model.last, nn.Module)
