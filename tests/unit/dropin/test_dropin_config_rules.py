"""What DeepSpeed's own reader of configs accepts, the drop-in accepts, and under polyaccel it stays an error."""

from __future__ import annotations

import argparse
import copy
import os
from typing import Any

import pytest
from polyaccel_deepspeed.auto_values import DEFAULTS, fill_auto
from polyaccel_deepspeed.config import normalise, read_for_check
from polyaccel_deepspeed.config_rules import whole_batch

from polyaccel import ConfigError
from polyaccel.config import ResolvedConfig, load_resolved

BASE = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}


def read(config: dict[str, Any], world_size: int = 1) -> ResolvedConfig:
    return load_resolved(normalise({**BASE, **config})[0], world_size=world_size)


def warnings(config: dict[str, Any]) -> list[str]:
    return [str(change) for change in normalise({**BASE, **config})[1] if change.is_warning]


FOREIGN: list[dict[str, Any]] = [
    {"_comment": "ours", "log": {"level": 3}, "cuda_visible_devices": "0,1"},
    {"optimizer": {"type": "Adam", "params": {"lr": 0.1}, "comment": 1}},
    {"pipeline": {"num_stages": 1, "note": "x"}},
    {"scheduler": {"type": "WarmupLR", "params": {}, "interval": "step"}},
    {"activation_checkpointing": {"deepspeed_activation_checkpointing": True}},
    {"checkpoint": {"every": 10}, "data_types": {"weights": "fp16"}},
    {"zero_optimisation": {"stage": 2}, "zero_optimization.stag": 3},
    {"flops_profiler": {"detail": 1}, "aio": {"depth": 2}, "timers": {"on": True}},
]


@pytest.mark.parametrize("config", FOREIGN)
def test_keys_that_deepspeed_never_reads_are_dropped_with_one_warning(config):
    assert len(warnings(config)) == 1
    assert read(config) == read({key: config[key] for key in ("optimizer", "scheduler") if key in config})
    with pytest.raises(ConfigError):
        load_resolved({**BASE, **config}, world_size=1)


@pytest.mark.parametrize("section", ["zero_optimization", "fp16", "bf16", "comms_logger", "tensorboard"])
def test_foreign_keys_that_deepspeed_refuses_are_refused(section):
    with pytest.raises(ConfigError) as caught:
        read({section: {"foo": 1}})
    assert [problem.key for problem in caught.value.problems] == [f"{section}.foo"]


def test_a_misspelt_key_is_named_with_the_key_that_it_resembles():
    (line,) = warnings({"gradient_cliping": 1.0, "fp32_allreduce": True})
    assert "'gradient_clipping'" in line
    assert "communication_data_type" in line


TEXT: list[tuple[dict[str, Any], str, Any]] = [
    ({"fp16": {"enabled": "true"}}, "fp16.enabled", True),
    ({"bf16": {"enabled": "Yes"}}, "bf16.enabled", True),
    ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage", 2),
    ({"zero_optimization": {"overlap_comm": "false"}}, "zero_optimization.overlap_comm", False),
    ({"zero_optimization": {"reduce_bucket_size": "5000"}}, "zero_optimization.reduce_bucket_size", 5000),
    ({"wall_clock_breakdown": "false"}, "wall_clock_breakdown", False),
    ({"gradient_accumulation_steps": "4"}, "gradient_accumulation_steps", 4),
    ({"gradient_clipping": "0.5"}, "gradient_clipping", 0.5),
    ({"data_types": {"grad_accum_dtype": "torch.bfloat16"}}, "data_types.grad_accum_dtype", "bf16"),
    ({"data_types": {"grad_accum_dtype": "Float"}}, "data_types.grad_accum_dtype", "fp32"),
    ({"communication_data_type": "half"}, "communication_data_type", "fp16"),
    ({"torch_autocast": {"enabled": True, "dtype": "BF16"}}, "torch_autocast.dtype", "bfloat16"),
]


@pytest.mark.parametrize(("config", "key", "value"), TEXT)
def test_text_is_read_as_the_value_that_it_stands_for(config, key, value):
    found: Any = read(config)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", ["5e8", "many", 5.5])
def test_text_that_is_no_number_is_refused(value):
    with pytest.raises(ConfigError) as caught:
        read({"zero_optimization": {"reduce_bucket_size": value}})
    assert [problem.value for problem in caught.value.problems] == [value]


def test_arguments_of_optimizers_and_schedules_are_read_too():
    config = read(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "weight_decay": "0.1"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "20", "last_batch_iteration": -1}},
        }
    )
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert (config.optimizer.params["lr"], config.optimizer.params["weight_decay"]) == (1e-4, 0.1)
    assert config.scheduler.params["warmup_num_steps"] == 20


IDLE: list[dict[str, Any]] = [
    {"fp16": {"enabled": True, "loss_scale": 128, "min_loss_scale": 0}},
    {"fp16": {"enabled": False, "min_loss_scale": 0}},
    {"activation_checkpointing": {"contiguous_memory_optimization": True}},
    {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
    {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": []}},
    {"comms_logger": {"enabled": True, "prof_all": True, "prof_ops": ["log_summary"]}},
]


@pytest.mark.parametrize("config", IDLE)
def test_settings_that_do_nothing_are_dropped_with_a_line(config):
    tree, changes = normalise({**BASE, **config})
    assert len(changes) == 1
    load_resolved(tree, world_size=1)
    with pytest.raises(ConfigError):
        load_resolved({**BASE, **config}, world_size=1)


def test_a_dynamic_loss_scale_needs_a_floor_in_deepspeed_too():
    with pytest.raises(ConfigError):
        read({"fp16": {"enabled": True, "min_loss_scale": 0}})


SHARED: list[dict[str, Any]] = [
    {"tensor_parallel": {"autotp_size": 2}},
    {"tensor_parallel": {"tp": {"tp_size": 2}}},
    {"mesh": {"tensor": 2}},
    {"mesh": {"sequence": 2}},
    {"sequence_parallel_size": 2},
    {"pipeline": {"stages": 2}},
    {"mesh": {"tensor": 2, "expert": 2}},
    {"tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": True, "autoep_size": 2}},
]


@pytest.mark.parametrize("axes", SHARED)
def test_a_batch_that_counts_ranks_which_share_samples_is_dropped(axes):
    tree = {**BASE, "train_batch_size": 16, "gradient_accumulation_steps": 2, **axes}
    written = copy.deepcopy(axes)
    assert [change.key for change in whole_batch(tree, 4)] == ["train_batch_size"]
    assert axes == written
    assert load_resolved(tree, world_size=4).train_batch_size == 8
    assert list(whole_batch({**BASE, "train_batch_size": 8, "gradient_accumulation_steps": 2, **axes}, 4)) == []


@pytest.mark.parametrize("axes", [{}, {"mesh": {"expert": 2}}, {"mesh": {"tensor": "two"}}])
def test_a_batch_of_ranks_that_all_have_their_own_samples_stays(axes):
    assert list(whole_batch({**BASE, "train_batch_size": 16, "gradient_accumulation_steps": 2, **axes}, 4)) == []


def test_a_path_of_any_kind_is_read(tmp_path):
    class Home(os.PathLike[str]):
        def __fspath__(self) -> str:
            return str(tmp_path / "ds.json")

    (tmp_path / "ds.json").write_text('{"train_batch_size": 4}')
    assert normalise(Home())[0]["train_batch_size"] == 4


def test_hjson_is_read_by_its_package(tmp_path):
    pytest.importorskip("hjson", reason="needs the package hjson, which is in the dev extra")
    path = tmp_path / "ds.json"
    path.write_text("{\n  train_batch_size: 4\n  optimizer: {type: AdamW\n params: {lr: 0.1}}\n}\n")
    tree, _ = normalise(path)
    assert (tree["train_batch_size"], tree["optimizer"]["type"]) == (4, "AdamW")


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}
ARGUMENTS = {"learning_rate": 1e-3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize("stage", [2, 3])
def test_auto_is_filled_as_transformers_fills_it(stage):
    transformers = pytest.importorskip("transformers", reason="needs transformers, which is in the dev extra")
    accelerate = pytest.importorskip("accelerate.utils.deepspeed", reason="needs accelerate, which is in the dev extra")

    class Theirs(transformers.integrations.deepspeed.HfTrainerDeepSpeedConfig, accelerate.HfDeepSpeedConfig):
        """Without the check that a package called deepspeed is installed."""

        def __init__(self, config):
            accelerate.HfDeepSpeedConfig.__init__(self, config)
            self._dtype, self.mismatches = None, []

    written = {**AUTO, "zero_optimization": {**AUTO["zero_optimization"], "stage": stage}}
    fields = {field.name: field.default for field in transformers.TrainingArguments.__dataclass_fields__.values()}
    assert {name: fields[name] for name in DEFAULTS} == DEFAULTS
    arguments = argparse.Namespace(**{**fields, **ARGUMENTS, "world_size": 2})
    arguments.get_warmup_steps = lambda steps: 0
    theirs = Theirs(written)
    theirs.trainer_config_process(arguments)
    model = argparse.Namespace(config=argparse.Namespace(hidden_size=64))
    theirs.trainer_config_finalize(arguments, model, 100)
    ours = {**written, **{key: dict(value) for key, value in written.items() if isinstance(value, dict)}}
    for section in ("optimizer", "scheduler"):
        ours[section] = {**ours[section], "params": dict(ours[section]["params"])}
    fill_auto(ours, 2, {**ARGUMENTS, "hidden_size": 64, "num_training_steps": 100})
    assert ours == theirs.config


def test_written_batch_sizes_decide_the_other_ones():
    sizes = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2}
    tree, _ = read_for_check({**BASE, **sizes}, 4, {"per_device_train_batch_size": 3})
    assert [tree[key] for key in sizes] == [24, 3, 2]
    tree, _ = read_for_check({**BASE, **sizes, "train_micro_batch_size_per_gpu": 5}, 4, {})
    assert [tree[key] for key in sizes] == [40, 5, 2]


def test_an_argument_that_contradicts_the_config_is_refused():
    with pytest.raises(ConfigError) as caught:
        read_for_check({**BASE, "gradient_clipping": 0.5}, 1, {"max_grad_norm": 1.0})
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("gradient_clipping", 0.5)]
    with pytest.raises(ConfigError):
        read_for_check(BASE, 1, {"learning": 1.0})
