"""PEFT's adapters over the drop-in: trained, saved, merged, taken apart again and loaded, as in plain torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "clients"))
from client_runs import CLIENTS, TIMEOUT_S, close, result, run, same_weights, torchrun

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
    """LoRA with a whole layer trained beside it; AdaLoRA, which looks at gradients and takes ranks away."""
    kind, plain, base = plain_adapters
    run(*torchrun(), JOB, kind, str(stage), str(tmp_path), "--base", base)
    found, expected = result(tmp_path), result(plain)
    for key, values in expected.items():
        close(found[key], values)
    close(found["merged"], found["trained"])
    if kind == "lora":  # AdaLoRA leaves out what it has masked, into which the last update has written again
        close(found["loaded"], found["trained"])
    same_weights(tmp_path / "saved" / "adapter_model.safetensors", plain / "saved" / "adapter_model.safetensors")
