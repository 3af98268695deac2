"""Accelerate's own packaged test scripts over the drop-in: they assert what they are about themselves.

Not among them: `test_peak_memory_usage`, which reads the memory gauge of a GPU and has none to read on a CPU;
`test_zero3_integration`, which opens torch's group by NCCL; `test_ds_alst_ulysses_sp`, which is sequence parallelism;
`test_ddp_comm_hook`, `test_merge_weights`, `test_pippy` and `test_notebook`, which are about other ways to distribute.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "clients"))
from client_runs import CLIENTS, LAUNCH, TIMEOUT_S, run

JOB = str(CLIENTS / "packaged_job.py")
GENERAL_JOB = str(CLIENTS / "general_job.py")
FLAGS = ["--dynamo_backend", "no", "--use_deepspeed", "--gradient_accumulation_steps", "1"]
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the model that the scripts start from, and of the configs that one of them reads."""
    from packaged_job import save_model

    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    for stage in (2, 3):
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        }
        (folder / f"zero{stage}.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def config_of_autos(stage: int) -> dict[str, Any]:
    """As Accelerate's documentation has it: optimizer and schedule are the config's."""
    rates = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    adam = {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True}
    return {
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupLR", "params": rates},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu"},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": "auto",
        },
        "gradient_accumulation_steps": 1,
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }


def launched(stage: int, file: Path | None) -> list[str]:
    """What `accelerate launch` is given: flags, or a config file of DeepSpeed's."""
    if file is None:
        return [*LAUNCH, *FLAGS, "--zero_stage", str(stage), "--zero3_save_16bit_model", "true"]
    file.write_text(json.dumps(config_of_autos(stage)), encoding="utf-8")
    whole = LAUNCH[: LAUNCH.index("--mixed_precision")]
    return [*whole, *FLAGS[:3], "--deepspeed_config_file", str(file), "--zero3_init_flag", "true"]


@pytest.mark.parametrize(("stage", "is_file"), [(2, False), (3, False), (2, True), (3, True)])
def test_performance(stage: int, is_file: bool, model: str, tmp_path: Path) -> None:
    """Fine-tuning; the script checks the learning rates and that the model was saved."""
    launch = launched(stage, tmp_path / "ds_config.json" if is_file else None)
    job = [JOB, "external_deps.test_performance", model, "--model_name_or_path", model, "--output_dir", str(tmp_path)]
    run(*launch, *job)
    found = json.loads((tmp_path / "all_results.json").read_text(encoding="utf-8"))
    assert sorted(found) == ["epoch-0", "epoch-1", "epoch-2"]


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpointing(stage: int, model: str, tmp_path: Path) -> None:
    """An epoch, then another job from its state; the script checks accuracy, learning rates and epoch."""
    job = [JOB, "external_deps.test_checkpointing", model, "--model_name_or_path", model, "--output_dir", str(tmp_path)]
    run(*launched(stage, None), *job, "--partial_train_epoch", "1")
    said = run(*launched(stage, None), *job, "--resume_from_checkpoint", str(tmp_path / "epoch_0"))
    assert "resumed checkpoint performance" in said


def test_two_models_with_two_plugins(model: str) -> None:
    """Stages 2 and 3 in one job, first to train and to infer, then to train both; the script checks that both learn."""
    launch = [argument.replace("no", "bf16") if argument == "no" else argument for argument in LAUNCH]
    job = [JOB, "external_deps.test_ds_multiple_model", model, "--model_name_or_path", model]
    said = run(*launch, *FLAGS, "--zero_stage", "2", *job)
    assert said.count("epoch 2:") == 2


@pytest.mark.parametrize(
    ("script", "stage", "says"),
    [
        ("test_ops", 2, {}),
        ("test_script", 2, {"Training yielded the same results": 4}),
        ("test_script", 3, {"Training yielded the same results": 4}),
        ("test_sync", 0, {"accumulated, ": 8}),
        ("test_sync", 2, {"accumulated, ": 8}),
        ("test_sync", 3, {"accumulated, ": 8}),
        ("test_distributed_data_loop", 2, {"Test DataLoader with ": 4}),
        ("test_distributed_data_loop", 3, {"Test DataLoader with ": 4}),
    ],
)
def test_general_scripts(script: str, stage: int, says: dict[str, int], tmp_path: Path) -> None:
    """Those that Accelerate runs for every way of distributing; `general_job.py` lists what it changes in them."""
    file = tmp_path / "ds_config.json"
    config = {
        "train_micro_batch_size_per_gpu": 4 if script == "test_distributed_data_loop" else "auto",
        "gradient_accumulation_steps": 2 if script == "test_sync" else 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    file.write_text(json.dumps(config), encoding="utf-8")
    whole = LAUNCH[: LAUNCH.index("--mixed_precision")]
    said = run(*whole, *FLAGS[:3], "--deepspeed_config_file", str(file), GENERAL_JOB, script)
    assert {text: said.count(text) for text in says} == says
    assert said.count(f"whole: {script}") == 2
