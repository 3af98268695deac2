"""The section about compression while training: `compression_training`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from polyaccel.config.section import CountInt, Fraction, Listed, PositiveInt, Section

Names = Listed[tuple[str, ...]]
DenseRatio = Annotated[float, Field(gt=0, le=1)]
Bits = Annotated[int, Field(ge=1, le=32)]
Method = Literal["l1", "topk"]
_ALL = ("*",)


class DistillationConfig(Section):
    """What `distillation_loss` mixes."""

    weight: Fraction = 0.5
    """Share of the distance from the teacher's outputs; the rest is the loss against labels."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits of both."""
    hidden_weight: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the distance between hidden states, which is added."""


class LayerReductionConfig(Section):
    """A student with some of its teacher's layers, which `student_initialization` copies."""

    enabled: bool = False
    """Let `student_initialization` copy."""
    keep_number_layer: PositiveInt | None = None
    """Layers that the student has; null is as many as `teacher_layer` names."""
    module_name_prefix: str = ""
    """Full name of the list of layers, the same in both models."""
    teacher_layer: Listed[tuple[CountInt, ...]] = ()
    """Indices of the teacher's layers, one for each of the student's."""
    other_module_name: Names = ()
    """Full names of modules that are copied as they are."""
    distillation: DistillationConfig = DistillationConfig()
    """The loss of `distillation_loss`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        kept = self.keep_number_layer
        if self.enabled and kept is not None and kept != len(self.teacher_layer):
            raise ValueError(f"keep_number_layer is {kept}, and teacher_layer names {len(self.teacher_layer)} layers")
        return self


class MixedQuantizeConfig(Section):
    """A weight that goes over from its own value to the quantised one."""

    enabled: bool = False
    """Mix both, at first with the whole own value."""
    quantize_change_ratio: Fraction = 0.001
    """What the share of the own value loses in each step."""


class SharedWeightQuantization(Section):
    """What all groups of `weight_quantization` share."""

    enabled: bool = False
    """Quantise weights."""
    quantizer_kernel: bool = False
    """Without effect: one computation serves all devices."""
    schedule_offset: CountInt = 0
    """Optimizer steps before it begins."""
    quantize_groups: PositiveInt = 1
    """Parts of a weight that have separate scales; they divide its elements."""
    quantize_verbose: bool = False
    """Without effect."""
    quantization_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """Levels around 0, or between the least and the largest value."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest level, or up with the probability of the remainder."""
    quantize_weight_in_forward: bool = False
    """Without effect: weights are quantised in forward, and the optimizer updates those that are not."""
    fp16_mixed_quantize: MixedQuantizeConfig = MixedQuantizeConfig()
    """Mix the own value and the quantised one."""


class WeightBits(Section):
    """Bits of a group's weights."""

    start_bits: Bits
    """Bits at the beginning."""
    target_bits: Bits
    """Bits at the end. 2 is ternary, 1 binary."""
    quantization_period: CountInt = 1
    """Optimizer steps after which there is a bit less; 0 begins with `target_bits`."""
    period_doubling: bool = False
    """Let each further bit take as many steps as all before it together (mixture of quantisation, MoQ)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.start_bits < self.target_bits:
            raise ValueError("start_bits is less than target_bits")
        return self


class WeightGroup(Section):
    """Layers whose weights have the same bits."""

    params: WeightBits
    """Their bits."""
    modules: Names = _ALL
    """Regular expressions that are found in full names of layers; "*" is every layer."""
    related_modules: Listed[tuple[Names, ...]] | None = None
    """Without effect."""


class WeightQuantizationConfig(Section):
    """Quantisation-aware training of weights."""

    shared_parameters: SharedWeightQuantization = SharedWeightQuantization()
    """What all groups share."""
    different_groups: dict[str, WeightGroup] = Field(default_factory=dict)
    """Groups of layers, by names of your own."""


class SharedActivationQuantization(Section):
    """What all groups of `activation_quantization` share."""

    enabled: bool = False
    """Quantise the inputs of layers."""
    quantization_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """Levels around 0, or between the least and the largest value."""
    range_calibration: Literal["dynamic", "static"] = "dynamic"
    """A range for each token, or one for each layer: a moving mean of the ranges of all ranks' batches."""
    schedule_offset: CountInt = 1000
    """Optimizer steps before it begins."""


class ActivationBits(Section):
    """Bits of a group's inputs."""

    bits: Annotated[int, Field(ge=2, le=32)]
    """Bits of an element."""


class ActivationGroup(Section):
    """Layers whose inputs have the same bits."""

    params: ActivationBits
    """Their bits."""
    modules: Names = _ALL
    """Regular expressions that are found in full names of layers; "*" is every layer."""
    related_modules: Listed[tuple[Names, ...]] | None = None
    """Without effect."""


class ActivationQuantizationConfig(Section):
    """Quantisation-aware training of layers' inputs."""

    shared_parameters: SharedActivationQuantization = SharedActivationQuantization()
    """What all groups share."""
    different_groups: dict[str, ActivationGroup] = Field(default_factory=dict)
    """Groups of layers, by names of your own."""


class SharedPruning(Section):
    """What all groups of a kind of pruning share."""

    enabled: bool = False
    """Prune."""
    method: Method = "l1"
    """"l1" keeps what has the largest magnitudes when pruning begins; "topk" what has the largest scores, which are
    trained (movement pruning)."""
    schedule_offset: CountInt = 1000
    """Optimizer steps before it begins."""


class SharedSparsePruning(SharedPruning):
    """What all groups of `sparse_pruning` share."""

    method: Literal["l1", "topk", "snip_momentum"] = "l1"  # type: ignore[assignment]
    """As for other pruning; "snip_momentum" removes, again and again, the blocks that matter least to the loss."""
    dense_ratio: DenseRatio = 0.1
    """Share that stays in the end, of all layers together. For "snip_momentum", as are the keys below."""
    block_pattern: Annotated[str, Field(pattern=r"^[1-9][0-9]*x[1-9][0-9]*$")] = "4x1"
    """Outputs x inputs of a block."""
    schedule_offset_end: CountInt | None = None
    """Optimizer steps after which no more is removed; null is `schedule_offset`."""
    schedule_offset_stride: PositiveInt = 1
    """Optimizer steps from one removal to the next."""
    excluded_modules: Names = ()
    """Regular expressions that are found in full names of layers that stay whole."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        own = ("block_pattern", "dense_ratio", "excluded_modules", "schedule_offset_end", "schedule_offset_stride")
        fields = type(self).model_fields
        given = [name for name in own if getattr(self, name) != fields[name].default]
        if self.method != "snip_momentum" and given:
            raise ValueError(f"{given[0]} is for snip_momentum, and method is {self.method}")
        if self.method == "snip_momentum" and self.last_step < max(1, self.schedule_offset):
            raise ValueError(f"schedule_offset_end is {self.last_step}, before there is a gradient or before it begins")
        return self

    @property
    def last_step(self) -> int:
        """Optimizer steps after which no more is removed."""
        return self.schedule_offset if self.schedule_offset_end is None else self.schedule_offset_end


class SharedHeadPruning(SharedPruning):
    """What all groups of `head_pruning` share."""

    method: Method = "topk"
    """"l1" keeps what has the largest magnitudes when pruning begins; "topk" what has the largest scores, which are
    trained (movement pruning)."""
    num_heads: PositiveInt | None = None
    """Attention heads of a layer."""


class PruningRatio(Section):
    """How much of a group's layers stays."""

    dense_ratio: DenseRatio
    """Share that stays."""


class PruningGroup(Section):
    """Layers that are pruned by the same share."""

    params: PruningRatio
    """Their share."""
    modules: Names = _ALL
    """Regular expressions that are found in full names of layers; "*" is every layer."""
    related_modules: Listed[tuple[Names, ...]] | None = None
    """For each expression of `modules` the layers that lose the other end of what is pruned."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.related_modules is not None and len(self.related_modules) != len(self.modules):
            raise ValueError(
                f"related_modules has {len(self.related_modules)} lists for {len(self.modules)} expressions of modules"
            )
        return self


class PruningConfig(Section):
    """One kind of pruning."""

    shared_parameters: SharedPruning = SharedPruning()
    """What all groups share."""
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict)
    """Groups of layers, by names of your own."""


class SparsePruningConfig(Section):
    """Pruning of single weights, or of small blocks."""

    shared_parameters: SharedSparsePruning = SharedSparsePruning()
    """What all groups share."""
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict)
    """Groups of layers, by names of your own; "snip_momentum" has none, and takes all but `excluded_modules`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shared_parameters.method == "snip_momentum" and self.different_groups:
            raise ValueError("different_groups is not for snip_momentum: name the layers that stay in excluded_modules")
        return self


class HeadPruningConfig(Section):
    """Pruning of attention heads."""

    shared_parameters: SharedHeadPruning = SharedHeadPruning()
    """What all groups share."""
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict)
    """Groups of output projections, by names of your own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shared_parameters.enabled and self.shared_parameters.num_heads is None:
            raise ValueError("head_pruning needs shared_parameters.num_heads")
        return self


class EigenvalueConfig(Section):
    """Largest eigenvalues of blocks' Hessians, by which weights with `period_doubling` lose bits later (MoQ)."""

    enabled: bool = False
    """Compute them in steps in which weights are about to lose a bit."""
    verbose: bool = False
    """Log them."""
    max_iter: PositiveInt = 100
    """Products with a Hessian at most."""
    tol: Annotated[float, Field(gt=0)] = 1e-2
    """Relative change between two products at which it ends."""
    stability: Annotated[float, Field(ge=0)] = 1e-6
    """What is added to the norm that vectors are divided by."""
    gas_boundary_resolution: PositiveInt = 1
    """Optimizer steps between computations at least."""
    layer_name: str = "bert.encoder.layer"
    """Full name of the list of blocks."""
    layer_num: PositiveInt = 12
    """Blocks of the list, from its beginning."""


class CompressionConfig(Section):
    """Quantisation and pruning while training, and students of fewer layers. Torch only."""

    weight_quantization: WeightQuantizationConfig = WeightQuantizationConfig()
    """Weights in few bits."""
    activation_quantization: ActivationQuantizationConfig = ActivationQuantizationConfig()
    """Inputs of layers in few bits."""
    sparse_pruning: SparsePruningConfig = SparsePruningConfig()
    """Single weights that are 0."""
    row_pruning: PruningConfig = PruningConfig()
    """Outputs of linear layers that are 0."""
    head_pruning: HeadPruningConfig = HeadPruningConfig()
    """Attention heads that are 0; `modules` are output projections, `related_modules` query, key and value."""
    channel_pruning: PruningConfig = PruningConfig()
    """Outputs of convolutions that are 0."""
    layer_reduction: LayerReductionConfig = LayerReductionConfig()
    """A student with some of its teacher's layers."""
