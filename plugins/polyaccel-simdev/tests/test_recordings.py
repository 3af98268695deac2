"""Recordings: what the device plays has the bits of what is launched piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from polyaccel_simdev.accelerator import SimdevAccelerator
from test_training import BF16, train

from polyaccel.core.types import DType

RECORDED = {"graphs": "update"}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
WARM = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 4},
    }
}
UNCLIPPED = {"gradient_clipping": 0.0}


def momentum(rate: float) -> dict[str, Any]:
    return {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": rate, "weight_decay": 0.01}}}


SETTINGS: dict[str, tuple[Any, Any]] = {
    "0": ({"stage": 0}, {}),
    "1, warm": ({"stage": 1}, WARM),
    "2, bf16, warm": ({"stage": 2}, {**BF16, **WARM}),
    "2, accumulated": ({"stage": 2}, {**BF16, "gradient_accumulation_steps": 2}),
    "2, float16": ({"stage": 2}, FP16),
    "3": ({"stage": 3}, {}),
    "3, bf16, unclipped": ({"stage": 3, "stage3_param_persistence_threshold": 0}, {**BF16, **UNCLIPPED}),
    "1, momentum": ({"stage": 1}, momentum(0.9)),
    "1, sgd": ({"stage": 1}, momentum(0.0)),
    "2, lion": ({"stage": 2}, {"optimizer": {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}}}),
}


@pytest.mark.parametrize("world", [1, 2])
def test_recorded_updates_have_the_bits_of_launched_ones(world: int) -> None:
    wanted = train(world, SETTINGS, script_name="train_recorded.py")
    recorded = {name: (zero, {**changes, **RECORDED}) for name, (zero, changes) in SETTINGS.items()}
    found = train(world, recorded, script_name="train_recorded.py")
    counts = {name: (one.pop("recorded"), one.pop("played")) for name, one in found.items()}
    assert found == wanted
    assert [name for name, (count, played) in counts.items() if not 0 < count < played] == [], counts


def test_work_runs_when_its_recording_is_played() -> None:
    accelerator = SimdevAccelerator()
    source, target = (accelerator.allocate(4, DType.FLOAT32) for _ in range(2))

    def work() -> None:
        source.raw.add_(1)
        target.raw.copy_(torch.sqrt(source.raw * source.raw) + source.raw)

    play = accelerator.record_work(work)
    assert target.raw.tolist() == [0.0] * 4
    source.fill(2)
    for value in (6.0, 8.0):
        play()
        assert target.raw.tolist() == [value] * 4


def test_the_host_cannot_wait_inside_a_recording() -> None:
    accelerator = SimdevAccelerator()
    buffer = accelerator.allocate(1, DType.FLOAT32)
    other = accelerator.new_stream()
    outside = accelerator.current_stream().record()
    for work in (
        buffer.raw.item,
        accelerator.synchronize,
        lambda: buffer.raw.cpu(),
        lambda: other.wait(outside),
        lambda: accelerator.record_work(lambda: None),
    ):
        with pytest.raises(RuntimeError):
            accelerator.record_work(work)
    buffer.fill(1)  # it records no longer
    assert buffer.raw.item() == 1.0


def test_a_forward_pass_is_recorded() -> None:
    """Operations that make new tensors: their memory belongs to the recording."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).to("simdev")
    inputs, outputs = torch.zeros(3, 5, device="simdev"), torch.zeros(3, 1, device="simdev")

    @torch.no_grad()
    def forward() -> None:
        outputs.copy_(model(inputs))

    play = SimdevAccelerator().record_work(forward)
    for value in (1.0, -2.0):
        inputs.fill_(value)
        play()
        with torch.no_grad():
            assert torch.equal(outputs, model(inputs))
