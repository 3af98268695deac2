"""TRL over the drop-in: fine-tuning, DPO, and GRPO with generation, with PEFT's LoRA and without, as in plain torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "clients"))
from client_runs import CLIENTS, TIMEOUT_S, close, result, run, same_weights, torchrun

POLICY_JOB = str(CLIENTS / "trl_policy_job.py")
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "lora"])
def plain_trl(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    folder = tmp_path_factory.mktemp("plain_trl")
    options = ["--lora"] if request.param else []
    run(str(CLIENTS / "trl_job.py"), "-1", str(folder), *options)
    return options, folder


@pytest.mark.parametrize("stage", [2, 3])
def test_trl_fine_tuning(stage: int, tmp_path: Path, plain_trl: tuple[list[str], Path]) -> None:
    """TRL's SFTTrainer, with PEFT's LoRA and without: the losses, and the files that are saved."""
    options, plain = plain_trl
    run(*torchrun(), str(CLIENTS / "trl_job.py"), str(stage), str(tmp_path), *options)
    close(result(tmp_path)["losses"], result(plain)["losses"])
    name = "adapter_model.safetensors" if options else "model.safetensors"
    same_weights(tmp_path / "saved" / name, plain / "saved" / name)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model and tokenizer that all policies start from."""
    from trl_policy_job import save_model

    folder: Path = tmp_path_factory.mktemp("policy")
    save_model(folder)
    return folder


@pytest.fixture(
    scope="module",
    params=[("dpo", False), ("dpo", True), ("grpo", False), ("grpo", True)],
    ids=["dpo", "dpo_lora", "grpo", "grpo_lora"],
)
def plain_policy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, policy: Path
) -> tuple[str, list[str], Path]:
    method, is_lora = request.param
    folder = tmp_path_factory.mktemp("plain_policy")
    options = ["--base", str(policy), *(["--lora"] if is_lora else [])]
    run(POLICY_JOB, method, "-1", str(folder), *options)
    return method, options, folder


@pytest.mark.parametrize(("stage", "gathers"), [(2, "once"), (3, "once"), (3, "by layer")])
def test_grpo_learns(stage: int, gathers: str, tmp_path: Path, policy: Path) -> None:
    """The reward rises, with texts that the unwrapped model draws on each rank."""
    options = ["--sharded"] if gathers == "by layer" else []
    run(*torchrun(), POLICY_JOB, "grpo", str(stage), str(tmp_path), "--base", str(policy), "--learns", "30", *options)
    rewards = result(tmp_path)["reward"]
    assert sum(rewards[-5:]) > 1.3 * sum(rewards[:5])


@pytest.mark.parametrize("stage", [2, 3])
def test_trl_policies(stage: int, tmp_path: Path, plain_policy: tuple[str, list[str], Path]) -> None:
    """DPO with a reference model in its own engine (or with adapters switched off), and GRPO, which generates."""
    method, options, plain = plain_policy
    sharded = ["--sharded"] if method == "grpo" and "--lora" in options else []
    run(*torchrun(), POLICY_JOB, method, str(stage), str(tmp_path), *options, *sharded)
    found, expected = result(tmp_path), result(plain)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(values), rtol=1e-5, atol=2e-6, msg=key)
    name = "adapter_model.safetensors" if "--lora" in options else "model.safetensors"
    same_weights(tmp_path / "saved" / name, plain / "saved" / name)
