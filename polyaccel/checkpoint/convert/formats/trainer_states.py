"""The optimizer and the schedule that trainers keep next to a model's files: transformers' Trainer (`optimizer.pt`,
`scheduler.pt`, `trainer_state.json`) and Accelerate's `save_state` (`optimizer.bin`, `scheduler.bin`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyaccel.checkpoint.convert.formats.model_files import OPTIMIZERS, SCHEDULES, ModelFiles
from polyaccel.checkpoint.convert.importing import Incoming, LeftOut


def with_states(incoming: Incoming, files: ModelFiles) -> Incoming:
    """`incoming` with what lies next to the model's files. What cannot be taken over is left out, as needed.

    Raises CheckpointError for a file that is not a state dict, or names a class that no state needs.
    """
    incoming = replace(incoming, left_out=[*incoming.left_out, *files.left_out()])
    optimizers = [file for file in files.other_files if OPTIMIZERS.fullmatch(file.name)]
    schedules = [file for file in files.other_files if SCHEDULES.fullmatch(file.name)]
    step = _step(files.files[0].parent / "trainer_state.json")
    if step:
        incoming = replace(incoming, counters={"global_steps": step, "micro_steps": step})
    if not optimizers and not schedules:
        return incoming
    from polyaccel.checkpoint.convert.formats.torch_files import load_tree
    from polyaccel.checkpoint.convert.formats.torch_state import optimizer_from, with_schedule

    if schedule := _only(schedules):
        incoming = with_schedule(incoming, load_tree(schedule), str(schedule))
    several = [LeftOut(each.name, "one of several") for found in (optimizers, schedules) for each in found[1:]]
    several += [LeftOut(found[0].name, "one of several", True) for found in (optimizers, schedules) if len(found) > 1]
    incoming = replace(incoming, left_out=[*incoming.left_out, *several])
    if optimizer := _only(optimizers):
        return optimizer_from(load_tree(optimizer), str(optimizer)).joined(incoming, steps=step)
    return incoming


def _only(files: Sequence[Path]) -> Path | None:
    return files[0] if len(files) == 1 else None


def _step(file: Path) -> int:
    """The steps that the Trainer counted; 0 without its file."""
    try:
        found: Any = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return 0
    step = found.get("global_step") if isinstance(found, dict) else None
    return step if isinstance(step, int) and step > 0 else 0
