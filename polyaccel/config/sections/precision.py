"""Sections that choose element types: `fp16`, `bf16`, `torch_autocast`, `data_types`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from polyaccel.config.section import CountInt, Listed, PositiveFloat, PositiveInt, Section

FloatName = Literal["fp32", "fp16", "bf16"]


class Fp16Config(Section):
    """Half-precision parameters with float32 master weights and a loss scale (Micikevicius et al. 2018)."""

    enabled: bool = False
    """Keep parameters in float16. Excludes `bf16.enabled` and `torch_autocast.enabled`."""
    auto_cast: bool = False
    """Cast the model's floating-point inputs to float16 before each forward pass."""
    loss_scale: Annotated[float, Field(ge=0)] = 0.0
    """A fixed loss scale, or 0 for a dynamic one. The five settings below shape the dynamic one only."""
    initial_scale_power: Annotated[CountInt, Field(le=127)] = 16
    """The dynamic scale starts at 2 to this power."""
    loss_scale_window: PositiveInt = 1000
    """Steps without overflow after which the dynamic scale doubles."""
    hysteresis: PositiveInt = 2
    """The dynamic scale halves at this many overflows; each skips its step."""
    consecutive_hysteresis: bool = False
    """Restore `hysteresis` after every good step, not only when the scale grows."""
    min_loss_scale: PositiveFloat = 1.0
    """The dynamic scale's floor; an overflow there is an error."""
    stochastic_rounding: bool = False
    """Round master weights to parameters up or down by chance, so that updates too small for 16 bits show on average,
    instead of to nearest. The same bits at every stage and after a restart."""
    fp16_master_weights_and_grads: bool = False
    """Keep no float32 master weights, and add gradients up in float16. Updated weights are rounded stochastically.
    Needs an optimizer that the config names."""


class Bf16Config(Section):
    """Parameters in bfloat16 with float32 master weights, without a loss scale."""

    enabled: bool = False
    """Keep parameters in bfloat16, but those of norms with running statistics in the statistics' type, as under `fp16`.
    Excludes `fp16.enabled` and `torch_autocast.enabled`."""
    check_grad_overflow: bool = True
    """Skip a step whose gradients are not all finite, on every rank; false applies them. No update can begin before the
    last gradient is there."""
    stochastic_rounding: bool = False
    """Round master weights to parameters up or down by chance, so that updates too small for 16 bits show on average,
    instead of to nearest. The same bits at every stage and after a restart."""
    bf16_master_weights_and_grads: bool = False
    """Keep no float32 master weights, and add gradients up in bfloat16. Updated weights are rounded stochastically.
    Needs an optimizer that the config names."""
    bf16_optimizer_states: bool = False
    """Keep optimizer states in bfloat16, rounded stochastically. Needs an elementwise optimizer that the config
    names."""


class TorchAutocastConfig(Section):
    """Float32 parameters, with the forward pass under torch's autocast."""

    enabled: bool = False
    """Run the forward pass under autocast. Excludes `fp16.enabled` and `bf16.enabled`."""
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """The type that autocast computes matrix products in; float16 uses the loss scale of `fp16`."""


class DataTypesConfig(Section):
    """Element types that differ from those the precision mode implies."""

    grad_accum_dtype: FloatName | None = None
    """The type in which gradients of several micro-batches are summed; null is float32 when there are several."""
    param_dtype: FloatName | None = None
    """States the parameters' type; it must be the one that `fp16` or `bf16` implies, which null stands for."""
    buffer_dtype: FloatName | None = None
    """The type to convert module buffers to; null leaves them as they are, so that running statistics stay in float32,
    and with them the parameters of their batch norm."""
    keep_in_fp32_modules: Listed[tuple[str, ...]] | Literal["auto"] = "auto"
    """Modules whose buffers stay in float32 when `buffer_dtype` is set; "auto" asks the model."""
