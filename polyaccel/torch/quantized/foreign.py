"""Frozen weights that bitsandbytes or torchao has quantised, as every stage can hold them.

[Note: Quantised weights of other packages]
- A weight of torchao is a tensor class around others. Its layer becomes a `QuantizedLayer`, whose parameters are the
  inner tensors with their bits as integers. `restore` gives the layer its own weight back.
- A 4-bit layer of bitsandbytes keeps its parameter of codes, which engines shard as bytes. Its scales are attributes
  of that parameter, whole on each rank. The layer gets a forward that computes the matrix in both directions: its own
  keeps a view of the codes for backward, whose memory another gather may have written meanwhile. On some CPUs its own
  also packs the codes in another form in evaluation mode.
- An 8-bit layer of bitsandbytes has a second reference to its codes, in its `state`. It gets a forward too, which calls
  bitsandbytes with the codes that are here and keeps none; the reference goes, and comes back with the layer's own
  forward. Backward multiplies by the matrix as theirs does. Scales stay in `state`, whole on each rank.

Nothing of these packages is imported here: who uses them has done so.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import PolyaccelError
from polyaccel.torch.quantized.codes import WeightFormat
from polyaccel.torch.quantized.layers import (
    NAMES,
    QuantizedLayer,
    StoredPart,
    plain_class,
    present,
    product,
    quantized_class,
)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorFormat(WeightFormat):
    """How to build a tensor of class `kind` from the tensors inside of it."""

    kind: Any
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]

    dtype = "torchao"
    code_name = "weight_codes"
    group_size = 0

    @property
    def rows(self) -> int:
        """Outputs."""
        return self.shape[0]

    @property
    def columns(self) -> int:
        """Inputs."""
        return self.shape[1]

    def build(self, stored: Sequence[Tensor]) -> Any:
        """Return the tensor around `stored`."""
        inner = {name: value.view(dtype) for name, dtype, value in zip(self.names, self.dtypes, stored, strict=True)}
        return self.kind.__tensor_unflatten__(inner, self.context, self.shape, self.stride)

    def decode(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the matrix as `dtype`."""
        matrix: Tensor = self.build(stored).dequantize()
        return matrix.to(dtype)


class _FourBits(WeightFormat):
    """The format of a 4-bit layer of bitsandbytes."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def decode(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        matrix: Tensor = import_module("bitsandbytes.functional").dequantize_4bit(stored[0], self._state)
        return matrix.to(dtype)


class _EightBits(WeightFormat):
    """The format of an 8-bit layer of bitsandbytes."""

    def __init__(self, layer: Any) -> None:
        self._scales, self._is_training, self._threshold = layer.state.SCB, layer.training, layer.state.threshold

    def decode(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        codes = Tensor.to(stored[0], dtype, copy=True)  # their own `to` takes no copy
        return codes.mul_(self._scales.unsqueeze(1).mul(1.0 / 127.0))

    def multiply(self, x: Tensor, bias: Tensor | None, stored: Sequence[Tensor]) -> Tensor:
        """Return what the layer's own forward does, which may round `x` to 8 bits too."""
        package = import_module("bitsandbytes")
        state = package.MatmulLtState()
        state.CB, state.SCB, state.has_fp16_weights = stored[0], self._scales, False
        state.threshold, state.is_training = self._threshold, self._is_training
        out: Tensor = package.matmul(x, stored[0], bias=bias, state=state)
        return out


class GuardedForward:
    """`forward` of a layer of bitsandbytes. A copy of the layer gets its class's, and so does an unpickled one."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        layer = self.layer
        weight = present(layer.weight)
        if bits_of(layer) == 8:
            found: WeightFormat = _EightBits(layer)
            dtype = x.dtype
        else:
            found = _FourBits(weight.quant_state)
            dtype = x.dtype if layer.compute_dtype is None else layer.compute_dtype
        bias = None if layer.bias is None else present(layer.bias).to(dtype)
        return product(x.to(dtype), bias, found, weight).to(x.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.layer))
        return self if copy is None else types.MethodType(type(copy).forward, copy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.layer, "forward")


def is_wrapped(layer: nn.Module) -> bool:
    """Whether a linear layer has a frozen weight of a tensor class around others, as torchao's are."""
    if not isinstance(layer, nn.Linear):  # a TorchScript part is none, and has no dict of parameters
        return False
    weight = layer._parameters.get("weight")
    has_class = hasattr(weight, "__tensor_flatten__") and hasattr(weight, "dequantize")
    return has_class and weight is not None and not weight.requires_grad


def bits_of(layer: nn.Module) -> int | None:
    """The bits of a layer of bitsandbytes, 4 or 8; None for others."""
    for kind in type(layer).__mro__:
        if kind.__module__.startswith("bitsandbytes.") and kind.__name__ in ("Linear4bit", "Linear8bitLt"):
            return 4 if kind.__name__ == "Linear4bit" else 8
    return None


def is_trained_in_eight_bits(layer: nn.Module) -> bool:
    """Whether a layer of bitsandbytes rounds a weight, which may be trained, in each forward pass."""
    return bits_of(layer) == 8 and bool(getattr(layer.weight, "has_fp16_weights", False))


def unwrap(layer: nn.Module, name: str) -> None:
    """Make a layer for which `is_wrapped` a `QuantizedLayer`. Raises PolyaccelError for too many inner tensors."""
    weight: Any = layer._parameters["weight"]
    names, context = weight.__tensor_flatten__()
    if len(names) > 1 + len(NAMES):
        hint = "use polyaccel.quantize_frozen"
        raise PolyaccelError(f"{name!r} has a weight of {len(names)} tensors", hint=hint, value=len(names))
    inner = [getattr(weight, each) for each in names]
    layer_type = torch.empty(0, dtype=weight.dtype, device="cpu")
    found = TensorFormat(
        type(weight), tuple(names), tuple(one.dtype for one in inner), context, weight.shape, weight.stride()
    )
    del layer._parameters["weight"]
    layer.__class__ = quantized_class(type(layer))
    assert isinstance(layer, QuantizedLayer)  # just made
    layer.quantization, layer.is_transposed = found, False
    layer.register_buffer("_type_of_weight", layer_type, persistent=False)
    for own, value in zip(layer.stored_names, inner, strict=False):
        bits = value.detach().contiguous()
        bits = bits.view(_INTEGERS[bits.itemsize]) if bits.is_floating_point() else bits
        layer._parameters[own] = StoredPart(bits, requires_grad=False)


def restore(layer: nn.Module) -> None:
    """Give a layer of `unwrap` its own class and weight again."""
    assert isinstance(layer, QuantizedLayer)  # the callers' condition
    weight = layer.quantization.build(layer.stored())
    plain_class(layer)
    layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))


def guard(layer: Any, name: str) -> int:
    """Give a layer of bitsandbytes its `GuardedForward`; returns a checksum of its scales.

    Raises PolyaccelError for codes that are not there yet, or packed for inference.
    """
    return _guard_eight_bits(layer, name) if bits_of(layer) == 8 else _guard_four_bits(layer, name)


def _guard_four_bits(layer: Any, name: str) -> int:
    state = getattr(layer.weight, "quant_state", None)
    if state is None or getattr(state, "packing_format_for_cpu", False):
        hint = "move the model to its device, and initialize before anything is generated"
        raise PolyaccelError(f"the 4-bit weight of {name!r} is not as it is trained with", hint=hint, value=name)
    layer.support_avx512bf16_for_cpu = False
    layer.__dict__["forward"] = GuardedForward(layer)
    return _checksum(state.as_dict(packed=True).values())


def _guard_eight_bits(layer: Any, name: str) -> int:
    if getattr(layer.weight, "CB", None) is not None:
        layer.init_8bit_state()
    if layer.state.SCB is None:
        hint = "move the model to its device before initialize"
        raise PolyaccelError(f"the 8-bit weight of {name!r} is not as it is trained with", hint=hint, value=name)
    layer.state.CB = None
    layer.__dict__["forward"] = GuardedForward(layer)
    return _checksum([layer.state.SCB])


def _checksum(values: Iterable[Tensor]) -> int:
    checksum = 0
    for value in values:
        checksum = zlib.crc32(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def unguard(layer: Any) -> None:
    """Take `GuardedForward` back, of a layer whose codes are whole."""
    if not isinstance(layer.__dict__.get("forward"), GuardedForward):
        return
    del layer.__dict__["forward"]
    if bits_of(layer) == 8:
        layer.weight.CB, layer.weight.SCB = layer.weight.data, layer.state.SCB
        layer.state.SCB = None
