"""ZeRO stages as data: what every rank holds whole and what is cut over them (Rajbhandari et al. 2020, section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from polyaccel.errors import ShardingError


class Placement(Enum):
    """Where a kind of state lives along the data axis."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    SHARDED = "sharded"
    """Every rank holds its own slice."""


@dataclass(frozen=True, slots=True)
class ZeroPolicy:
    """Placement of optimizer states (master weights included), gradients and parameters.

    Raises ShardingError when gradients or parameters are sharded but the states that update them are not.
    """

    optim: Placement
    grads: Placement
    params: Placement

    def __post_init__(self) -> None:
        if self.optim is Placement.REPLICATED and Placement.SHARDED in (self.grads, self.params):
            raise ShardingError(
                f"no rank can update everything when {self.grads=!s} and {self.params=!s}",
                cure="shard the optimizer states too",
                value=(self.optim, self.grads, self.params),
            )

    @classmethod
    def of_stage(cls, stage: int) -> ZeroPolicy:
        """The policy that DeepSpeed calls ZeRO stage `stage`. Raises ShardingError outside 0..3."""
        try:
            return _STAGES[stage]
        except KeyError:
            raise ShardingError(f"ZeRO stage {stage!r} does not exist", cure="use 0, 1, 2 or 3", value=stage) from None


_STAGES = {
    0: ZeroPolicy(Placement.REPLICATED, Placement.REPLICATED, Placement.REPLICATED),
    1: ZeroPolicy(Placement.SHARDED, Placement.REPLICATED, Placement.REPLICATED),
    2: ZeroPolicy(Placement.SHARDED, Placement.SHARDED, Placement.REPLICATED),
    3: ZeroPolicy(Placement.SHARDED, Placement.SHARDED, Placement.SHARDED),
}
