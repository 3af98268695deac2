"""Sections about saved states and recomputed ones: `checkpoint`, `activation_checkpointing`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from polyaccel.config.section import PositiveInt, Section


def _capitalised(value: Any) -> Any:
    """DeepSpeed takes these words in any case."""
    return value.capitalize() if isinstance(value, str) else value


class CheckpointWriterConfig(Section):
    """DeepSpeed's fast checkpoint writer."""

    type: str = "FAST"
    """Which writer."""
    decoupled: bool = False
    """Write in a process of its own."""
    io_buffer_size: PositiveInt = 64 * 1024 * 1024
    """Bytes of the write buffer."""
    io_buffer_double: bool = True
    """Use two buffers."""
    show_statistics: bool = False
    """Print the speed of writing."""
    data_parallel: Literal["replica", "socket", "machine"] | None = None
    """Which ranks share the writing."""
    io_multiplier: PositiveInt = 1
    """Writers for each rank."""


class ParallelWriteConfig(Section):
    """Which ranks write layers."""

    pipeline_stage: bool = False
    """All ranks of a pipeline stage write its layers."""


class CheckpointConfig(Section):
    """Saved states."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_capitalised)] = "Warn"
    """What to do when ranks save or load under different tags."""
    load_universal: bool = False
    """Read DeepSpeed's universal checkpoint format."""
    use_node_local_storage: bool = False
    """Every host writes to its own disk."""
    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    """Which ranks write layers."""
    checkpoint_serialization: bool = True
    """Serialise as torch does; false writes raw tensors."""
    writer: CheckpointWriterConfig | None = None
    """DeepSpeed's fast writer; its presence asks for it."""


class ActivationCheckpointingConfig(Section):
    """Activations that are recomputed in backward instead of kept."""

    partition_activations: bool = False
    """Shard kept activations over the model-parallel ranks."""
    number_checkpoints: PositiveInt | None = None
    """How many checkpoints a step makes, to size the contiguous buffer."""
    contiguous_memory_optimization: bool = False
    """Keep activations in one buffer."""
    cpu_checkpointing: bool = False
    """Keep the inputs of regions under `polyaccel.checkpointing.checkpoint` in host memory until their backward."""
    synchronize_checkpoint_boundary: bool = False
    """Wait for the device at each checkpoint."""
    profile: bool = False
    """Time forward and backward of each checkpoint."""
