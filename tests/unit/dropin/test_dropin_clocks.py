"""Clocks, loss scales and attributes of the engine under DeepSpeed's names, by their values."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.hpu_accelerator import HPU_Accelerator
from deepspeed.moe.layer import MoE
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler, LossScaler
from deepspeed.utils import timer as clocks
from torch import Tensor, nn

from polyaccel.errors import LossScaleError, PolyaccelError


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that a test moves, in seconds."""
    from polyaccel_deepspeed.engine import timers

    held = SimpleNamespace(seconds=10.0)
    monkeypatch.setattr(timers, "perf_counter", lambda: held.seconds)
    return held


def test_a_clock_adds_intervals_up(now: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    timers = clocks.SynchronizedWallClockTimer()
    for seconds in (0.5, 0.25):
        timers("fwd").start()
        now.seconds += seconds
        timers("fwd").stop()
    assert timers("fwd") is timers.get_timers()["fwd"]
    assert timers("fwd").mean() == 375.0
    assert timers.get_mean(["fwd", "bwd"], normalizer=2.0) == {"fwd": 187_500.0}
    assert timers("fwd").elapsed(reset=False) == 750.0
    timers.log(["fwd", "bwd"], ranks=[-1])
    assert "fwd: 750.00" in capsys.readouterr().out
    assert timers("fwd").elapsed() == 0.0  # forgotten when it was logged
    with pytest.raises(PolyaccelError):
        timers("fwd").stop()
    timers("fwd").start()
    with pytest.raises(PolyaccelError):
        timers("fwd").start()
    now.seconds += 1.0
    assert timers("fwd").elapsed() == 1000.0
    assert timers("fwd").started_
    assert "mem_allocated" in timers.memory_usage()


def test_throughput_counts_steps_after_the_first(now: SimpleNamespace) -> None:
    lines: list[str] = []
    config = SimpleNamespace(enabled=True, synchronized=True)
    timer = clocks.ThroughputTimer(config, batch_size=8, start_step=1, steps_per_output=2, logging_fn=lines.append)
    for _ in range(3):
        for is_last in (False, True):
            timer.start()
            now.seconds += 1.0
            timer.stop(global_step=is_last)
    assert (timer.global_step_count, timer.micro_step_count, timer.total_elapsed_time) == (3, 6, 4.0)
    assert timer.avg_samples_per_sec() == 8 * 2 / 4.0
    assert len(lines) == 1


def test_means_without_the_ends() -> None:
    assert clocks.trim_mean([9.0, 1.0, 2.0, 3.0, 100.0], 0.2) == pytest.approx((2 + 3 + 9) / 3)
    assert clocks.trim_mean([], 0.1) == 0
    with pytest.raises(PolyaccelError):
        clocks.trim_mean([1.0], 2.0)
    still = clocks.NoopTimer()
    still("fwd").start()
    assert (still("fwd").elapsed(), still.get_timers()) == (0, {})


def test_a_dynamic_scale_moves_as_deepspeeds() -> None:
    numbers = {"init_scale": 16, "scale_window": 2, "min_scale": 4, "delayed_shift": 2, "consecutive_hysteresis": False}
    scaler = CreateLossScaler(torch.half, 0.0, True, numbers)
    assert isinstance(scaler, DynamicLossScaler)
    scales = []
    for overflow in (True, True, False, False, False, True, True):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [16, 8, 8, 8, 16, 16, 8]
    scaler.update_scale(True)
    assert scaler.cur_scale == 4
    with pytest.raises(LossScaleError):
        scaler.update_scale(True)
    weight = nn.Parameter(torch.ones(2))
    scaler.backward((weight * torch.tensor([1.0, 2.0])).sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, 8.0]
    assert not scaler.has_overflow_serial([weight])
    weight.grad[0] = torch.inf
    assert scaler.has_overflow_serial([weight])


def test_a_static_scale_stays() -> None:
    half, full = CreateLossScaler(torch.half, 8.0, False, None), CreateLossScaler(torch.float32, 8.0, False, None)
    assert (half.loss_scale, full.loss_scale, type(half)) == (8.0, 1.0, LossScaler)
    half.update_scale(True)
    assert half.loss_scale == 8.0
    assert half.scale_loss(torch.tensor(2.0)).item() == 16.0


def test_devices_have_a_class_each() -> None:
    assert CPU_Accelerator().device_name() == "cpu"
    with pytest.raises(NotImplementedError):
        HPU_Accelerator()


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixture = MoE(4, nn.Linear(4, 4), num_experts=2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.mixture(inputs)[0]


@pytest.fixture
def engine() -> Iterator[Any]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
    }
    model = Mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    yield made, optimizer
    made.destroy()
    deepspeed.comm.destroy_process_group()


def test_attributes_of_the_engine(engine: Any, tmp_path: Any) -> None:
    engine, optimizer = engine
    assert engine.client_optimizer is optimizer
    assert engine.basic_optimizer is optimizer
    assert set(engine.param_names.values()) == {name for name, _ in engine.module.named_parameters()}
    assert [type(one).__name__ for one in (*engine.gate_modules, *engine.moe_layers)] == ["TopKGate", "MOELayer"]
    assert (engine.pipeline_parallelism, engine.enable_backward_allreduce, engine.gradient_average) == (
        False,
        True,
        True,
    )
    assert (engine.sequence_parallel_size, engine.seq_dp_world_size, engine.checkpoint_mp_rank) == (1, 1, 0)
    assert engine.data_parallel_group is engine.seq_data_parallel_group is torch.distributed.group.WORLD
    assert (engine.expert_parallel_group, engine.expert_data_parallel_group, engine.seq_parallel_group) == (
        {},
        {},
        None,
    )
    assert (engine.local_all_to_all_group, engine.training_data, engine.client_lr_scheduler) == (None, None, None)
    assert (engine.losses, engine.gas_boundary_ctr, engine.inside_no_sync_ctxt) == (None, 0, False)
    for loss in (engine(torch.ones(4, 4)).sum(), engine(torch.ones(4, 4)).sum()):
        engine.backward(loss)
        assert engine.losses.item() == pytest.approx(loss.item())
        engine.step()
    assert (engine.losses, engine.gas_boundary_ctr) == (None, 1)
    with engine.no_sync():
        assert engine.inside_no_sync_ctxt
    engine.timers("mine").start()
    assert engine.timers.get_timers()["mine"].started_
    files = engine.checkpoint_engine
    files.save({"a": torch.ones(2)}, str(tmp_path / "a.pt"))
    assert files.load(str(tmp_path / "a.pt"))["a"].tolist() == [1.0, 1.0]
    assert (files.is_decoupled(), files.commit("tag"), engine.save_zero_checkpoint) == (False, True, True)


def test_tensor_ranks_are_those_of_an_mpu_or_none() -> None:
    from deepspeed.checkpointing import bwc_tensor_model_parallel_rank
    from deepspeed.runtime.utils import is_model_parallel_parameter
    from deepspeed.utils import bwc_tensor_model_parallel_world_size

    class Mpu:
        def get_model_parallel_rank(self) -> int:
            return 1

        def get_model_parallel_world_size(self) -> int:
            return 2

    assert (bwc_tensor_model_parallel_rank(), bwc_tensor_model_parallel_world_size()) == (0, 1)
    assert (bwc_tensor_model_parallel_rank(Mpu()), bwc_tensor_model_parallel_world_size(mpu=Mpu())) == (1, 2)
    weight = nn.Parameter(torch.ones(1))
    assert not is_model_parallel_parameter(weight)
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    assert is_model_parallel_parameter(weight)


def test_a_device_is_set_by_its_class() -> None:
    from deepspeed.accelerator import get_accelerator, set_accelerator

    import polyaccel

    before = polyaccel.get_accelerator()
    chosen = CPU_Accelerator()
    try:
        set_accelerator(chosen)
        assert polyaccel.get_accelerator() is chosen._accelerator
        assert get_accelerator().device_name() == "cpu"
        with pytest.raises(PolyaccelError):
            set_accelerator(3)
    finally:
        polyaccel.set_accelerator(before)
