"""The trainers that people use with DeepSpeed, over the drop-in: scripts of theirs, unmodified, on two CPU ranks.

`make test-dropin` runs them in its own environment, where the drop-in is installed under the name `deepspeed`. Each job
is compared with the same one in plain torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "clients"))
from client_runs import CLIENTS, LAUNCH, TIMEOUT_S, auto_config, close, result, run, torchrun

pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


@pytest.mark.parametrize(
    ("stage", "accumulation", "offload"), [(0, 2, "none"), (1, 2, "cpu"), (2, 1, "none"), (2, 2, "none"), (3, 2, "cpu")]
)
def test_accelerate(stage: int, accumulation: int, offload: str, tmp_path: Path) -> None:
    """`accelerate launch`: accumulation, clipping, a schedule, `save_state` and `load_state`, `get_state_dict`."""
    from accelerate_job import build, reference

    said = run(
        *LAUNCH,
        "--dynamo_backend", "no", "--use_deepspeed",
        str(CLIENTS / "accelerate_job.py"), "--stage", str(stage), "--accumulation", str(accumulation),
        "--offload", offload, "--out", str(tmp_path),
    )  # fmt: skip
    assert "steps_per_print = Infinity was dropped" in said
    found = result(tmp_path)
    close(found["losses"], reference(accumulation))
    assert found["shapes"] == {name: list(value.shape) for name, value in build().state_dict().items()}


def test_the_example_of_the_trainer_trains(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "examples" / "hf_finetune" / "trainer.py"
    assert "'train_loss'" in run(*torchrun(), str(script), "--steps", "2", "--out", str(tmp_path))


def test_ranks_that_accelerate_does_not_count_are_an_error(tmp_path: Path) -> None:
    """Without `use_cpu` accelerate gives each rank on a CPU all samples."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}))
    job = [*torchrun(), str(CLIENTS / "trainer_job.py"), "--config", str(file), "--out", str(tmp_path), "--uncounted"]
    assert "PolyaccelError: accelerate counts 1 ranks" in run(*job, fails=True)


@pytest.fixture(scope="module", params=["a GPT-2 learns sentences", "a BERT classifies"])
def task(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any]]:
    """The job's arguments for what is learned, and what plain torch finds."""
    options = ["--classify"] if "classifies" in request.param else []
    folder = tmp_path_factory.mktemp("plain")
    run(str(CLIENTS / "trainer_job.py"), *options, "--out", str(folder), "--plain")
    return options, result(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_transformers_trainer(stage: int, tmp_path: Path, task: tuple[list[str], dict[str, Any]]) -> None:
    """A config of "auto"s: training, evaluating, predicting, saving, and resuming from a checkpoint in other
    processes."""
    options, plain = task
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(auto_config(stage)), encoding="utf-8")
    job = [*torchrun(), str(CLIENTS / "trainer_job.py"), *options, "--config", str(file)]
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    run(*job, "--out", str(whole))
    run(*job, "--out", str(rest), "--resume", str(whole / "run" / "checkpoint-3"))
    for found in (result(whole), result(rest)):
        close(found["losses"], plain["losses"])
        torch.testing.assert_close(found["found"], plain["found"], rtol=1e-5, atol=1e-6)
