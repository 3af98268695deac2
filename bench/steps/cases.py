"""What is measured: variants, model sizes, and the job that one launch of ranks does. Imports nothing but Python's own,
because every rank loads it and its memory counts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

SEQUENCE = 128
"""Tokens (bytes of text) in a sequence."""

Family = Literal["local", "ddp", "fsdp2", "polyaccel", "deepspeed"]
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to train: a library and, where it has them, its ZeRO stage.

    `is_flat`: ranks talk by gloo alone, also inside a host. `is_quantised`: parameters are gathered in 8 and gradients
    reduced in 4 bits.
    """

    name: str
    family: Family
    stage: int = 0
    is_flat: bool = False
    is_quantised: bool = False

    @property
    def communicates(self) -> bool:
        return self.family != "local"


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("local", "local"),
        Variant("ddp", "ddp"),
        Variant("fsdp2", "fsdp2"),
        *(Variant(f"pa{stage}", "polyaccel", stage) for stage in range(4)),
        *(Variant(f"ds{stage}", "deepspeed", stage) for stage in range(4)),
        Variant("pa3q", "polyaccel", 3, is_quantised=True),
        *(Variant(f"pa{stage}-flat", "polyaccel", stage, is_flat=True) for stage in range(1, 4)),
        Variant("pa3q-flat", "polyaccel", 3, is_flat=True, is_quantised=True),
    )
}
"""By name. `local` is the same compute in all ranks at once without any communication: what a step costs by itself."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the model."""

    layers: int
    width: int
    heads: int


SHAPES = {
    "tiny": Shape(layers=2, width=128, heads=4),  # 0.5 M parameters: shows that everything works, measures nothing
    "10m": Shape(layers=6, width=384, heads=6),
    "29m": Shape(layers=9, width=512, heads=8),
    "126m": Shape(layers=10, width=1024, heads=16),
    "1b": Shape(layers=20, width=2048, heads=16),  # for checkpoints: a step takes about a minute
}


@dataclass(frozen=True, slots=True)
class Case:
    """What variants are compared on."""

    size: str
    micro_batch: int
    dtype: str
    world_size: int = 2

    def __str__(self) -> str:
        return f"{self.size}, micro-batch {self.micro_batch}, {self.dtype}, {self.world_size} ranks"

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.micro_batch * SEQUENCE * self.world_size


@dataclass(frozen=True, slots=True)
class Job:
    """One launch: a variant trains `warmup` and then `steps` measured steps."""

    variant: str
    case: Case
    warmup: int
    steps: int
    round: int
    """Launches of the same round ran right after one another, so that their ratios hold."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**{**values, "case": Case(**values["case"])})


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank's process in bytes. Pages that processes share count fully in RSS and by their part in PSS."""

    base_nbytes: int
    """RSS after imports, joining the group and loading the corpus, before there is a model."""
    setup_nbytes: int
    """RSS when everything was ready to train."""
    peak_nbytes: int
    """The highest RSS during training; set-up does not count."""
    rss_nbytes: int
    """RSS after the last step."""
    pss_nbytes: int
    """PSS after the last step, while the other ranks are alive."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a job measured."""

    job: Job
    param_numel: int
    step_s: tuple[float, ...]
    """Each measured step, averaged over ranks."""
    losses: tuple[float, ...]
    """Of all steps, warm-up too, averaged over ranks."""
    phase_s: dict[str, float]
    """Seconds a measured step by phase, on rank 0."""
    cpu_s: float
    """CPU seconds a measured step and rank, all threads: steadier than the clock on a machine that others use."""
    minor_faults: float
    """Page faults a measured step and rank, the median."""
    initialise_s: float
    """From the module to the first step."""
    other_cpus: float
    """CPUs that other processes of the machine kept busy while this was measured: above 0.1, distrust the times."""
    memory: tuple[RankMemory, ...]
    """By rank."""
    estimate_nbytes: dict[str, int] | None
    """polyaccel: the formula of `zero.memory`, by purpose."""
