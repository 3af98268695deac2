"""The section about how the engine that trains generates: `generation`."""

from __future__ import annotations

from polyaccel.config.section import Section


class GenerationConfig(Section):
    """Numbers of tokens that `engine.generate` draws. Torch only."""

    exact: bool = False
    """Compute logits whose bits do not depend on the batch, the cache of keys, the stage or the number of data ranks.
    Those of a rollout are then those of training, bit for bit. It is slower than torch's own kernels."""
