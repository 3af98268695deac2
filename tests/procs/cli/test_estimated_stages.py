"""What `polyaccel plan` foretells of the stages of a pipeline is what their processes need that train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from polyaccel.cli.main import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux's /proc")
JOB = Path(__file__).with_name("stage_peak.py")
ROWS, TOKENS = 2, 512
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 4000,
    "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    described = transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
    described.save_pretrained(tmp_path)
    return tmp_path


def config_of(schedule: str, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "pipeline": {"stages": 2, "schedule": schedule},
        **changes,
    }


def planned(llama: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    file = llama / "ds.json"
    file.write_text(json.dumps(config))
    code = main(["plan", str(file), str(llama), "-n", "2", "--json", *more])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-v"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_the_peak_of_every_stage_is_as_foretold(
    llama: Path, schedule: str, recomputes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(schedule, activation_checkpointing={"enabled": recomputes})
    code, plan = planned(llama, config, capsys, "--sequence-length", str(TOKENS))
    assert code == 0
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    result = llama / "peak"
    ranks = [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", str(JOB)]
    command = [*ranks, str(llama), str(ROWS), str(TOKENS), json.dumps(config), str(result)]
    job = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    measured = [int(Path(f"{result}.{rank}").read_text()) for rank in range(2)]
    foretold = [stage["activations_peak_nbytes"] for stage in plan["stages"]]
    assert measured == [pytest.approx(peak, rel=0.1) for peak in foretold]
