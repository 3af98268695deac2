"""The decisions of a config about a step, as frozen values: ZeRO stages, types, reductions, gathers, the update.

Stages are rows of a table of placements: each kind of state is held whole by every rank or cut over the ranks
(Rajbhandari et al. 2020, section 5).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from polyaccel.core.types import DType, ReduceOp
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
                hint="shard the optimizer states too",
                value=(self.optim, self.grads, self.params),
            )

    @classmethod
    def of_stage(cls, stage: int) -> ZeroPolicy:
        """The policy that DeepSpeed calls ZeRO stage `stage`. Raises ShardingError outside 0..3."""
        try:
            return _STAGES[stage]
        except KeyError:
            raise ShardingError(f"ZeRO stage {stage!r} does not exist", hint="use 0, 1, 2 or 3", value=stage) from None

    def reduces_pass(self, *, is_last: bool) -> bool:
        """Whether a backward pass reduces its gradients, unless that is off: each one does where gradients are sharded,
        else the last of an accumulation."""
        return is_last or self.grads is Placement.SHARDED


_STAGES = {
    0: ZeroPolicy(Placement.REPLICATED, Placement.REPLICATED, Placement.REPLICATED),
    1: ZeroPolicy(Placement.SHARDED, Placement.REPLICATED, Placement.REPLICATED),
    2: ZeroPolicy(Placement.SHARDED, Placement.SHARDED, Placement.REPLICATED),
    3: ZeroPolicy(Placement.SHARDED, Placement.SHARDED, Placement.SHARDED),
}


@dataclass(frozen=True, slots=True)
class Precision:
    """Element types of master weights, optimizer states and gradients; parameters have the types of their buckets.

    `master` is the type of master weights (never narrower than the parameter), `states` that of optimizer states; those
    of weights in float64 are not in float32.
    Gradients travel in `reduce` and rest until the update in `accumulate`. `accumulates`: a step has several
    micro-batches.
    """

    master: DType = DType.FLOAT32
    states: DType = DType.FLOAT32
    reduce: DType | None = None
    """None: the parameter's own type."""
    accumulate: DType | None = None
    """None: the type that travels, or float32 where that has 16 bits and the step `accumulates`."""
    accumulates: bool = False
    keeps_16_bits: bool = False
    """Gradients of 16 bits add up in 16 bits."""

    def master_of(self, param: DType) -> DType:
        """The type in which a parameter of type `param` is updated."""
        return param if param.is_floating and param.itemsize >= self.master.itemsize else self.master

    def states_of(self, param: DType) -> DType:
        """The type of the optimizer states of a parameter of type `param`."""
        is_wide = self.master_of(param) is DType.FLOAT64 and self.states is DType.FLOAT32
        return DType.FLOAT64 if is_wide else self.states

    def reduce_of(self, param: DType) -> DType:
        """The type in which gradients of a parameter of type `param` travel."""
        return self.reduce or param

    def gradient_of(self, param: DType) -> DType:
        """The type in which gradients of a parameter of type `param` wait for the update."""
        travels = self.reduce_of(param)
        widens = self.accumulates and not self.keeps_16_bits and travels.itemsize < 4
        return self.accumulate or (DType.FLOAT32 if widens else travels)

    def adds_in_16_bits(self, params: Collection[DType]) -> bool:
        """Whether gradients of several micro-batches would add up in 16 bits without a word in the config for it."""
        is_said = self.accumulate is not None or self.keeps_16_bits
        return not is_said and any(self.gradient_of(param).itemsize < 4 for param in params)


WEIGHTS_EMA = "weights_ema"
"""The state that is the moving average of weights, by the name that checkpoints have for it."""
OUTER_WEIGHTS, OUTER_MOMENTUM = "outer_weights", "outer_momentum"
"""The states of DiLoCo's outer optimizer: the weights that replica groups share, and the momentum."""
OUTER_GRADIENT, OUTER_ERROR = "outer_gradient", "outer_error"
"""What is on its way between replica groups, and what rounding has left out of it."""
ENGINE_STATES = frozenset((WEIGHTS_EMA, OUTER_WEIGHTS, OUTER_MOMENTUM, OUTER_GRADIENT, OUTER_ERROR))
"""States that the engine keeps with those of the optimizer, which does not see them."""
COPIES_OF_WEIGHTS = frozenset((WEIGHTS_EMA, OUTER_WEIGHTS))
"""Those that begin at the weights; the others begin at zero."""
DEFAULT_PRECISION = Precision()
"""Master weights and states in float32, gradients in the type of their parameters."""


@dataclass(frozen=True, slots=True)
class ReductionPolicy:
    """How gradients are combined over ranks.

    `average` divides by the number of ranks; `prescale` does so before adding, `predivide_factor` does a part of it
    before and the rest after. `overlap` launches reductions while the backward pass still runs. At most `max_in_flight`
    full buffers are under way at once where gradients are sharded or travel in another type than they rest in.
    """

    average: bool = True
    prescale: bool = False
    predivide_factor: float = 1.0
    overlap: bool = True
    max_in_flight: int = 3

    def __post_init__(self) -> None:
        if self.predivide_factor <= 0.0:
            raise ShardingError(
                f"predivide_factor is {self.predivide_factor}",
                hint="use a positive number",
                value=self.predivide_factor,
            )
        if self.max_in_flight < 1:
            raise ShardingError(
                f"max_in_flight is {self.max_in_flight}", hint="use 1 or more", value=self.max_in_flight
            )

    @property
    def most_in_flight(self) -> int:
        """Full buffers that are under way at once: one where reductions do not overlap the backward pass."""
        return self.max_in_flight if self.overlap else 1

    def scaling(self, ranks: int) -> tuple[float, float, ReduceOp]:
        """Factors before and after the collective over `ranks`, and its operation."""
        if not self.average:
            return 1.0, 1.0, ReduceOp.SUM
        if self.prescale:
            return 1.0 / ranks, 1.0, ReduceOp.SUM
        factor = self.predivide_factor
        if factor != 1.0:
            return 1.0 / factor, factor / ranks, ReduceOp.SUM
        return 1.0, 1.0, ReduceOp.AVG


@dataclass(frozen=True, slots=True)
class GatherPolicy:
    """Bounds on gathered parameters, in elements.

    `max_live_numel`: gathered at any time, as long as what is held at once allows it. `prefetch_numel`: gathered ahead
    of their use. `max_reuse_numel`: an idle bucket whose next use comes within so many elements is kept.
    `warn_of_deviations`: warn in every step whose order of uses was not that of the step before, instead of once.
    `is_fixed`: all ranks use the same in the same order, in every step.
    """

    max_live_numel: int = 1_000_000_000
    prefetch_numel: int = 50_000_000
    max_reuse_numel: int = 1_000_000_000
    warn_of_deviations: bool = False
    is_fixed: bool = False


Bits = Literal[4, 8]
BLOCK_NUMEL = 256
"""Elements of quantised traffic that share a scale."""
_SCALE_NBYTES = 4


@dataclass(frozen=True, slots=True)
class FeedbackPolicy:
    """Errors of quantised gradients, added to the next ones (LoCo): `beta` is what is kept of an error in a reduction,
    and after `reset_every` reductions of a bucket they begin at zero."""

    beta: float
    reset_every: int


@dataclass(frozen=True, slots=True)
class TrafficPolicy:
    """How sharded parameters and gradients travel between ranks (ZeRO++, Wang et al. 2023).

    Bits an element of parameters that are gathered for a pass, trained or frozen, and of gradients; None: their own
    types. With `near_ranks` above 1, that many neighbouring ranks keep a second copy of what was gathered first in a
    step among them, and gather it again from each other.
    """

    trained_bits: Bits | None = None
    frozen_bits: Bits | None = None
    gradient_bits: Bits | None = None
    near_ranks: int = 1
    feedback: FeedbackPolicy | None = None
    """How what the codes of gradients leave out is carried on; None: it is lost."""

    def gathered_bits(self, *, trainable: bool) -> Bits | None:
        """Bits an element of a bucket that is gathered for a pass."""
        return self.trained_bits if trainable else self.frozen_bits


UNQUANTIZED = TrafficPolicy()
"""Everything travels in its own type."""


def part_nbytes(numel: int, dtype: DType, bits: Bits | None) -> int:
    """Bytes of one rank's part of a bucket on its way, scales included."""
    if bits is None:
        return numel * dtype.itemsize
    return (numel * bits + 7) // 8 + -(-numel // BLOCK_NUMEL) * _SCALE_NBYTES


@dataclass(frozen=True, slots=True)
class OuterPolicy:
    """When and how replica groups exchange what they have learned (`DiLoCoConfig`)."""

    groups: int
    sync_every: int
    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    bits: Bits | None = None
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0

    @property
    def states(self) -> tuple[str, ...]:
        """The states that it needs."""
        momentum = (OUTER_MOMENTUM,) if self.momentum else ()
        gradient = (OUTER_GRADIENT,) if self.delay else ()
        error = (OUTER_ERROR,) if self.bits is not None else ()
        return (OUTER_WEIGHTS, *momentum, *gradient, *error)


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """How a step reduces, gathers and updates.

    `clip_norm` 0 is off. `skip_overflow`: a gradient that is not finite skips the update (mixed precision); otherwise
    the update goes through, as in plain fp32 training. `defer_publish`: the all-gather of updated parameters may last
    into the next forward pass, and every reader of parameters calls `wait_all_gathers` first. `measure_norm` False
    saves the norm where nothing needs it. `require_all` makes a trained parameter without a gradient an error.
    `stochastic_rounding` is how parameters of 16 bits follow from master weights (`WeightRounding`). `ema_decay` above
    0 keeps a moving average of weights, as the state `WEIGHTS_EMA`. `noise_decay` smooths the gradient noise scale;
    None does not measure it. `outer` lets replica groups train apart.
    """

    clip_norm: float = 0.0
    skip_overflow: bool = False
    defer_publish: bool = False
    measure_norm: bool = True
    require_all: bool = False
    stochastic_rounding: bool = False
    ema_decay: float = 0.0
    noise_decay: float | None = None
    outer: OuterPolicy | None = None
    precision: Precision = DEFAULT_PRECISION
    reduction: ReductionPolicy = field(default_factory=ReductionPolicy)
    gathering: GatherPolicy = field(default_factory=GatherPolicy)

    @property
    def engine_states(self) -> tuple[str, ...]:
        """The states that are kept in addition to the optimizer's, in float32."""
        averages = (WEIGHTS_EMA,) if self.ema_decay else ()
        return averages if self.outer is None else (*averages, *self.outer.states)

    @property
    def norm_decides(self) -> bool:
        """Whether the norm must be known before an update begins."""
        return self.clip_norm > 0.0 or self.skip_overflow

    @property
    def needs_norm(self) -> bool:
        """Whether the norm is computed."""
        return self.measure_norm or self.norm_decides
