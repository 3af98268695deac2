"""SFT by verl on two CPU ranks: the engine of polyaccel next to verl's engine for FSDP2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

JOB = Path(__file__).with_name("sft_job.py")
TIMEOUT_S = 500
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model. Where its embeddings are not tied, verl gives values to rank 0 alone."""
    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=request.param, initializer_range=0.2)).save_pretrained(
        folder
    )
    return folder


def train(backend: str, model: Path, out: Path, *options: str) -> dict[str, Any]:
    """What two ranks wrote."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(JOB), backend, str(model), str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train("fsdp2", model, tmp_path_factory.mktemp("fsdp2") / "out.json")


@pytest.mark.parametrize("stage", ["2", "3"])
def test_losses_are_those_of_fsdp(stage: str, model: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    """Norms, learning rates, evaluation and weights too, with two micro-batches a step."""
    found = train("polyaccel", model, tmp_path / "out.json", stage)
    again = found.pop("again")
    assert again[0] == again[1]
    assert found.keys() == expected.keys()
    assert found["weights"].keys() >= expected["weights"].keys() - {"lm_head.weight"}
    for name, value in found["weights"].items():
        assert value == pytest.approx(expected["weights"][name], rel=1e-5), name
    for key in ("losses", "norms", "rates", "evaluated"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key
