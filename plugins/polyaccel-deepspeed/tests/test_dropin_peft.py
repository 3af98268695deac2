"""PEFT's adapters over the drop-in: trained, saved, merged, taken apart again and loaded, as in plain torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "clients"))
from client_runs import CLIENTS, TIMEOUT_S, auto_config, close, result, run, same_weights, torchrun

JOB = str(CLIENTS / "peft_job.py")
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


@pytest.fixture(scope="module", params=["lora", "adalora"])
def plain_adapters(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, str]:
    """The kind, the folder of the job without DeepSpeed, and that of the model that jobs start from."""
    from trl_policy_job import save_model

    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("plain_adapters")
    save_model(base)
    run(JOB, request.param, "-1", str(folder), "--base", str(base))
    return request.param, folder, str(base)


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters(stage: int, tmp_path: Path, plain_adapters: tuple[str, Path, str]) -> None:
    """LoRA with a whole layer trained as well; AdaLoRA, which looks at gradients and takes ranks away."""
    kind, plain, base = plain_adapters
    run(*torchrun(), JOB, kind, str(stage), str(tmp_path), "--base", base)
    found, expected = result(tmp_path), result(plain)
    for key, values in expected.items():
        close(found[key], values)
    close(found["merged"], found["trained"])
    if kind == "lora":  # AdaLoRA leaves out what it has masked, into which the last update has written again
        close(found["loaded"], found["trained"])
    same_weights(tmp_path / "saved" / "adapter_model.safetensors", plain / "saved" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def plain_trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Trainer's job without DeepSpeed, with the model that jobs start from in `base`."""
    from trl_policy_job import save_model

    folder = tmp_path_factory.mktemp("plain_trainer")
    save_model(folder / "base")
    run(str(CLIENTS / "adalora_job.py"), str(folder), "--base", str(folder / "base"))
    return folder


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainers_callback_allocates_ranks(stage: int, tmp_path: Path, plain_trainer: Path) -> None:
    """transformers' Trainer with AdaLoRA, whose `update_and_allocate` is called right before the engine's step."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(auto_config(stage)), encoding="utf-8")
    job = [str(CLIENTS / "adalora_job.py"), str(tmp_path), "--base", str(plain_trainer / "base")]
    run(*torchrun(), *job, "--config", str(file))
    found, expected = result(tmp_path), result(plain_trainer)
    close(found["losses"], expected["losses"])
    assert found["ranks"] == expected["ranks"]
    assert len(set(expected["ranks"].values())) > 1
    same_weights(*(folder / "saved" / "adapter_model.safetensors" for folder in (tmp_path, plain_trainer)))
