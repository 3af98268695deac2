"""A job for the tests: trains the small model of `train.py` for six steps, and counts recordings.

Prints one JSON object on rank 0: losses, norms and a digest of the parameters, and how many updates were recorded and
played where they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import torch
from train import Model, batch

import polyaccel

STEPS = 6


def run(zero: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Train under one setting."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.5,
        **changes,
        "zero_optimization": {"reduce_bucket_size": 128, **zero},
    }
    engine, *_ = polyaccel.initialize(model=Model(0.0), config=config)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        for _ in range(engine.gradient_accumulation_steps()):
            tokens, targets = (part.to(engine.device) for part in batch(step, int(os.environ["RANK"])))
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
        found["losses"].append(loss.item())
        found["norms"].append(engine.get_global_grad_norm())
    state = engine.module_state_dict()
    bits = b"".join(state[name].cpu().view(torch.uint8).numpy().tobytes() for name in sorted(state))
    found["bits"] = hashlib.sha256(bits).hexdigest()
    optimizer = engine.zero.optimizer
    if "graphs" in changes:
        found |= {"recorded": optimizer.recorded, "played": optimizer.played}
    engine.destroy()
    return found


def main() -> None:
    """Train under each setting that the command line names."""
    found = {name: run(zero, changes) for name, (zero, changes) in json.loads(sys.argv[1]).items()}
    accelerator = polyaccel.get_accelerator()
    accelerator.synchronize()
    if polyaccel.comm.get_rank() == 0:
        print("RESULT", json.dumps({"device": accelerator.name, "runs": found}), flush=True)
    polyaccel.comm.destroy_process_group()


if __name__ == "__main__":
    main()
