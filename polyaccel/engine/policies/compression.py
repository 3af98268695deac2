"""What a config compresses, as rules that a frontend finds layers for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from polyaccel.config import Config
from polyaccel.config.sections.compression import PruningConfig, SharedSparsePruning, SparsePruningConfig

PruningKind = Literal["sparse", "row", "head", "channel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """Weights in few bits: `start_bits` from step `offset` on, and a bit less every `period` steps to `target_bits`.

    `mix_loss` is what the share of the unquantised value loses in each step; None mixes none of it in.
    """

    key: str
    modules: tuple[str, ...]
    offset: int
    start_bits: int
    target_bits: int
    period: int
    doubles: bool
    groups: int
    is_symmetric: bool
    is_stochastic: bool
    mix_loss: float | None

    def bits_at(self, step: int) -> int:
        """The bits after `step` optimizer steps; 0 before it begins."""
        if step < self.offset:
            return 0
        if not self.period:
            return self.target_bits
        periods = (step - self.offset) // self.period
        lost = periods.bit_length() if self.doubles else periods  # after 1, 2, 4, 8 periods, or after each
        return max(self.target_bits, self.start_bits - lost)

    def own_share_at(self, step: int) -> float:
        """The share of the unquantised value after `step` optimizer steps."""
        return 0.0 if self.mix_loss is None else max(0.0, 1.0 - self.mix_loss * (step - self.offset))


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRule:
    """Inputs in few bits from step `offset` on."""

    key: str
    modules: tuple[str, ...]
    offset: int
    bits: int
    is_symmetric: bool
    is_static: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Blocks of `block` outputs and inputs that are removed every `stride` steps, from a rule's offset to `last`."""

    block: tuple[int, int]
    last: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningRule:
    """A share of layers that stays from step `offset` on. `related` are the layers of each expression of `modules`."""

    key: str
    kind: PruningKind
    modules: tuple[str, ...]
    related: tuple[tuple[str, ...], ...]
    offset: int
    dense_ratio: float
    is_learned: bool
    num_heads: int = 0
    excluded: tuple[str, ...] = ()
    removal: Removal | None = None

    def dense_share_at(self, step: int) -> float | None:
        """The share of blocks that stays once removals after `step` steps are done; None where none is due then.

        Removal k of K leaves `dense_ratio` to the power k / K, so that each removes the same share of what is left.
        """
        if self.removal is None or not self.offset <= step <= self.removal.last:
            return None
        total = (self.removal.last - self.offset) // self.removal.stride
        count, rest = divmod(step - self.offset, self.removal.stride)
        return None if rest else self.dense_ratio ** (count / total if total else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """What the loss of a student mixes."""

    weight: float
    temperature: float
    hidden_weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReduction:
    """A student's layers `teacher_layers` of its teacher, under `prefix`, and `others` as they are."""

    prefix: str
    teacher_layers: tuple[int, ...]
    others: tuple[str, ...]
    distillation: Distillation


@dataclass(frozen=True, slots=True, kw_only=True)
class Curvature:
    """Eigenvalues of the first `count` blocks of the list `blocks`, every `every` steps at most."""

    blocks: str
    count: int
    iterations: int
    tolerance: float
    stability: float
    every: int
    is_logged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionPolicy:
    """All rules of a config."""

    weights: tuple[WeightRule, ...] = ()
    inputs: tuple[InputRule, ...] = ()
    pruning: tuple[PruningRule, ...] = ()
    reduction: LayerReduction | None = None
    curvature: Curvature | None = None
    """What delays the loss of bits of `weights` that double their periods."""

    @property
    def has_rules(self) -> bool:
        """Whether layers are changed while they train."""
        return bool(self.weights or self.inputs or self.pruning)


def compression_policy_of(config: Config) -> CompressionPolicy:
    """The rules of the section `compression_training`."""
    section, reduction = config.compression_training, None
    if section.layer_reduction.enabled:
        layers = section.layer_reduction
        reduction = LayerReduction(
            prefix=layers.module_name_prefix,
            teacher_layers=layers.teacher_layer,
            others=layers.other_module_name,
            distillation=Distillation(
                weight=layers.distillation.weight,
                temperature=layers.distillation.temperature,
                hidden_weight=layers.distillation.hidden_weight,
            ),
        )
    kinds: Mapping[PruningKind, Any] = {
        "sparse": section.sparse_pruning,
        "row": section.row_pruning,
        "head": section.head_pruning,
        "channel": section.channel_pruning,
    }
    return CompressionPolicy(
        weights=tuple(_weight_rules(config)),
        inputs=tuple(_input_rules(config)),
        pruning=tuple(rule for kind, one in kinds.items() for rule in _pruning_rules(kind, one)),
        reduction=reduction,
        curvature=_curvature_of(config),
    )


def _curvature_of(config: Config) -> Curvature | None:
    section = config.eigenvalue
    if not section.enabled:
        return None
    return Curvature(
        blocks=section.layer_name,
        count=section.layer_num,
        iterations=section.max_iter,
        tolerance=section.tol,
        stability=section.stability,
        every=section.gas_boundary_resolution,
        is_logged=section.verbose,
    )


def _weight_rules(config: Config) -> Iterator[WeightRule]:
    section = config.compression_training.weight_quantization
    shared = section.shared_parameters
    mixed = shared.fp16_mixed_quantize
    for name, group in section.different_groups.items() if shared.enabled else ():
        yield WeightRule(
            key=f"compression_training.weight_quantization.different_groups.{name}",
            modules=group.modules,
            offset=shared.schedule_offset,
            start_bits=group.params.start_bits,
            target_bits=group.params.target_bits,
            period=group.params.quantization_period,
            doubles=group.params.period_doubling,
            groups=shared.quantize_groups,
            is_symmetric=shared.quantization_type == "symmetric",
            is_stochastic=shared.rounding == "stochastic",
            mix_loss=mixed.quantize_change_ratio if mixed.enabled else None,
        )


def _input_rules(config: Config) -> Iterator[InputRule]:
    section = config.compression_training.activation_quantization
    shared = section.shared_parameters
    for name, group in section.different_groups.items() if shared.enabled else ():
        yield InputRule(
            key=f"compression_training.activation_quantization.different_groups.{name}",
            modules=group.modules,
            offset=shared.schedule_offset,
            bits=group.params.bits,
            is_symmetric=shared.quantization_type == "symmetric",
            is_static=shared.range_calibration == "static",
        )


def _pruning_rules(kind: PruningKind, section: PruningConfig | SparsePruningConfig) -> Iterator[PruningRule]:
    shared = section.shared_parameters
    if isinstance(shared, SharedSparsePruning) and shared.enabled and shared.method == "snip_momentum":
        rows, columns = map(int, shared.block_pattern.split("x"))
        yield PruningRule(
            key="compression_training.sparse_pruning.shared_parameters",
            kind=kind,
            modules=("*",),
            related=((),),
            offset=shared.schedule_offset,
            dense_ratio=shared.dense_ratio,
            is_learned=False,
            excluded=shared.excluded_modules,
            removal=Removal(block=(rows, columns), last=shared.last_step, stride=shared.schedule_offset_stride),
        )
    for name, group in section.different_groups.items() if shared.enabled else ():
        yield PruningRule(
            key=f"compression_training.{kind}_pruning.different_groups.{name}",
            kind=kind,
            modules=group.modules,
            related=group.related_modules or ((),) * len(group.modules),
            offset=shared.schedule_offset,
            dense_ratio=group.params.dense_ratio,
            is_learned=shared.method == "topk",
            num_heads=getattr(shared, "num_heads", None) or 0,
        )
