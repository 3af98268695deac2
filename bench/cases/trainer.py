"""Step of transformers' Trainer with our `deepspeed` and with DeepSpeed's: the same script as users write it.

A GPT-2, a DeepSpeed config and two CPU ranks under torchrun. Ours is installed into a folder of this run, before the
packages of this environment; DeepSpeed's environment needs the same torch and transformers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from bench.runner import DEEPSPEED, ROOT, Case, Column, Found, Option, Runs, Settings, Start, deepspeed_start, ms

_SEQUENCE, _VOCABULARY = 128, 256
_LIMIT_S = 600.0


def variants(args: argparse.Namespace) -> Mapping[str, Start | str]:
    """Return both launches."""
    return {"ours": Start(launcher="torchrun"), "DeepSpeed": deepspeed_start(args)}


def settings(args: argparse.Namespace) -> list[Settings]:
    """Return a table of each type."""
    return [{**vars(args), "dtype": dtype} for dtype in args.dtype]


def columns(s: Settings) -> Mapping[str, Column]:
    """Return the columns; *speed* is DeepSpeed's median over the variant's."""

    def ratio(own: Runs, found: Found) -> str:
        other = found.get("DeepSpeed", own)
        return f"{median(other.every('seconds')) / median(own.every('seconds')):.2f}"

    def apart(own: Runs, found: Found) -> str:
        pairs = zip(own.every("losses"), next(iter(found.values())).every("losses"), strict=False)
        return f"{max(abs(a - b) / b for a, b in pairs):.1e}"

    return {"median ms": ms(), "best ms": ms(best=True), "speed": ratio, "losses apart": apart}


@contextmanager
def installed(args: argparse.Namespace) -> Iterator[Path]:
    """Install our package from the sources here into a folder."""
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        source = str(ROOT / "plugins" / "polyaccel-deepspeed")
        subprocess.run([*command, "--no-build-isolation", "--target", folder, source], check=True, timeout=_LIMIT_S)
        yield Path(folder)


def prepare(s: Settings, start: Start, site: Path) -> Start:
    """Put our package before those of this environment."""
    environ = {"HF_HUB_OFFLINE": "1"}
    if str(start.python) == sys.executable:
        environ["PYTHONPATH"] = f"{site}{os.pathsep}{ROOT}"
    return replace(start, environ=environ)


def work(variant: str, s: Settings) -> dict[str, Any]:
    """Train by the Trainer with the `deepspeed` that this Python imports; return seconds of steps, and losses."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from bench.training import random_words

    class Clock(TrainerCallback):
        """Seconds of each optimizer step, and the losses that are logged."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.losses: list[float] = []

        def on_step_begin(self, *args: Any, **named: Any) -> None:
            self._began = perf_counter()

        def on_step_end(self, *args: Any, **named: Any) -> None:
            self.seconds.append(perf_counter() - self._began)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            if logs and "loss" in logs:
                self.losses.append(logs["loss"])

    torch.manual_seed(1)
    shape = {"vocab_size": _VOCABULARY, "n_positions": _SEQUENCE, "n_embd": 512, "n_layer": s["layers"], "n_head": 8}
    config: Any = GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    steps, clock = s["warmup"] + s["steps"], Clock()
    tokens = random_words((2 * steps * s["micro_batch"], _SEQUENCE), _VOCABULARY, 7)
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=s["micro_batch"],
            bf16=s["dtype"] == "bf16",
            deepspeed=deepspeed_config(s["stage"]),
            learning_rate=3e-4,
            use_cpu=True,
            ddp_backend="gloo",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=1,
        )
        data: Any = [{"input_ids": row, "labels": row} for row in tokens]
        Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data, callbacks=[clock]).train()
    return {"seconds": clock.seconds[s["warmup"] :], "losses": clock.losses}


def deepspeed_config(stage: int) -> dict[str, Any]:
    """Return the config that users write: sizes and precision are filled in by the Trainer."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    return {
        **dict.fromkeys(sizes, "auto"),
        "optimizer": {"type": "AdamW", "params": auto},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage},
    }


_OPTIONS = {
    "deepspeed": DEEPSPEED,
    "dtype": Option(("fp32", "bf16"), "types", ("fp32", "bf16")),
    "stage": Option(2, "ZeRO stage", range(4)),
    "micro_batch": Option(1, "sequences a rank"),
    "layers": Option(9, "9 are 29 M parameters"),
    "steps": Option(10, "measured steps"),
    "warmup": Option(3, "steps before them"),
}
CASES = {
    "trainer": Case(
        "trainer", __doc__ or "", _OPTIONS, variants, columns, "Trainer, stage {stage}, {dtype}, two ranks", settings,
        around=installed, prepare=prepare,
    )
}  # fmt: skip
