"""What alarms look for, and what one rank sends the others for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmSettings:
    """Thresholds, each 0 where it is off; the section `alerts` of the config has their meaning.

    `every` optimizer steps the ranks exchange their figures, of which `window` are compared with a new one.
    """

    every: int
    window: int
    loss: float
    grad_norm: float
    straggler: float
    data: float
    memory_growth: float
    replicas: int


class DigestReport(NamedTuple):
    """A digest of the bits of a piece of a parameter before the update of `step`. `ranks` (global) hold the same."""

    step: int
    fqn: str
    start: int
    ranks: tuple[int, ...]
    digest: int


@dataclass(slots=True)
class RankFigures:
    """What a rank sends about the steps since it last did. Seconds are sums over them."""

    rank: int
    """Its global number."""
    place: int
    """The stage of a pipeline that it has."""
    losses: dict[int, float] = field(default_factory=dict)
    """By step; its own, where there is one."""
    steps: int = 0
    seconds: float = 0.0
    own_s: dict[str, float] | None = field(default_factory=dict)
    """By phase: its own work, without waiting for other ranks. None where that is not measured."""
    memory_nbytes: int | None = None
    """The least that was in use at the end of a step."""
    total_nbytes: int = 0
    """The memory that there is."""
    digests: list[DigestReport] = field(default_factory=list)

    def to_plain(self) -> list[Any]:
        """As values that ranks can send each other."""
        digests = [[*digest[:3], list(digest.ranks), digest.digest] for digest in self.digests]
        losses = [[*pair] for pair in self.losses.items()]
        return [self.rank, self.place, losses, self.steps, self.seconds, self.own_s, self.memory_nbytes,
                self.total_nbytes, digests]  # fmt: skip

    @classmethod
    def from_plain(cls, plain: list[Any]) -> RankFigures:
        """What `to_plain` gave on another rank."""
        rank, place, losses, steps, seconds, own_s, memory_nbytes, total_nbytes, digests = plain
        taken = [DigestReport(step, fqn, start, tuple(ranks), digest) for step, fqn, start, ranks, digest in digests]
        own: Mapping[str, float] | None = own_s
        return cls(rank, place, dict(losses), steps, seconds, None if own is None else {**own},
                   memory_nbytes, total_nbytes, taken)  # fmt: skip
