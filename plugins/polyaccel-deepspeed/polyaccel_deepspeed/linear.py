"""`deepspeed.linear`: linear layers with a frozen weight and trained adapters (LoRA; Hu et al. 2021).

The frozen weight is a parameter like any other: at stage 3 the engine shards it, whatever `base_weight_sharding` says.
Under a `QuantizationConfig` it is int8, or NF4 at 4 bits, with a float32 scale a group of a row, and each pass computes
it again. DeepSpeed has floats of 4, 6, 8 and 12 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyaccel.errors import PolyaccelError
from polyaccel.torch.deferred_init.values import value_of
from polyaccel.torch.quantized.codes import CodeFormat
from polyaccel.torch.quantized.layers import present, product, quantize_layer

log = getLogger("polyaccel.deepspeed")
_NAME = "lora"
_TYPES = {4: "nf4", 8: "int8"}
"""The type of a frozen weight by its bits."""


@dataclass
class LoRAConfig:
    """Adapters of a `LoRAOptimizedLinear`. `base_weight_sharding` and both keys of offload have no effect: the engine's
    config decides them."""

    lora_r: int = 64
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    offload: bool = False
    offload_ratio: float = 0.0
    delay_lora_init: bool = False
    target_mods: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


@dataclass
class QuantizationConfig:
    """A frozen weight in 4 or 8 bits; `mantissa_bits` and `q_dtype` have no effect."""

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 512
    q_dtype: Any = torch.uint8


class OptimizedLinear(nn.Module):
    """A linear layer; calling the class gives a plain one, a `QuantizedLinear`, or a `LoRAOptimizedLinear`."""

    def __new__(  # type: ignore[misc]  # as there
        cls,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: Any = nn.Linear,
    ) -> nn.Module:
        """Raises PolyaccelError for other than 4 or 8 bits."""
        if lora_config is None and quantization_config is None:
            plain: nn.Module = linear_cls(input_dim, output_dim, bias=bias, dtype=dtype, device=device)
            return plain
        if lora_config is None:
            return QuantizedLinear(input_dim, output_dim, bias, quantization_config, dtype)
        return LoRAOptimizedLinear(
            input_dim, output_dim, bias, lora_config, quantization_config, device, dtype, linear_cls
        )


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen weight in codes, as `polyaccel.quantize_frozen` makes."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        quantization_config: QuantizationConfig | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Raises PolyaccelError for other than 4 or 8 bits."""
        super().__init__(input_dim, output_dim, bias=bias, dtype=dtype)
        settings = quantization_config or QuantizationConfig()
        quantize_layer(self, self.weight.detach(), _type_of(settings), settings.group_size, double_quant=False)


class LoRAOptimizedLinear(nn.Module):
    """A frozen weight, and the product of two trained matrices times `lora_alpha / lora_r` added to it."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: Any = nn.Linear,
    ) -> None:
        """Raises PolyaccelError without a LoRA config, and for other than 4 or 8 bits."""
        super().__init__()
        if lora_config is None:
            raise PolyaccelError("LoRAOptimizedLinear was called with lora_config = None", hint="give lora_config")
        self.input_dim, self.output_dim, self.dtype = input_dim, output_dim, dtype
        self.lora_config, self.quantization_config = lora_config, quantization_config
        self._make, self._device = linear_cls, device
        self.lora_scaling_factor = lora_config.lora_alpha / lora_config.lora_r
        self.merged_adapters: list[str] = []
        self.disabled = self._is_initialized = False
        weight = torch.empty((output_dim, input_dim), dtype=dtype, device=device)
        nn.init.xavier_uniform_(weight)
        self._set_base(weight)
        frozen = torch.zeros(output_dim, dtype=dtype, device=device) if bias else None
        self.bias = None if frozen is None else nn.Parameter(frozen, requires_grad=False)
        if not lora_config.delay_lora_init:
            self.init_lora()

    @classmethod
    def from_linear(
        cls, layer: nn.Linear, weight: Tensor, lora: LoRAConfig, quantization: QuantizationConfig | None
    ) -> LoRAOptimizedLinear:
        """Return a layer with the values `weight` and the bias of `layer`, both frozen, and with new adapters."""
        sizes = (layer.in_features, layer.out_features, layer.bias is not None)
        made = cls(*sizes, lora, quantization, weight.device, weight.dtype)
        made._set_base(weight)
        if layer.bias is not None:
            made.bias = nn.Parameter(value_of(layer.bias).detach().clone(), requires_grad=False)
        made.init_lora()
        return made

    def init_lora(self) -> None:
        """Make the trained matrices: the second one is zero."""
        if self.disabled:
            return
        rank = self.lora_config.lora_r
        made = {"bias": False, "device": self._device, "dtype": self.dtype}
        self.lora_weight_1 = self._make(self.input_dim, rank, **made)
        self.lora_weight_2 = self._make(rank, self.output_dim, **made)
        nn.init.kaiming_uniform_(self.lora_weight_1.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_weight_2.weight)
        self._is_initialized = True

    def full_weight(self) -> Tensor:
        """The frozen weight in its own type."""
        if self.quantization_config is None or self.disabled:
            return self.weight
        return self._format.decode((present(self.weight), present(self.weight_scales)), self.dtype)

    def forward(self, input_tensor: Tensor) -> Tensor:
        """The product with the weight, and that of the adapters. Raises PolyaccelError before `init_lora`."""
        out = self._frozen_product(input_tensor)
        if self.disabled or self.merged_adapters:
            return out
        if not self._is_initialized:
            raise PolyaccelError("init_lora was never called", hint="call deepspeed.linear.init_lora(model)")
        added: Tensor = self.lora_weight_2(self.lora_weight_1(input_tensor))
        return out + self.lora_scaling_factor * added

    def _frozen_product(self, x: Tensor) -> Tensor:
        if self.quantization_config is None or self.disabled:
            return functional.linear(x, self.weight, self.bias)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else present(self.bias).to(dtype)
        return product(x.to(dtype), bias, self._format, present(self.weight), present(self.weight_scales))

    # What `polyaccel.torch.generation.adapters` asks of a layer with adapters.

    @property
    def merged(self) -> bool:
        """Whether the adapters are in the weight."""
        return bool(self.merged_adapters)

    @property
    def disable_adapters(self) -> bool:
        """Whether there are none to add: a quantised weight stays as it is."""
        return self.disabled or not self._is_initialized or self.quantization_config is not None

    def get_base_layer(self) -> nn.Module:
        """The layer that has the frozen weight."""
        return self

    def merge(self) -> None:
        """Add the adapters to the weight."""
        added = self.lora_weight_2.weight.float() @ self.lora_weight_1.weight.float()
        values: Tensor = Tensor.data.__get__(self.weight)  # type: ignore[attr-defined]  # not marked as handed out
        values.add_(added * self.lora_scaling_factor)
        self.merged_adapters.append(_NAME)

    def _set_base(self, weight: Tensor) -> None:
        if self.quantization_config is None or self.disabled:
            self.weight = nn.Parameter(weight, requires_grad=False)
            return
        settings = self.quantization_config
        self._format = CodeFormat(_type_of(settings), settings.group_size, False, self.output_dim, self.input_dim)
        codes, scales = self._format.encode(weight)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scales = nn.Parameter(scales, requires_grad=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Take a plain layer's weight too: rounded, or by a plain layer where `target_mods` does not name this one."""
        weight = state_dict.get(f"{prefix}weight")
        if not any(target in prefix for target in self.lora_config.target_mods):
            self.disabled = True
            self._parameters.pop("weight_scales", None)
            self._set_base(torch.empty((self.output_dim, self.input_dim), dtype=self.dtype, device=self.weight.device))
        elif weight is not None and weight.is_floating_point() and self.quantization_config is not None:
            self._set_base(weight.to(self.dtype))
            state_dict[f"{prefix}weight"] = self.weight.detach()
            state_dict[f"{prefix}weight_scales"] = self.weight_scales.detach()
        super()._load_from_state_dict(state_dict, prefix, *others)


def _type_of(settings: QuantizationConfig) -> str:
    if settings.q_bits not in _TYPES:
        bits = settings.q_bits
        raise PolyaccelError(f"q_bits = {bits} does not exist here", hint="use q_bits=4 or q_bits=8", value=bits)
    return _TYPES[settings.q_bits]


def init_lora(model: nn.Module) -> None:
    """Freeze `model`, and make the adapters of its layers that have none yet."""
    model.requires_grad_(False)
    for part in model.modules():
        if isinstance(part, LoRAOptimizedLinear):
            part.init_lora()
