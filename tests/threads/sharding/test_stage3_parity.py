"""Stage 3 against stage 2, bitwise: sharded parameters are a matter of memory, never of numbers."""

from __future__ import annotations

import pytest
import torch
from pairwise import combinations
from parity_models import SMALL_BUCKET, Run, assert_bitwise, make_config, on_threads, train, train_on_threads
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


@combinations(world=[1, 2, 3], accumulation=[1, 3], precision=["fp32", "bf16"])
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


def train_conv(stage: int, **changes):
    """The conv net's runs on two ranks, and what is in its buffers then."""

    def work(communicator, model, config):
        run = train(communicator, model, config, STEPS, loss_fn=CASES["conv"].loss)
        return run, {name: buffer.clone() for name, buffer in model.named_buffers()}

    zero = VARIANTS["many buckets"] if stage == 3 else {"reduce_bucket_size": SMALL_BUCKET}
    return on_threads(2, work, CASES["conv"].build, make_config(stage, zero=zero, gradient_clipping=0.5, **changes))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_batch_norm_in_16_bits_needs_no_setting_and_keeps_its_statistics_in_float32(precision):
    exact = train_conv(2)
    wanted = train_conv(0, **{precision: {"enabled": True}})
    for stage in (1, 2, 3):
        for (run, buffers), (wanted_run, wanted_buffers) in zip(
            train_conv(stage, **{precision: {"enabled": True}}), wanted, strict=True
        ):
            assert_same_run(run, wanted_run)
            assert_bitwise(buffers, wanted_buffers)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    for (run, buffers), (_, exact_buffers) in zip(wanted, exact, strict=True):
        assert run.params["stem.weight"].dtype is dtype
        assert run.params["body.0.1.weight"].dtype is torch.float32  # what torch computes with together with statistics
        statistics = {name: value for name, value in buffers.items() if value.is_floating_point()}
        assert {value.dtype for value in statistics.values()} == {torch.float32}
        assert not any(torch.equal(value, value.to(dtype).float()) for value in statistics.values())
        for name, value in statistics.items():
            torch.testing.assert_close(value, exact_buffers[name], rtol=0.02, atol=1e-2)
        assert buffers["body.0.1.num_batches_tracked"] == STEPS


def test_batch_norm_follows_a_stated_buffer_type():
    for stage in (0, 3):
        for run, buffers in train_conv(stage, bf16={"enabled": True}, data_types={"buffer_dtype": "bf16"}):
            assert {value.dtype for value in run.params.values()} == {torch.bfloat16}
            assert buffers["body.0.1.running_var"].dtype is torch.bfloat16
