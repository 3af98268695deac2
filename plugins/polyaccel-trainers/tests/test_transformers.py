"""Transformers' Trainer over polyaccel on two gloo ranks, next to theirs in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from polyaccel_trainers.transformers import plugin_of
from safetensors.torch import load_file
from test_accelerate import run
from transformers import DistributedConfig

from polyaccel.errors import PolyaccelError

JOB = Path(__file__).parent / "transformers_job.py"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("plain")
    subprocess.run([sys.executable, str(JOB), "plain", "1", str(folder)], check=True, timeout=280)
    return json.loads((folder / "result.json").read_text()), weights(folder)


@pytest.mark.parametrize(("stage", "accumulation"), [("0", 1), ("2", 2), ("3", 1)])
def test_losses_and_weights_are_those_of_one_process(stage: str, accumulation: int, plain: Any, tmp_path: Path) -> None:
    """Clipping, a schedule, a resumed run, and the weights that the Trainer saves. Stage 3 is a DistributedConfig."""
    run(JOB, stage, str(accumulation), str(tmp_path))
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["losses"] == pytest.approx(plain[0]["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(plain[0]["norms"], rel=1e-5)
    assert found["again"] == found["losses"][:2] + found["losses"][2:]
    for name, one in weights(tmp_path).items():
        torch.testing.assert_close(one, plain[1][name], rtol=1e-4, atol=1e-5)


def test_a_distributed_config_becomes_a_plugin() -> None:
    found = plugin_of(DistributedConfig(fsdp_size=4, fsdp_cpu_offload=True, fsdp_mixed_precision=True)).config
    assert found["zero_optimization"]["stage"] == 3
    assert found["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert found["bf16"] == {"enabled": True}
    assert plugin_of(DistributedConfig(fsdp_size=1)).config == {"zero_optimization": {"stage": 0}}
    for wrong in ({"tp_size": 2}, {"fsdp_size": 2, "dp_replicate_size": 2}, {"pp_size": 2}):
        with pytest.raises(PolyaccelError) as caught:
            plugin_of(DistributedConfig(**wrong))
        assert caught.value.value == 2
