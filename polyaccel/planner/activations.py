"""What a training pass keeps of a model's activations, as a forecast shows it."""

from __future__ import annotations

from dataclasses import dataclass

from polyaccel.planner.model import ModelShape


@dataclass(frozen=True, slots=True)
class ActivationNeeds:
    """Bytes of one pass on one rank: those kept for backward at the end of the forward pass, and the most at a time in
    both. `way` is what is recomputed; `is_own`: it is what the config asks for."""

    way: str
    kept_nbytes: int
    peak_nbytes: int
    is_own: bool


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """A stage of a pipeline: the blocks of its chunks, and what a rank there holds of the model. `kept` are the most
    forward passes that it keeps for their backward passes, and `peak_nbytes` the most bytes of activations at a time,
    by the schedule's table; None where the length of rows is unknown."""

    blocks: tuple[str, ...]
    model: ModelShape
    kept: int
    peak_nbytes: int | None
