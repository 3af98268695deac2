"""Runs a client's script as its user does, in separate processes, and reads what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

CLIENTS = Path(__file__).parent
LAUNCH = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
TIMEOUT_S = 280


def torchrun(ranks: int = 2) -> list[str]:
    """Python's arguments that start a script on so many ranks."""
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]


def run(*arguments: str, fails: bool = False) -> str:
    """What a job writes. Fails with it if the job does, or with `fails` if it does not."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode != 0) == fails, (done.stdout + done.stderr)[-8000:]
    return done.stdout + done.stderr


def result(folder: Path) -> dict[str, Any]:
    """What rank 0 of a job found."""
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


def close(ours: Sequence[float], theirs: Sequence[float]) -> None:
    """Assert that losses are those of plain torch."""
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=0)


def same_weights(ours: Path, theirs: Path) -> None:
    """Assert that two files of weights have the same names and, nearly, the same numbers."""
    from safetensors.torch import load_file

    one, other = load_file(ours), load_file(theirs)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.shape == other[name].shape, name
        if value.numel() == 0:  # an adapter of rank 0
            continue
        difference = (value - other[name]).abs().max().item()
        assert difference <= 2e-5 + 1e-4 * other[name].abs().max().item(), (name, difference)


def auto_config(stage: int) -> dict[str, Any]:
    """A DeepSpeed config whose every value is left to the Trainer."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto", "allgather_bucket_size": 2e8}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
        zero |= {"stage3_gather_16bit_weights_on_model_save": True, "sub_group_size": 1e9}
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return dict.fromkeys(sizes, "auto") | {
        "optimizer": {"type": "AdamW", "params": auto},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
    }
