"""A resolved config has no "auto" and no open batch size, says every argument, and survives a round trip."""

from __future__ import annotations

import json
import logging
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.config import ResolvedConfig, load_config, load_resolved, resolve_config

CIFAR: dict[str, Any] = {  # the settings of DeepSpeed's CIFAR-10 tutorial
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": False},
    "fp16": {
        "enabled": True,
        "fp16_master_weights_and_grads": False,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 15,
    },
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 0,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "cpu_offload": False,
    },
}
HUGGING_FACE: dict[str, Any] = {  # every "auto" of the Trainer's documentation
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}
HINTS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "fp16": False,
    "bf16": True,
    "learning_rate": 3e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.1,
    "warmup_steps": 10,
    "num_training_steps": 100,
    "hidden_size": 64,
}


def test_the_tutorials_config_resolves() -> None:
    config = load_resolved(CIFAR, world_size=2)
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (8, 1)
    assert config.fp16.initial_scale_power == 15
    assert config.optimizer is not None
    assert config.optimizer.params == {
        "lr": 0.001,
        "betas": (0.8, 0.999),
        "eps": 1e-8,
        "weight_decay": 3e-7,
        "bias_correction": True,
        "adam_w_mode": True,
        "state_bits": 32,
    }
    assert config.scheduler is not None
    assert config.scheduler.params["warmup_type"] == "log"


def test_hints_decide_every_auto() -> None:
    config = load_resolved(HUGGING_FACE, world_size=3, hints=HINTS)
    assert '"auto"' not in config.model_dump_json(exclude={"data_types", "matrix_kernels", "verify"})
    assert config.train_batch_size == 4 * 2 * 3
    assert config.gradient_clipping == 0.5
    assert (config.fp16.enabled, config.bf16.enabled) == (False, True)
    assert config.zero_optimization.reduce_bucket_size == 64 * 64
    assert config.zero_optimization.prefetch_bucket_size == 50_000_000
    assert config.optimizer is not None
    assert config.scheduler is not None
    adamw = {name: config.optimizer.params[name] for name in ("lr", "betas", "eps", "weight_decay")}
    assert adamw == {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    assert config.scheduler.params == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 3e-4,
        "warmup_num_steps": 10,
        "total_num_steps": 100,
        "warmup_type": "log",
    }
    assert not config.auto_keys


def test_a_hint_may_be_named_by_its_key_and_none_is_no_hint() -> None:
    config = load_config({"train_batch_size": 2, "gradient_clipping": "auto"})
    assert config.auto_keys == {"gradient_clipping"}
    hints: dict[str, float | None] = {"gradient_clipping": 0.25, "max_grad_norm": 1.0}
    assert resolve_config(config, world_size=2, hints=hints).gradient_clipping == 0.25
    hints = {"gradient_clipping": None, "max_grad_norm": 1.0}
    assert resolve_config(config, world_size=2, hints=hints).gradient_clipping == 1.0


def test_an_auto_batch_size_follows_from_the_others() -> None:
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}
    assert load_resolved(config, world_size=2).train_batch_size == 30


def test_a_written_value_wins_over_a_hint() -> None:
    config = load_resolved({"train_batch_size": 4}, world_size=2, hints={"train_batch_size": 8, "fp16": True})
    assert config.train_batch_size == 4
    assert not config.fp16.enabled


def test_the_defaults_that_traps_asked_for() -> None:
    config = load_resolved({"train_batch_size": 1, "comms_logger": {"enabled": False}}, world_size=1)
    assert config.gradient_clipping == 0.0
    assert not config.comms_logger.enabled
    assert config.zero_optimization.overlap_comm is True
    assert config.optimizer is None
    assert config.scheduler is None
    assert config.comm.timeout_s == 600.0


@pytest.mark.parametrize("name", ["adam", "ADAMW", "sgd", "Adagrad", "lion", "LAMB"])
def test_a_known_optimizer_is_found_in_any_case_and_a_torch_class_only_in_its_own(name: str) -> None:
    canonical = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad", "lion": "Lion", "lamb": "Lamb"}
    optimizer = load_resolved({"train_batch_size": 1, "optimizer": {"type": name}}, world_size=1).optimizer
    assert optimizer is not None
    assert optimizer.type == canonical[name.lower()]
    assert "lr" in optimizer.params
    params = {"alpha": 0.5, "foo": [1, {"a": 2}]}
    other = {"train_batch_size": 1, "optimizer": {"type": "RMSprop", "params": params}}
    optimizer = load_resolved(other, world_size=1).optimizer
    assert optimizer is not None
    assert (optimizer.type, optimizer.params) == ("RMSprop", params)


def test_schedules_take_a_value_for_each_group() -> None:
    config = {"train_batch_size": 1, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 1]}}}
    scheduler = load_resolved(config, world_size=1).scheduler
    assert scheduler is not None
    assert scheduler.params["warmup_max_lr"] == (0.1, 1.0)


def test_a_vocabulary_that_suits_no_matrix_unit_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "polyaccel.config"):
        load_resolved({"train_batch_size": 1, "vocabulary_size": 256}, world_size=1)
        assert not caplog.messages
        load_resolved({"train_batch_size": 1, "vocabulary_size": 257}, world_size=1)
    assert caplog.messages == ["vocabulary_size = 257 is not a multiple of 8"]


def _again(config: ResolvedConfig, world_size: int) -> ResolvedConfig:
    return resolve_config(load_config(json.loads(config.to_json())), world_size=world_size)


def test_to_json_round_trips() -> None:
    for source, hints in ((CIFAR, None), (HUGGING_FACE, HINTS)):
        config = load_resolved(source, world_size=2, hints=hints)
        assert _again(config, 2) == config
        assert pickle.loads(pickle.dumps(config)) == config


@given(
    st.fixed_dictionaries(
        {"train_micro_batch_size_per_gpu": st.integers(1, 99)},
        optional={
            "gradient_accumulation_steps": st.integers(1, 9),
            "gradient_clipping": st.floats(0, 10),
            "steps_per_print": st.integers(1, 9),
            "communication_data_type": st.sampled_from(["fp32", "fp16", "bf16"]),
            "zero_optimization": st.fixed_dictionaries(
                {"stage": st.integers(0, 2)}, optional={"reduce_bucket_size": st.integers(1, 10**9)}
            ),
            "optimizer": st.sampled_from(["Adam", "sgd", "Lion", "Custom"]).map(lambda kind: {"type": kind}),
            "checkpoint": st.sampled_from(["Ignore", "WARN", "fail"]).map(lambda word: {"tag_validation": word}),
        },
    ),
    st.integers(1, 9),
)
def test_any_resolved_config_round_trips(config: dict[str, Any], world_size: int) -> None:
    resolved = load_resolved(config, world_size=world_size)
    assert _again(resolved, world_size) == resolved


def test_a_gather_size_is_compared_with_the_bucket_size_that_auto_becomes() -> None:
    zero = {"reduce_bucket_size": "auto", "allgather_bucket_size": 4096}
    config = load_config({"train_batch_size": 2, "zero_optimization": zero})
    equal = resolve_config(config, world_size=1, hints={"hidden_size": 64})
    assert equal.zero_optimization.reduce_bucket_size == 4096
    assert equal.without_effect == ()
    (sentence,) = resolve_config(config, world_size=1, hints={"hidden_size": 32}).without_effect
    assert sentence.endswith("= 4096 has no effect: gathers use the buckets of reduce_bucket_size = 1024")
