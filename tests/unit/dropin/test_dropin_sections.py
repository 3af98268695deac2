"""Sections of a config as objects, and the functions that read one key: DeepSpeed's names, defaults and refusals."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime import config as readers
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config, get_bfloat16_config
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, get_zero_config
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from pydantic import Field, ValidationError

from polyaccel.errors import ConfigError


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_dumped_section_is_one_of_a_config(stage: int) -> None:
    section = DeepSpeedZeroConfig(stage=stage, reduce_bucket_size=1000, offload_optimizer={"device": "cpu"})
    config = {
        "train_batch_size": 1,
        "zero_optimization": section.model_dump(exclude_unset=True) | {"stage": stage},
        "bf16": DeepSpeedBF16Config(enabled=True).model_dump(),
        "fp16": DeepSpeedFP16Config(loss_scale=2).model_dump(),
    }
    if stage == 0:
        del config["zero_optimization"]["offload_optimizer"]
    read = DeepSpeedConfig(config, world_size=1)
    assert (read.zero_optimization_stage, read.zero_config.reduce_bucket_size, read.bf16.enabled) == (stage, 1000, True)
    assert section.overlap_comm == (stage == 3)


def test_older_names_are_moved_and_auto_is_left_out() -> None:
    assert DeepSpeedZeroConfig(cpu_offload=True).offload_optimizer.device == "cpu"
    assert DeepSpeedZeroConfig(cpu_offload=False).offload_optimizer is None
    assert DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save
    assert DeepSpeedZeroConfig(reduce_bucket_size="auto").reduce_bucket_size == 500_000_000
    with pytest.raises(AssertionError):
        DeepSpeedZeroConfig(cpu_offload=True, offload_optimizer={"device": "cpu"})
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_read=True).pipeline
    assert get_zero_config({"zero_optimization": True}).stage == 1
    assert get_zero_config({}).stage == 0
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled


def test_a_script_s_own_section_moves_into_a_table() -> None:
    class Inner(DeepSpeedConfigModel):
        size: int = 0

    class Outer(DeepSpeedConfigModel):
        inner: Inner = Field(default_factory=Inner)
        old: str | None = Field(
            None, json_schema_extra={"deprecated": True, "new_param": "inner.size", "new_param_fn": int}
        )

    assert Outer(old="3").inner.size == 3
    assert Outer().inner.size == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss_scale": -1},
        {"loss_scale": True},
        {"loss_scale": float("nan")},
        {"loss_scale": []},
        {"enabled": True, "loss_scale_window": 0},
        {"enabled": True, "min_loss_scale": -1},
        {"min_loss_scale": float("inf")},
        {"scale": 1},
    ],
)
def test_wrong_sections_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DeepSpeedFP16Config(**wrong)


def test_what_no_dynamic_scale_reads_is_not_checked() -> None:
    assert DeepSpeedFP16Config(enabled=True, loss_scale=128, min_loss_scale=0).min_loss_scale == 0
    assert DeepSpeedFP16Config(initial_scale_power=4).dynamic_loss_scale_args()["init_scale"] == 16
    for wrong in ({"stage": 3, "compute_grad_norm": False}, {"stage": 2, "offload_optimizer": {"ratio": 0.5}}):
        with pytest.raises(ValidationError):
            DeepSpeedZeroConfig(**wrong)


def test_functions_read_a_key_or_its_default() -> None:
    assert readers.get_gradient_clipping({}) == 1.0
    assert readers.get_gradient_clipping({"gradient_clipping": 0.0}) == 0.0
    assert readers.get_communication_data_type({"communication_data_type": "BF16"}) is torch.bfloat16
    assert readers.get_communication_data_type({}) is None
    assert readers.get_optimizer_params({"optimizer": {"type": "Adam", "params": {"lr": 1}}}) == {"lr": 1}
    assert readers.get_optimizer_params({}) is readers.get_scheduler_params({}) is None
    assert readers.get_checkpoint_tag_validation_mode({"tag_validation": "fail"}) == "FAIL"
    assert readers.get_pipeline_config({"pipeline": {"stages": 2}})["stages"] == 2
    for read, wrong in {
        readers.get_gradient_allreduce_op: {"gradient_allreduce_op": "max"},
        readers.get_communication_data_type: {"communication_data_type": "int8"},
        readers.get_checkpoint_tag_validation_mode: {"tag_validation": "never"},
        readers.get_lower_precision_safe_modules: {"torch_autocast": {"lower_precision_safe_modules": [3]}},
    }.items():
        with pytest.raises(ConfigError):
            read(wrong)


def test_one_leaf_module_may_stand_without_a_list() -> None:
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "leaf_module": {"classes": "Linear"}}}
    assert DeepSpeedConfig(config, world_size=1).zero_config.leaf_module.classes == ("Linear",)
    assert DeepSpeedZeroConfig(leaf_module={"names": "mlp"}).leaf_module.names == ["mlp"]


def test_an_engine_has_its_config_as_an_object() -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "data_types": {"grad_accum_dtype": "fp32"}}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)
    found = engine._config
    assert (found.zero_config.stage, found.optimizer_name, found.scheduler_name) == (0, "Adam", None)
    assert (found.param_dtype, found.grad_accum_dtype) == (None, "fp32")
    with pytest.raises(AttributeError):
        found.no_such_dtype  # noqa: B018
    engine.destroy()


@pytest.mark.parametrize("norm_type", [1, 2, 3, float("inf")])
def test_gradients_are_clipped_as_by_torch(norm_type: float) -> None:
    deepspeed.init_distributed()
    ours = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    plain = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    for one, other in zip(ours[:2], plain[:2], strict=True):
        one.grad = torch.randn(3)
        other.grad = one.grad.clone()
    want = torch.nn.utils.clip_grad_norm_(plain, 0.1, norm_type)
    assert float(clip_grad_norm_(ours, 0.1, norm_type)) == pytest.approx(float(want))
    for one, other in zip(ours[:2], plain[:2], strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert float(clip_grad_norm_(ours[2], 0.1)) == 0.0
    deepspeed.comm.destroy_process_group()


def test_parameters_of_init_are_not_there_until_they_are_gathered() -> None:
    with deepspeed.zero.Init():
        model = torch.nn.Linear(2, 2)
    weight = model.weight
    assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    with deepspeed.zero.GatheredParameters(weight):
        with deepspeed.zero.GatheredParameters([weight]):
            assert weight.ds_status == ZeroParamStatus.AVAILABLE
        assert weight.ds_status == ZeroParamStatus.AVAILABLE
    assert weight.ds_status == model.bias.ds_status == ZeroParamStatus.NOT_AVAILABLE
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam"}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.destroy()
    assert weight.ds_status == ZeroParamStatus.AVAILABLE
    deepspeed.comm.destroy_process_group()
