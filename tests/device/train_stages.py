"""A job for the tests: the jobs of the simulated device's tests on the device of this rank, each setting on its own.

`single` compares the stages with each other; `double` is for two ranks, which share layers, sequences and stages of
pipelines too. `--few` takes the first and the last of each kind. Prints a line a setting; ends with 1 where one fails.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import polyaccel

SIMDEV = Path(__file__).parents[2] / "plugins" / "polyaccel-simdev" / "tests"


def main() -> int:
    """Train under every setting."""
    sys.path.insert(0, str(SIMDEV))
    settings, blocks, llama = map(import_module, ("test_training", "train", "train_transformers"))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    rank, failed = int(os.environ["RANK"]), 0
    groups: dict[str, dict[str, Any]] = {
        "fp32": settings.FP32_SETTINGS,
        "host": settings.HOST_SETTINGS,
        "early": settings.EARLY_SETTINGS,
        "bf16": settings.BF16_SETTINGS,
    }
    if "double" in sys.argv:
        groups |= {"cut": settings.CUT_SETTINGS, "shared": settings.SHARED_SETTINGS}
    if "--few" in sys.argv:
        groups = {name: dict([*members.items()][:: max(len(members) - 1, 1)]) for name, members in groups.items()}
    for group, members in groups.items():
        first: dict[str, Any] | None = None
        for name, setting in members.items():
            try:
                if group == "shared":
                    found = llama.train(setting[0], dict(setting[1]))
                else:
                    changes = dict(setting[1])
                    dropout = changes.pop("dropout", 0.0)
                    found = blocks.train(setting[0], changes, dropout, resume=setting[2])
            except Exception:
                failed += 1
                print(f"FAILED rank {rank} {group}: {name}\n{traceback.format_exc()}", flush=True)
                if int(os.environ["WORLD_SIZE"]) > 1:
                    return 1  # the ranks are no longer at the same place
                continue
            first = first or found
            pairs = zip(found["losses"], first["losses"], strict=True)
            off = max(abs(own - other) / abs(other) for own, other in pairs)
            bits = "equal" if found.get("bits") == first.get("bits") else "DIFFER"
            failed += off > 1e-6 or bits == "DIFFER"
            if rank == 0:
                print(f"{group:7} {name:28} bits {bits} losses off by {off:.1e}", flush=True)
            gc.collect()
    polyaccel.comm.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
