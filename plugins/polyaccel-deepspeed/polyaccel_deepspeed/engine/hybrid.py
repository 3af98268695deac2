"""`DeepSpeedHybridEngine`: the class of engines whose config has `hybrid_engine.enabled`."""

from __future__ import annotations

from polyaccel_deepspeed.engine.engine import DeepSpeedEngine


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """An engine that trains and generates: `generate`, `fuse_lora_weight`, `unfuse_lora_weight`, `train` and `eval`.

    Every engine of the drop-in has these. The class is there for scripts that look for it. It has no containers of
    inference, for the module itself generates.
    """
