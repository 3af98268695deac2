"""A training whose disk freezes (fsfreeze) before a save, or between its start and its write. Prints what it saw."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch

import polyaccel
from polyaccel.checkpoint import list_checkpoints
from polyaccel.checkpoint.saver import Saver
from polyaccel.errors import CheckpointError


def freeze(folder: str) -> None:
    subprocess.run(["fsfreeze", "--freeze", folder], check=True)


def main(folder: str, moment: str, on_failure: str) -> None:
    logging.getLogger("polyaccel").setLevel(logging.ERROR)
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "checkpoint": {"on_failure": on_failure},
    }
    engine, *_ = polyaccel.initialize(model=torch.nn.Linear(4, 1), config=config)

    def step() -> None:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()

    def limit(seconds: float) -> None:
        engine._saver.policy = replace(engine._saver.policy, limit_s=seconds)

    raised: list[str] = []

    def tried(action: Any) -> None:
        try:
            action()
        except CheckpointError:
            raised.append(moment)

    step()
    engine.save_checkpoint(folder, tag="one")
    engine.wait_for_checkpoint()
    limit(1.0)
    if moment == "before the save":
        freeze(folder)
        tried(lambda: engine.save_checkpoint(folder, tag="lost"))
    else:
        filled = Saver._filled

        def frozen(self: Saver, part: Any) -> Any:
            freeze(folder)
            return filled(self, part)

        Saver._filled = frozen  # type: ignore[method-assign]
        engine._saver.policy = replace(engine._saver.policy, limit_s=600.0)  # of what comes before the write
        engine.save_checkpoint(folder, tag="lost")
        engine._saver._under_way.pending.limit_s = 1.0
        Saver._filled = filled  # type: ignore[method-assign]
        tried(lambda: engine._saver._wait(raises=on_failure == "raise"))
    step()
    subprocess.run(["fsfreeze", "--unfreeze", folder], check=True)
    limit(600.0)
    engine.save_checkpoint(folder, tag="kept")
    engine.wait_for_checkpoint()
    engine.destroy()
    good = sorted(status.tag for status in list_checkpoints(folder) if status.is_good)
    print(json.dumps({"raised": len(raised), "good": good}))


main(*sys.argv[1:])
