"""A job for the tests: counts under many settings how often a step makes the host wait for this rank's device.

Prints one JSON object on rank 0: for each setting the waits of one step as {"what, place": count}, and the bytes by
which memory in use and its peak grow after the third step.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from polyaccel_simdev.waits import recorded_waits
from train_transformers import LENGTH, build

import polyaccel

STEPS, SETTLED = 6, 3


def batches(step: int, micro_batches: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Micro-batches that are on the device already, as a loader of a user leaves them."""
    draws = torch.Generator().manual_seed(step)
    for _ in range(micro_batches):
        tokens = torch.randint(3, 61, (2, LENGTH), generator=draws).to(device)
        yield {"input_ids": tokens, "labels": tokens, "use_cache": False}


def count(zero: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the waits of the last step, and the growth of memory after the third."""
    micro_batches = changes.get("gradient_accumulation_steps", 1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **{name: value for name, value in changes.items() if name != "has_experts"},
        "zero_optimization": {"reduce_bucket_size": 3000, **zero},
    }
    model = build(has_experts=changes.get("has_experts", False))
    engine, *_ = polyaccel.initialize(model=model, config=config)
    accelerator = polyaccel.get_accelerator()
    held, peaks, found = [], [], Counter[str]()
    for step in range(STEPS):
        data = list(batches(step, micro_batches, engine.device))
        accelerator.reset_peak_memory()
        with recorded_waits() as waits:
            if "pipeline" in changes:
                engine.train_batch(iter(data))
            else:
                for batch in data:
                    engine.backward(engine(**batch).loss)
                    engine.step()
        found = Counter(f"{wait.what}, {wait.place}" for wait in waits)
        stats = accelerator.memory_stats()
        held.append(stats.allocated_nbytes)
        peaks.append(stats.peak_nbytes)
    engine.destroy()
    growth = max(max(values[SETTLED:]) - values[SETTLED - 1] for values in (held, peaks))
    return {"waits": found, "growth": growth}


def main() -> None:
    """Count under each setting that the command line names."""
    found = {name: count(zero, changes) for name, (zero, changes) in json.loads(sys.argv[1]).items()}
    accelerator = polyaccel.get_accelerator()
    accelerator.synchronize()
    if polyaccel.comm.get_rank() == 0:
        print("RESULT", json.dumps({"device": accelerator.name, "runs": found}), flush=True)
    polyaccel.comm.destroy_process_group()


if __name__ == "__main__":
    main()
