"""Stage 3 against stage 2, bitwise: sharded parameters are a matter of memory, never of numbers."""

from __future__ import annotations

import pytest
from parity_models import SMALL_BUCKET, Run, make_config, train_on_threads
from stage3_models import CASES, assert_same_run

STEPS = 2
EVERYTHING_SHARDED = {"stage3_param_persistence_threshold": 0}
VARIANTS = {
    "many buckets": {"reduce_bucket_size": SMALL_BUCKET, **EVERYTHING_SHARDED},
    "one bucket": {"reduce_bucket_size": 10**9, **EVERYTHING_SHARDED},
    "no prefetch": {**EVERYTHING_SHARDED, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
    "keep everything": {**EVERYTHING_SHARDED, "stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9},
    "no overlap": {"reduce_bucket_size": SMALL_BUCKET, **EVERYTHING_SHARDED, "overlap_comm": False},
    "small ones persist": {"stage3_param_persistence_threshold": 30, "reduce_bucket_size": SMALL_BUCKET},
    "all persist": {"stage3_param_persistence_threshold": 10**9},
    "the model is one leaf": {**EVERYTHING_SHARDED, "stage3_module_granularity_threshold": 10**9},
}


def run(case: str, world: int, stage: int, zero: dict, **changes) -> Run:
    config = make_config(stage, zero=zero, **changes)
    build, loss = CASES[case]
    return train_on_threads(world, config, STEPS, build=build, loss_fn=loss)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_gpt_is_the_same_at_stage_3(world, accumulation, precision):
    changes = {"accumulation": accumulation, "gradient_clipping": 0.5, "bf16": {"enabled": precision == "bf16"}}
    wanted = run("gpt", world, 2, {"reduce_bucket_size": SMALL_BUCKET}, **changes)
    for variant in ("many buckets", "no prefetch"):
        assert_same_run(run("gpt", world, 3, VARIANTS[variant], **changes), wanted)


def test_no_setting_changes_the_numbers():
    wanted = run("gpt", 2, 2, {})
    for zero in VARIANTS.values():
        assert_same_run(run("gpt", 2, 3, zero), wanted)


@pytest.mark.parametrize("case", [name for name in CASES if name != "gpt"])
def test_models_that_are_hard_to_shard(case):
    """In one bucket at stage 2, where no gradient is late: what is late is added last, which rounds otherwise."""
    changes = {"accumulation": 2, "gradient_clipping": 0.5}
    wanted = run(case, 3, 2, {}, **changes)
    for variant in ("many buckets", "no prefetch", "small ones persist"):
        assert_same_run(run(case, 3, 3, VARIANTS[variant], **changes), wanted)


@pytest.mark.parametrize("case", ["experts", "lora", "reentrant"])
def test_in_bfloat16_too(case):
    changes = {"bf16": {"enabled": True}}
    wanted = run(case, 2, 2, {}, **changes)
    assert_same_run(run(case, 2, 3, VARIANTS["many buckets"], **changes), wanted)
