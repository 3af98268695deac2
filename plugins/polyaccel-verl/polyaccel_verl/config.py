"""The config of a polyaccel engine in verl."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import EngineConfig, FSDPEngineConfig


@dataclass
class PolyaccelEngineConfig(FSDPEngineConfig):
    """verl's options of batches, precision and entropy, and polyaccel's own config.

    Attributes:
        polyaccel: Config of `polyaccel.initialize`, for example `{"zero_optimization": {"stage": 3}}`. Batch sizes and
            clipping are verl's, and so are optimizer and schedule.
    """

    strategy: str = "polyaccel"
    polyaccel: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)  # FSDP's own refuses other strategies
        if self.strategy != "polyaccel":
            raise ValueError(f"strategy {self.strategy!r} of a config for polyaccel")
        unread = [name for name in ("param_offload", "optimizer_offload", "offload_policy") if getattr(self, name)]
        if unread:
            raise ValueError(f"{unread[0]}: write offload_param or offload_optimizer into polyaccel's own config")
        if self.ulysses_sequence_parallel_size > 1:
            raise ValueError("ulysses_sequence_parallel_size: one rank computes whole sequences here")
