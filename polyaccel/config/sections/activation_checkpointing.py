"""The section about activations that are computed again: `activation_checkpointing`."""

from __future__ import annotations

from polyaccel.config.section import Listed, Nbytes, PositiveInt, Section


class ActivationCheckpointingConfig(Section):
    """Activations that are computed again in backward instead of kept. `enabled` or `memory_limit` does that for the
    blocks of any model; the other keys set how, for regions under `polyaccel.checkpointing.checkpoint` too."""

    enabled: bool = False
    """polyaccel's own: recompute the repeated blocks of the model, found by its structure; for JAX the units. The
    gradients are the same to the bit, except for what XLA rounds differently in another program."""
    memory_limit: Nbytes | None = None
    """polyaccel's own: recompute only as much as is needed to stay below these bytes of activations on a rank, for
    example "1G": what the forward pass of a micro-batch keeps for its backward, and what is recomputed at a time. The
    first micro-batch is recomputed whole and measured. Implies `enabled`. An error where it cannot be reached. Torch
    only."""
    blocks: Listed[tuple[str, ...]] = ()
    """polyaccel's own: the modules to recompute, by class or full name, in place of those that are found.
    Torch only."""
    keep: Listed[tuple[str, ...]] = ()
    """polyaccel's own: operations whose results are kept all the same: "matmul", "attention", or names like "aten.mm".
    For JAX "matmul" alone."""
    use_reentrant: bool = False
    """polyaccel's own: torch's older way, which runs a backward pass inside the backward pass. Where that would lose
    gradients (no input requires one), a block takes the other way. Torch only."""
    cpu_checkpointing: bool = False
    """Keep the inputs of regions in host memory until their backward, and fetch each one while the region after it is
    computed. On a device whose memory is the host's it changes nothing. Torch only."""
    partition_activations: bool = False
    """Cut the inputs of regions over the ranks that share a model (tensor parallelism), and gather them for the
    backward. Without these ranks it changes nothing. Torch only."""
    contiguous_memory_optimization: bool = False
    """Copy the inputs of regions into memory that is allocated once, for `number_checkpoints` regions. Torch only."""
    number_checkpoints: PositiveInt | None = None
    """The number of regions for which `contiguous_memory_optimization` allocates. Inputs of more get separate memory,
    with a warning. Torch only."""
    synchronize_checkpoint_boundary: bool = False
    """Wait for the device before and after each region and each recomputation. Torch only."""
    profile: bool = False
    """Log how long regions and their recomputations took, once a backward pass. It waits for the device. Torch
    only."""

    @property
    def recomputes_blocks(self) -> bool:
        """Whether the model's blocks are recomputed without its doing."""
        return self.enabled or self.memory_limit is not None
