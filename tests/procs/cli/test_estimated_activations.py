"""What `polyaccel plan --sequence-length` foretells of activations is what a process needs that trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from polyaccel.cli.main import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux's /proc")
JOB = Path(__file__).with_name("activation_peak.py")
ROWS, TOKENS = 2, 512
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, Any] = {
    "Llama": {
        "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 4000,
        "num_attention_heads": 4, **ENDS,
    },
    "GPT2": {"n_embd": 192, "n_layer": 3, "n_head": 4, "vocab_size": 3000, "n_positions": TOKENS, **ENDS},
}  # fmt: skip
ARCHITECTURES = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel"}
CONFIG = {"train_micro_batch_size_per_gpu": ROWS, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
RECOMPUTED = {"activation_checkpointing": {"enabled": True}}


@pytest.fixture(params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    described = getattr(transformers, f"{request.param}Config")(**MODELS[request.param])
    described.architectures = [ARCHITECTURES[request.param]]
    described.save_pretrained(tmp_path)
    return tmp_path


def planned(
    directory: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str], *more: str, ranks: int = 1
) -> Any:
    file = directory / "ds.json"
    file.write_text(json.dumps(config))
    code = main(["plan", str(file), str(directory), "-n", str(ranks), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def foretold(directory: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    code, plan = planned(directory, config, capsys, "--sequence-length", str(TOKENS))
    assert code == 0
    found: list[dict[str, Any]] = plan["activations"]
    assert sum(each["is_own"] for each in found) == 1
    return found


def measured_peaks(directory: Path, *configs: dict[str, Any], ranks: int = 1) -> list[int]:
    """Of the first of `ranks` processes, in which freed memory goes back to the system at once."""
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "HF_HUB_OFFLINE": "1"}
    start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "polyaccel", "run", "--nproc", str(ranks)]
    command = [*start, str(JOB), str(directory), str(ROWS), str(TOKENS), json.dumps(configs)]
    job = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    found = re.findall(r"\[[\d, ]+\]$", job.stdout, re.MULTILINE)
    peaks: list[int] = json.loads(found[-1])
    return peaks


def test_the_peak_of_a_step_is_as_foretold(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = [CONFIG, CONFIG | RECOMPUTED]
    wanted = []
    for config in configs:
        needs = foretold(directory, config, capsys)
        assert [each["way"] for each in needs] == ["kept", "blocks recomputed"]
        assert needs[1]["kept_nbytes"] < needs[0]["kept_nbytes"] / 2
        wanted += [each["peak_nbytes"] for each in needs if each["is_own"]]
    assert wanted[1] < wanted[0]
    assert measured_peaks(directory, *configs) == [pytest.approx(peak, rel=0.1) for peak in wanted]


def test_the_peak_where_ranks_share_a_model_is_as_foretold(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks share layers, the loss in tiles; two others share sequences."""
    configs = [
        CONFIG | {"tensor_parallel": {"autotp_size": 2}, "tiled_compute": {"enabled": True, "loss_tokens": 64}},
        CONFIG | {"sequence_parallel_size": 2},
    ]
    wanted = []
    for config in configs:
        code, plan = planned(llama, config, capsys, "--sequence-length", str(TOKENS), ranks=2)
        assert code == 0
        wanted += [each["peak_nbytes"] for each in plan["activations"] if each["is_own"]]
    assert measured_peaks(llama, *configs, ranks=2) == [pytest.approx(peak, rel=0.1) for peak in wanted]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    described = transformers.LlamaConfig(
        **MODELS["Llama"] | {"num_hidden_layers": 2}, architectures=["LlamaForCausalLM"]
    )
    described.save_pretrained(tmp_path)
    return tmp_path


def test_what_the_config_asks_for_is_foretold_too(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit between keeping and recomputing, half the bytes in 16 bits, tiles that make no whole logits."""
    kept, recomputed = foretold(llama, CONFIG, capsys)
    limit = (kept["kept_nbytes"] + recomputed["kept_nbytes"]) // 2
    limited = {"activation_checkpointing": {"enabled": True, "memory_limit": limit}}
    *_, own = foretold(llama, CONFIG | limited, capsys)
    assert own["way"] == "as in the config"
    assert recomputed["kept_nbytes"] < own["kept_nbytes"] <= limit
    half, _ = foretold(llama, CONFIG | {"bf16": {"enabled": True}}, capsys)
    assert 0.4 * kept["kept_nbytes"] < half["kept_nbytes"] < 0.75 * kept["kept_nbytes"]
    mixed, _ = foretold(llama, CONFIG | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, capsys)
    assert half["kept_nbytes"] < mixed["kept_nbytes"] < kept["kept_nbytes"]
    tiled, _ = foretold(llama, CONFIG | {"tiled_compute": {"enabled": True, "loss_tokens": 64}}, capsys)
    logits = ROWS * TOKENS * MODELS["Llama"]["vocab_size"] * 4
    assert tiled["peak_nbytes"] < kept["peak_nbytes"] - logits


def test_activations_count_for_what_fits(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kept, _), more = foretold(llama, CONFIG, capsys), ("--sequence-length", str(TOKENS), "--batch", str(2 * ROWS))
    code, plan = planned(llama, CONFIG, capsys, *more, "--limit-device", str(kept["peak_nbytes"]))
    assert code == 1
    assert plan["activations"][0]["kept_nbytes"] == pytest.approx(2 * kept["kept_nbytes"], rel=0.05)
    assert planned(llama, CONFIG, capsys, "--limit-device", str(kept["peak_nbytes"]))[0] == 0
    assert main(["plan", str(llama / "ds.json"), str(llama), "-n", "1", *more]) == 0
    said = capsys.readouterr().out
    assert "kept*" in said
    assert "blocks recomputed" in said


@pytest.mark.parametrize(
    ("model", "config", "more", "said"),
    [
        ("1B", CONFIG, ["--sequence-length", "8"], "it is not a directory with a config.json"),
        ("", CONFIG, ["--batch", "8"], "the length of its rows is not set"),
    ],
    ids=["a-number", "no-length"],
)
def test_what_cannot_be_foretold_is_said(
    llama: Path, model: str, config: dict[str, Any], more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = llama / "ds.json"
    file.write_text(json.dumps(config))
    assert main(["plan", str(file), model or str(llama), "-n", "2", *more]) == 1
    assert said in capsys.readouterr().err


def test_a_model_without_a_loss_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = transformers.LlamaConfig(**MODELS["Llama"], architectures=["LlamaModel"])
    described.save_pretrained(tmp_path)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIG))
    assert main(["plan", str(file), str(tmp_path), "-n", "1", "--sequence-length", "8"]) == 1
    assert "a LlamaModel cannot be estimated: it does not take input_ids and labels" in capsys.readouterr().err
