"""A small training that goes on from the memory of keepers at any world size, and says when each step ended.

    torchelastic_job.py FOLDER

Each start and step is a line of FOLDER/log, by rank 0: "begins START RANKS STEP BATCH", "step STEP LOSS TIME". It ends
when there is a file FOLDER/end.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from elastic_job import Model, Numbered, batches_of, build

import polyaccel
from polyaccel.errors import CheckpointError

CONFIG: dict[str, Any] = {
    "elasticity": {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3]},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
    "checkpoint": {"in_memory": True},
}
_STEP_S = 0.1


def train(engine: Any, model: Model) -> float:
    """One step; this rank's mean loss."""
    losses = []
    for micro_batch in batches_of(engine):
        loss = engine(*micro_batch)
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
    return sum(losses) / len(losses)


def main() -> None:
    folder, has_ended = Path(sys.argv[1]), False
    torch.set_num_threads(1)
    model = build()
    engine, *_ = polyaccel.initialize(model=model, config=CONFIG, training_data=Numbered())
    try:
        engine.load_checkpoint(str(folder / "saves"))
    except CheckpointError:
        assert not (folder / "log").exists() or "step" not in (folder / "log").read_text()
    start, ranks = os.environ["POLYACCEL_RESTART_COUNT"], os.environ["WORLD_SIZE"]
    say(folder, engine, "begins", start, ranks, engine.global_steps, engine.train_batch_size())
    while not has_ended:
        time.sleep(_STEP_S)
        loss = train(engine, model)
        found = polyaccel.comm.default_communicator().all_gather_object((loss, (folder / "end").exists()))
        has_ended = any(ended for _, ended in found)
        say(folder, engine, "step", engine.global_steps, sum(loss for loss, _ in found) / len(found), time.time())
    engine.destroy()


def say(folder: Path, engine: Any, *words: object) -> None:
    if engine.communicator.rank == 0:
        with open(folder / "log", "a", encoding="ascii") as file:
            print(*words, file=file)


if __name__ == "__main__":
    main()
