"""The section `pipeline`: the layers of a model over stages."""

from __future__ import annotations

from typing import Literal

from polyaccel.config.section import CountInt, PositiveInt, Section


class PipelineConfig(Section):
    """Stages, each of which holds some of the layers. Micro-batches pass them one after the other."""

    stages: PositiveInt = 1
    """Places in the pipeline, a divisor of all ranks; the same as `mesh.pipe`. A model that says itself how many it has
    must say as many, or this be left out."""
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    """polyaccel's own key: who does what when, see `polyaccel plan --pipeline`."""
    partition: str = "best"
    """Which layers a stage holds: `uniform` as many as any other, `parameters` (or `best`) as many parameters,
    `type:REGEX` as many layers of the classes whose names match."""
    activation_checkpoint_interval: CountInt = 0
    """Compute the activations of so many layers at a time again in backward; 0 keeps them."""
