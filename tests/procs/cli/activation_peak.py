"""A process that trains a model of a directory with a config.json by one config after another, and prints the bytes
that a step needs beside what is there between steps: `activation_peak.py DIRECTORY ROWS TOKENS CONFIGS`. Of ranks, as
`polyaccel run` starts them, the first prints."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import polyaccel
from polyaccel.torch.estimate.meta_shapes import model_of_directory


def status_nbytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main(directory: str, rows: str, tokens: str, configs: str) -> None:
    torch.set_num_threads(1)
    words = torch.ones(int(rows), int(tokens), dtype=torch.long)
    peaks = [peak_nbytes(directory, config, words) for config in json.loads(configs)]
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(peaks))


def peak_nbytes(directory: str, config: dict[str, Any], words: torch.Tensor) -> int:
    gc.collect()  # an engine before this one
    engine, *_ = polyaccel.initialize(model=model_of_directory(Path(directory)).train(), config=config)
    peak = 0
    for _ in range(3):  # the first steps touch buckets, and try what a limit allows
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is the present one
        before = status_nbytes("VmRSS")
        loss = engine(input_ids=words, labels=words, use_cache=False).loss
        engine.backward(loss)
        del loss
        peak = status_nbytes("VmHWM") - before
        engine.step()
    engine.destroy()
    return peak


if __name__ == "__main__":
    main(*sys.argv[1:])
