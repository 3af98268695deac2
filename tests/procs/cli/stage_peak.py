"""A rank that trains a stage of a model of a directory with a config.json, and writes the bytes that a step needs
beside what is there between steps to RESULT.RANK: `stage_peak.py DIRECTORY ROWS TOKENS CONFIG RESULT`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import polyaccel
from polyaccel.torch.estimate.meta_shapes import model_of_directory


def status_nbytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main(directory: str, rows: str, tokens: str, config: str, result: str) -> None:
    torch.set_num_threads(1)
    words = torch.ones(int(rows), int(tokens), dtype=torch.long)
    engine, *_ = polyaccel.initialize(model=model_of_directory(Path(directory)).train(), config=json.loads(config))
    batch = {"input_ids": words, "labels": words, "use_cache": False}
    peak = 0
    for _ in range(3):  # the first steps touch buckets
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is the present one
        before = status_nbytes("VmRSS")
        engine.train_batch(iter([batch] * engine.gradient_accumulation_steps()))
        peak = status_nbytes("VmHWM") - before
    Path(f"{result}.{os.environ['RANK']}").write_text(str(peak))
    engine.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
