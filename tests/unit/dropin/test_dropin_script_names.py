"""What public training scripts ask of DeepSpeed's engine on one rank: counters that can be set, the optimizer inside,
the norm as a tensor, the timer, saves in the middle of an accumulation, the script beside a checkpoint."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.compression.helper import recursive_getattr, recursive_setattr
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from polyaccel_deepspeed.config import normalise
from polyaccel_deepspeed.engine.figures import GradNorm, ThroughputTimer
from torch import nn

from polyaccel.checkpoint import FileStorage
from polyaccel.checkpoint.format.commit import tag_names
from polyaccel.errors import CommError, PolyaccelError

PLUGIN = Path(__file__).parents[3] / "plugins" / "polyaccel-deepspeed"
ALL = (
    DeepSpeedOptimizer,
    ZeROOptimizer,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    BF16_Optimizer,
    FP16_Optimizer,
    FP16_UnfusedOptimizer,
)


@pytest.fixture(autouse=True)
def _leave() -> Iterator[None]:
    yield
    deepspeed.comm.destroy_process_group()


def config_of(stage: int = 2, **more: Any) -> dict[str, Any]:
    base = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    return {**base, "optimizer": optimizer, "zero_optimization": {"stage": stage}, **more}


def engine_of(stage: int = 2, *, optimizer: Any = None, **more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    config = config_of(stage, **more)
    if optimizer is not None:
        del config["optimizer"]
        optimizer = optimizer(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, micro_batches: int, first: int = 0) -> None:
    for number in range(first, first + micro_batches):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(x.to(engine.module.weight.dtype)).float().square().mean())
        engine.step()


def weight_of(engine: Any) -> torch.Tensor:
    weight: torch.Tensor = engine.module_state_dict()["weight"].clone()
    return weight


@pytest.mark.parametrize("name", ["micro_steps", "global_steps", "global_samples", "skipped_steps"])
def test_a_counter_can_be_set(name: str, tmp_path: Path) -> None:
    engine = engine_of()
    train(engine, 4)
    setattr(engine, name, 10.0)
    assert getattr(engine, name) == getattr(engine.counters, name) == 10
    train(engine, 2)
    engine.save_checkpoint(tmp_path, tag="t")
    engine.load_checkpoint(tmp_path, tag="t")
    assert (
        getattr(engine, name)
        == {"micro_steps": 12, "global_steps": 11, "global_samples": 14, "skipped_steps": 10}[name]
    )
    for wrong in (-1, 1.5):
        with pytest.raises(PolyaccelError) as caught:
            setattr(engine, name, wrong)
        assert caught.value.value == wrong
    engine.destroy()


def test_an_epoch_begins_a_whole_accumulation() -> None:
    """Loops of BEiT's family set `micro_steps` to 0 after `zero_grad` at the start of each epoch."""
    engine = engine_of()
    train(engine, 3)
    engine.zero_grad()
    engine.micro_steps = 0
    before = weight_of(engine)
    train(engine, 1)
    assert torch.equal(weight_of(engine), before)
    train(engine, 1)
    assert not torch.equal(weight_of(engine), before)
    assert engine.global_steps == 2
    engine.destroy()


def test_torchs_own_group_is_taken() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(model=model, config=config_of(), dist_init_required=False)
    train(engine, 2)
    assert engine.global_steps == 1
    engine.destroy()


def test_no_group_at_all_is_refused() -> None:
    with pytest.raises(CommError):
        deepspeed.initialize(model=nn.Linear(4, 4), config=config_of(), dist_init_required=False)


KINDS = [
    ({"stage": 0}, ()),
    ({"stage": 1}, (DeepSpeedOptimizer, ZeROOptimizer, DeepSpeedZeroOptimizer)),
    ({"stage": 2}, (DeepSpeedOptimizer, ZeROOptimizer, DeepSpeedZeroOptimizer)),
    ({"stage": 3}, (DeepSpeedOptimizer, ZeROOptimizer, DeepSpeedZeroOptimizer_Stage3)),
    ({"stage": 1, "bf16": {"enabled": True}}, (DeepSpeedOptimizer, ZeROOptimizer, DeepSpeedZeroOptimizer)),
    (
        {"stage": 1, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        (DeepSpeedOptimizer, ZeROOptimizer, BF16_Optimizer),
    ),
    ({"stage": 3, "bf16": {"enabled": True}}, (DeepSpeedOptimizer, ZeROOptimizer, DeepSpeedZeroOptimizer_Stage3)),
    ({"stage": 0, "fp16": {"enabled": True}}, (DeepSpeedOptimizer, FP16_Optimizer)),
    ({"stage": 0, "bf16": {"enabled": True}, "optimizer": FusedAdam}, (DeepSpeedOptimizer, FP16_Optimizer)),
    ({"stage": 0, "fp16": {"enabled": True}, "optimizer": torch.optim.SGD},
     (DeepSpeedOptimizer, FP16_UnfusedOptimizer)),
]  # fmt: skip
"""Settings, and the classes that DeepSpeed's optimizer has there."""


@pytest.mark.parametrize(("settings", "kinds"), KINDS)
def test_an_optimizer_is_of_deepspeeds_classes(settings: dict[str, Any], kinds: tuple[type, ...]) -> None:
    engine = engine_of(**settings)
    assert tuple(kind for kind in ALL if isinstance(engine.optimizer, kind)) == kinds
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    scale = 65536.0 if "fp16" in settings else 1.0
    assert engine.optimizer.loss_scale == engine.optimizer.cur_scale == scale
    train(engine, 2)
    assert engine.optimizer.overflow is False
    engine.destroy()


@pytest.mark.parametrize("make", [None, torch.optim.AdamW, FusedAdam])
def test_the_optimizer_inside_moves_the_engines_groups(make: Any) -> None:
    own = []

    def optimizer(parameters: Any) -> Any:
        own.append(make(parameters, lr=0.01))
        return own[0]

    engine = engine_of(optimizer=None if make is None else optimizer)
    inside = engine.optimizer.optimizer
    assert inside is (own[0] if own else engine.optimizer)
    assert inside.param_groups[0]["lr"] == 0.01
    inside.param_groups[0]["lr"] = 0.5
    assert engine.get_lr() == [0.5]
    engine.destroy()


def test_the_norm_is_a_float_and_has_a_tensors_methods() -> None:
    engine = engine_of()
    assert engine.get_global_grad_norm() is None
    train(engine, 2)
    norm = engine.get_global_grad_norm()
    assert isinstance(norm, float)
    assert norm.item() == float(norm) == pytest.approx(engine.metrics.grad_norm)
    assert type(norm.item()) is float
    assert json.loads(json.dumps({"norm": norm}))["norm"] == float(norm)
    assert f"{norm:.3f}" == f"{float(norm):.3f}"
    assert not torch.isinf(norm).item()
    assert torch.isfinite(norm)
    assert torch.stack([norm, norm]).shape == (2,)
    assert norm.detach().cpu().shape == ()
    assert norm.isnan().item() is False
    assert math.isnan(GradNorm("nan").item())
    assert not hasattr(norm, "no_such_method")
    engine.destroy()


def test_the_timer_counts_steps() -> None:
    engine = engine_of()
    timer = engine.tput_timer
    assert isinstance(timer, ThroughputTimer)
    assert timer.avg_samples_per_sec() == float("-inf")
    train(engine, 8)
    assert (timer.global_step_count, timer.micro_step_count, timer.batch_size) == (4, 8, 4)
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)
    assert timer.avg_samples_per_sec() > 0
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_save_inside_an_accumulation_leaves_it_out_and_the_run_goes_on(stage: int, tmp_path: Path) -> None:
    straight = engine_of(stage)
    train(straight, 6)
    wanted = weight_of(straight)
    straight.destroy()
    engine = engine_of(stage)
    train(engine, 3)
    assert engine.save_checkpoint(tmp_path, tag="t")
    train(engine, 3, first=3)
    assert torch.equal(weight_of(engine), wanted)
    engine.destroy()
    resumed = engine_of(stage)
    resumed.load_checkpoint(tmp_path, tag="t")
    assert (resumed.global_steps, resumed.micro_steps) == (1, 2)
    train(resumed, 4, first=2)
    assert torch.equal(weight_of(resumed), wanted)
    resumed.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_script_beside_the_checkpoints_converts_them(stage: int, tmp_path: Path) -> None:
    engine = engine_of(stage)
    train(engine, 2)
    script = tmp_path / "zero_to_fp32.py"
    engine.save_checkpoint(tmp_path, tag="t")
    assert script.exists() == (stage > 0)  # as in DeepSpeed
    wanted = weight_of(engine)
    engine.destroy()
    if stage == 0:
        return
    assert script.stat().st_mode & 0o100
    assert tag_names(FileStorage(tmp_path)) == ("t",)
    command = [sys.executable, str(script), str(tmp_path), str(tmp_path / "out.bin")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(PLUGIN)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "out.bin")["weight"], wanted)


def test_the_script_alone_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "zero_to_fp32.py").touch()
    engine = engine_of()
    assert engine.load_checkpoint(tmp_path) == (None, None)
    engine.destroy()


@pytest.mark.parametrize("layer", [lambda: nn.Linear(4, 3), lambda: nn.Embedding(5, 2), lambda: nn.LSTM(3, 2)])
def test_parameters_have_deepspeeds_attributes_before_and_after_initialize(layer: Any) -> None:
    config = config_of(3)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(layer(), nn.LayerNorm(2))
    before = [(one.ds_id, one.ds_shape, one.ds_numel) for one in model.parameters()]
    assert all(shape.numel() == numel for _, shape, numel in before)
    assert all(one.ds_status == ZeroParamStatus.NOT_AVAILABLE for one in model.parameters())
    assert all(one.ds_status in ZeroParamStatus for one in model.parameters())
    assert ZeroParamStatus.NOT_AVAILABLE in [one.ds_status for one in model.parameters()]
    assert copy.deepcopy(next(model.parameters()).ds_status) is ZeroParamStatus.NOT_AVAILABLE
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        assert all(one.ds_status == ZeroParamStatus.AVAILABLE for one in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert [(one.ds_id, one.ds_shape, one.ds_numel) for one in model.parameters()] == before
    engine.destroy()


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_config_of_init_decides_the_dtype_of_parameters(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = config_of(3) | {name: {"enabled": True}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    for source in (config, file, str(file)):
        with deepspeed.zero.Init(config_dict_or_path=source):
            model = nn.Linear(64, 64)
        assert {one.dtype for one in model.parameters()} == {dtype}
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.float32):
        assert nn.Linear(64, 64).weight.dtype == torch.float32
    with deepspeed.zero.Init(config_dict_or_path=config_of(3) | {name: {"enabled": "auto"}}):
        assert nn.Linear(64, 64).weight.dtype == torch.float32


def test_parameters_without_a_shape_yet_are_left_alone() -> None:
    with deepspeed.zero.Init():
        lazy = nn.LazyLinear(3)
    assert not hasattr(lazy.weight, "ds_id")


def test_attributes_are_found_and_set_by_dotted_names() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    assert recursive_getattr(model, "0.0.weight").shape == (4, 4)
    recursive_setattr(model, "0.0", nn.ReLU())
    assert isinstance(model[0][0], nn.ReLU)
    recursive_setattr(model, "name", 1)
    assert recursive_getattr(model, "name") == 1
    with pytest.raises(AttributeError):
        recursive_getattr(model, "0.none")


@pytest.mark.parametrize("given", ["cosine", "exponential", None, 3])
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_an_unknown_warmup_is_logarithmic(kind: str, given: Any) -> None:
    params = {"warmup_num_steps": 4, **({} if kind == "WarmupLR" else {"total_num_steps": 8})}
    rates = []
    for warmup in ({"warmup_type": given}, {"warmup_type": "log"}):
        engine = engine_of(scheduler={"type": kind, "params": {**params, **warmup}})
        rates.append([])
        for _ in range(4):
            train(engine, 2)
            rates[-1].append(engine.get_lr()[0])
        engine.destroy()
        deepspeed.comm.destroy_process_group()
    assert rates[0] == rates[1]
    _, changes = normalise(config_of(scheduler={"type": kind, "params": {"warmup_type": given}}))
    assert [change.is_warning for change in changes if change.key == "scheduler.params.warmup_type"] == [True]


def test_answers_follow_the_config() -> None:
    engine = engine_of(autotuning={"enabled": True})
    assert engine.autotuning_enabled() is True
    assert engine.autotp_size() == 0
    assert engine.get_sequence_parallel_group() is None
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("client", [None, torch.optim.AdamW])
def test_hyperparameters_that_a_schedule_in_numpy_wrote_are_saved(stage: int, client: Any, tmp_path: Path) -> None:
    """Loops of BEiT's and VideoMAE's family write `lr` and `weight_decay` out of numpy arrays, then save."""
    engine = engine_of(stage, optimizer=client)
    for group in engine.optimizer.param_groups:
        group["lr"] = np.linspace(0.01, 0.02, 3)[1] * 1.0
        group["weight_decay"] = np.array([0.05, 0.04])[1]
        group["betas"] = (np.float64(0.8), np.float32(0.5))
    train(engine, 2)
    assert engine.save_checkpoint(tmp_path, tag="t")
    engine.destroy()
    resumed = engine_of(stage, optimizer=client)
    resumed.load_checkpoint(tmp_path, tag="t")
    for group in resumed.optimizer.param_groups:
        assert (group["lr"], group["weight_decay"], tuple(group["betas"])) == (0.015, 0.04, (0.8, 0.5))
    resumed.destroy()


@pytest.mark.parametrize("stage", [1, 2])
def test_clipping_by_hand_under_a_loss_scale_has_no_effect(stage: int) -> None:
    """Under ZeRO, DeepSpeed's parameters have no gradients, so that `clip_grad_norm_` of a script changes nothing."""
    moved = []
    for clips in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        settings = config_of(stage, fp16={"enabled": True, "initial_scale_power": 4}, gradient_accumulation_steps=1)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
        engine.backward(engine(torch.ones(2, 4, dtype=torch.float16)).square().mean())
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            assert all(parameter.grad is None for parameter in model.parameters())
        engine.step()
        moved.append([parameter.detach().clone() for parameter in model.parameters()])
        engine.destroy()
    assert all(torch.equal(one, other) for one, other in zip(*moved, strict=True))
