"""DeepSpeed's names of the operation profiler."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from torch import nn

from polyaccel import PolyaccelError


def test_a_model_has_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10))
    assert get_model_profile(model, (4, 100)) == ("176 KFLOPs", "88 KMACs", "22.2 K")
    assert "Linear" in capsys.readouterr().out
    file = str(tmp_path / "table.txt")
    figures = get_model_profile(model, args=[torch.ones(4, 100)], as_string=False, output_file=file)
    assert figures == (176_000, 88_000, 22_210)
    assert "Linear" in Path(file).read_text()
    flops, *_ = get_model_profile(model, (4, 100), print_profile=False, as_string=False, ignore_modules=[nn.Linear])
    assert flops == 176_000
    with pytest.raises(PolyaccelError) as caught:
        get_model_profile(model, (4, 100), mode="backward")
    assert caught.value.value == "backward"


def test_a_script_looks_at_its_own_passes(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(8, 8)
    profiler = FlopsProfiler(model)
    with pytest.raises(PolyaccelError) as caught:
        profiler.get_total_flops()
    assert "start_profile" in str(caught.value)
    profiler.start_profile()
    model(torch.ones(2, 8))
    profiler.stop_profile()
    model(torch.ones(2, 8))
    assert (profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_params()) == (256, 128, 72)
    assert profiler.get_total_duration() > 0
    assert profiler.get_total_flops(as_string=True) == "256 FLOPs"
    profiler.print_model_profile(profile_step=3)
    assert "flops profile of step 3" in capsys.readouterr().out
    profiler.end_profile()
    assert not profiler.started


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_profiles_the_step_that_its_config_names(stage: int, tmp_path: Path) -> None:
    """At stage 3 parameters are elsewhere between their uses, and are counted all the same."""
    table = tmp_path / "table.txt"
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": str(table)},
    }
    engine, *_ = deepspeed.initialize(model=nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)), config=config)
    assert engine.flops_profiler_enabled()
    for step in range(1, 5):
        engine.backward(engine(torch.ones(4, 30)).square().mean())
        engine.step()
        assert table.exists() == (step > 2)  # counted in step 2, timed in the pass after
    profiler = engine.flops_profiler
    assert (profiler.flops, profiler.macs, profiler.params) == (6400, 3200, 830)
    assert profiler.get_total_flops(as_string=True) == "6.4 KFLOPs"
    profiler.start_profile()
    engine(torch.ones(8, 30))
    profiler.stop_profile()
    assert profiler.get_total_flops() == 12800
    profiler.print_model_aggregated_profile()
    profiler.end_profile()
    assert profiler.flops == 6400
    engine.destroy()
    deepspeed.comm.destroy_process_group()
    head, *rows = table.read_text().splitlines()
    assert head == "flops profile of step 2, one micro-batch of rank 0"
    assert "parameters 830, MACs 3.2 K, FLOPs 6.4 K in the forward pass, 19.2 K with its backward; forward " in rows[0]
    assert any(row.split()[:4] == ["0", "Linear", "1", "620"] for row in rows)
