"""transformers with a model from `from_pretrained`: loaded, resized, trained, asked, saved, resumed; and its
Seq2SeqTrainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "clients"))
from client_runs import CLIENTS, TIMEOUT_S, auto_config, close, result, run, same_weights, torchrun

JOB = str(CLIENTS / "pretrained_job.py")
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job without DeepSpeed, with the model that all jobs start from in `base`."""
    from pretrained_job import build

    folder = tmp_path_factory.mktemp("plain")
    build().save_pretrained(folder / "base")
    run(JOB, "--base", str(folder / "base"), "--out", str(folder))
    return folder


def same(ours: Path, plain: Path) -> None:
    found, expected = result(ours), result(plain)
    close(found["loaded"], expected["loaded"])
    close(found["losses"], expected["losses"])
    close([found["eval"], found["predicted"]], [expected["eval"], expected["predicted"]])
    assert found["texts"] == expected["texts"]
    same_weights(ours / "saved" / "model.safetensors", plain / "saved" / "model.safetensors")


@pytest.mark.parametrize(("stage", "checkpointing"), [(2, "reentrant"), (3, "reentrant"), (3, "not reentrant")])
def test_a_pretrained_model_trains_and_generates(stage: int, checkpointing: str, tmp_path: Path, plain: Path) -> None:
    """At stage 3 its weights are loaded by `zero.Init`; then the job resumes from its checkpoint on one rank."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(auto_config(stage)), encoding="utf-8")
    job = [JOB, "--base", str(plain / "base"), "--config", str(file), "--checkpointing", checkpointing]
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    run(*torchrun(), *job, "--out", str(whole))
    same(whole, plain)
    run(*torchrun(1), *job, "--out", str(rest), "--resume", str(whole / "run" / "checkpoint-2"))
    same(rest, plain)


@pytest.fixture(scope="module", params=["t5", "bart"])
def plain_seq2seq(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("plain_seq2seq")
    run(str(CLIENTS / "seq2seq_job.py"), request.param, "--out", str(folder))
    return request.param, folder


def test_an_encoder_and_decoder_is_scored_by_what_it_writes(tmp_path: Path, plain_seq2seq: tuple[str, Path]) -> None:
    """`predict_with_generate` under stage 3, greedily and with beams; ranks' answers end at different lengths."""
    kind, plain = plain_seq2seq
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(auto_config(3)), encoding="utf-8")
    run(*torchrun(), str(CLIENTS / "seq2seq_job.py"), kind, "--out", str(tmp_path), "--config", str(file))
    found, expected = result(tmp_path), result(plain)
    close(found["losses"], expected["losses"])
    torch.testing.assert_close(found["found"], expected["found"], rtol=1e-5, atol=0)
    assert found["greedy"] == expected["greedy"]
    assert found["beams"] == expected["beams"]
    assert len(set(map(len, expected["greedy"]))) > 1
