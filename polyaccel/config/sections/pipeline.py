"""The section `pipeline`: the layers of a model over stages."""

from __future__ import annotations

from pydantic import field_validator

from polyaccel.config.section import CountInt, PositiveInt, Section
from polyaccel.pipeline.schedules import SCHEDULES
from polyaccel.pipeline.select import is_file


class PipelineConfig(Section):
    """Stages, each of which holds some of the layers. Micro-batches pass them one after the other."""

    stages: PositiveInt = 1
    """DeepSpeed's spelling of `mesh.pipe`."""
    schedule: str = "1f1b"
    """polyaccel's own key: who does what when, see `polyaccel plan --pipeline`: a published schedule (`gpipe`, `1f1b`,
    `interleaved`, `zb-h1`, `zb-v`, `dualpipe-v`) or the path of a CSV file. Where it is left out, a `PipelineModule`
    that was made for a schedule is run by that one."""
    chunks: CountInt = 0
    """polyaccel's own key: how many chunks of the model each stage has; 0 for as many as the schedule needs, two of an
    interleaved one."""
    partition: str = "best"
    """Which layers a chunk has: `uniform` as many as any other, `parameters` (or `best`) as many parameters,
    `type:REGEX` as many layers of the classes whose names match, `measured` layers that take as long in a trial step of
    rank 0, on the model's `trial_inputs`."""
    activation_checkpoint_interval: CountInt = 0
    """Compute the activations of so many layers at a time again in backward; 0 keeps them."""

    @field_validator("schedule")
    @classmethod
    def _is_known(cls, schedule: str) -> str:
        if schedule == "inference" or (schedule not in SCHEDULES and not is_file(schedule)):
            names = ", ".join(name for name in SCHEDULES if name != "inference")
            raise ValueError(f"should be one of {names}, or the path of a CSV file of a table")
        return schedule
