"""The section `elasticity`: one global batch for many world sizes."""

from __future__ import annotations

from pydantic import field_validator, model_validator

from polyaccel.config.section import CountInt, Listed, NonNegativeFloat, PositiveInt, Section

VERSIONS = (0.1, 0.2)


class ElasticityConfig(Section):
    """How many ranks may train, and with which micro-batches, so that a step has the same samples on any of these
    numbers: `train_batch_size` and its parts follow from here, and from the ranks that there are."""

    enabled: bool = False
    """Let this section decide the batch sizes."""
    max_train_batch_size: PositiveInt | None = None
    """The most samples of an optimizer step over all ranks. Needed when the section is enabled."""
    micro_batch_sizes: Listed[tuple[PositiveInt, ...]] = (2, 4, 6)
    """The micro-batches to choose from, in samples: as memory allows."""
    min_gpus: PositiveInt = 1
    """The fewest ranks."""
    max_gpus: PositiveInt = 10000
    """The most ranks."""
    min_time: CountInt = 0
    """Minutes between two changes of the number of ranks, a wish to a scheduler. Nothing here reads it."""
    prefer_larger_batch: bool = True
    """Of global batches that equally many world sizes divide take the larger, and of micro-batches that fit; false
    takes the smaller batch, and with version 0.2 the first micro-batch of the list that fits."""
    ignore_non_elastic_batch_info: bool = False
    """Ignore batch sizes that are written next to this section, which otherwise are errors."""
    version: NonNegativeFloat = 0.2
    """The rules: 0.1 counts ranks; 0.2 counts hosts of `num_gpus_per_node` ranks each, all of which train."""
    num_gpus_per_node: PositiveInt = 1
    """Ranks of a host, for version 0.2."""
    model_parallel_size: PositiveInt = 1
    """Ranks over which one copy of the model is cut. Only 1 can be trained with."""

    @field_validator("version")
    @classmethod
    def _is_known(cls, version: float) -> float:
        if version not in VERSIONS:
            raise ValueError(f"should be {' or '.join(map(str, VERSIONS))}")
        return version

    @field_validator("micro_batch_sizes")
    @classmethod
    def _names_one(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if not sizes:
            raise ValueError("names no micro-batch")
        return sizes

    @model_validator(mode="after")
    def _agrees(self) -> ElasticityConfig:
        if not self.enabled:
            return self
        if self.max_train_batch_size is None:
            raise ValueError("needs max_train_batch_size, the most samples of a step")
        if (most := max(self.micro_batch_sizes)) > self.max_train_batch_size:
            raise ValueError(
                f"has a micro-batch of {most}, and max_train_batch_size = {self.max_train_batch_size} is smaller"
            )
        if self.min_gpus > self.max_gpus:
            raise ValueError(f"has min_gpus = {self.min_gpus} above max_gpus = {self.max_gpus}")
        if self.version == 0.2 and self.num_gpus_per_node % self.model_parallel_size:
            raise ValueError(
                f"has model_parallel_size = {self.model_parallel_size}, which does not divide "
                f"num_gpus_per_node = {self.num_gpus_per_node}"
            )
        return self
