"""The section about generation from a training engine: `hybrid_engine`."""

from __future__ import annotations

from polyaccel.config.section import PositiveInt, Section


class HybridEngineConfig(Section):
    """Generation from a training engine. `engine.generate` exists without it too; torch only."""

    enabled: bool = False
    """Let the keys below count. `engine.generate` has their defaults, and no bound on tokens, while it is off."""
    max_out_tokens: PositiveInt = 512
    """Tokens of a sequence at most, prompt and new ones together. A call that may generate more is an error."""
    inference_tp_size: PositiveInt = 1
    """Tensor ranks of generation: those of training, so the value is 1 or that of `mesh.tensor`."""
    release_inference_cache: bool = False
    """Return memory that the device's allocator keeps to the device after each rollout. The cache of keys and values
    and gathered parameters are released either way."""
    pin_parameters: bool = True
    """Gather sharded parameters once for a rollout where memory allows; false gathers them unit by unit for each
    token."""
