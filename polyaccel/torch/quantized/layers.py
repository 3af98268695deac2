"""Linear layers whose frozen weight is stored as codes.

[Note: Quantised layers]
A layer stays the object that it was, and an instance of its class, so that PEFT, recomputation and units find it. Its
parameter `weight` goes. Codes and `weight_scales` come in its place: integers that require no gradient, which every
stage shards, gathers, saves and loads as they are. The name of the codes says their format, as in `weight_nf4_64`:
codes of other types and groups may have the same shapes. `weight` is then a property (`QuantizedWeight`).
Forward computes the matrix, and backward computes it again: no pass keeps one. An empty buffer says the type of the
matrix, as it follows the model's conversions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import PolyaccelError
from polyaccel.torch.graph_breaks import outside_graphs
from polyaccel.torch.quantized.codes import CodeFormat
from polyaccel.torch.quantized.weight import QuantizedWeight
from polyaccel.torch.sharding.pending import PendingParameter
from polyaccel.torch.sharding.sharded import ShardedParameter

NAMES = ("weight_scales", "weight_spans", "weight_part_3", "weight_part_4", "weight_part_5")
"""Parameters of a layer after its codes, of which a format has some."""
_ABSENT = (ShardedParameter, PendingParameter)


class StoredPart(nn.Parameter):
    """Codes or scales of a layer: integers, which require no gradient."""

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Raise PolyaccelError for True: PEFT asks for it in `modules_to_save`."""
        if requires_grad:
            hint = "name its layer in skip of quantize_frozen, or take it out of modules_to_save"
            raise PolyaccelError("a quantised weight is frozen and cannot be trained", hint=hint, value=True)
        return super().requires_grad_(requires_grad)


class QuantizedLayer(nn.Module):
    """A linear layer with a frozen weight in codes. See [Note: Quantised layers]."""

    quantization: Any
    """A `CodeFormat`, or what has its `code_name`, `decode`, `rows` and `columns`."""
    is_transposed: bool
    """Whether the weight is (inputs, outputs), as that of transformers' Conv1D; its codes are not."""
    bias: Tensor | None
    _type_of_weight: Tensor

    @property
    def weight(self) -> Tensor:
        """The matrix, as the layer's class has it; it cannot be written to."""
        found, dtype = self.quantization, self._type_of_weight.dtype
        shape = (found.columns, found.rows) if self.is_transposed else (found.rows, found.columns)

        def values() -> Tensor:
            with torch.no_grad():
                matrix: Tensor = found.decode(self.stored(), dtype)
            return matrix.t() if self.is_transposed else matrix

        return QuantizedWeight(shape, dtype, getattr(self, found.code_name).device, values)

    def stored(self) -> tuple[Tensor, ...]:
        return tuple(present(self._parameters[name]) for name in self.stored_names if name in self._parameters)

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of parameters that the format may have, in the order of `stored`."""
        return (self.quantization.code_name, *NAMES)

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        """The product with the matrix, and the bias added."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else present(self.bias).to(dtype)
        return product(x.to(dtype), bias, self.quantization, *self.stored())

    def store(self, weight: Tensor) -> None:
        """Take the values of `weight`, as the layer's class has it."""
        stored = self.quantization.encode(weight.t() if self.is_transposed else weight)
        for name, value in zip(self.stored_names, stored, strict=False):
            self._parameters[name] = StoredPart(value, requires_grad=False)

    def reset_parameters(self) -> None:
        """Raise PolyaccelError: codes without values cannot be drawn."""
        hint = "load its weights first, or build the model inside polyaccel.zero.Init and quantise it then"
        raise PolyaccelError(f"a quantised layer has no values: {self}", hint=hint)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Take a plain layer's weight too, which is quantised."""
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, Tensor) and f"{prefix}{self.quantization.code_name}" not in state_dict:
            stored = self.quantization.encode(weight.t() if self.is_transposed else weight)
            state_dict.update(
                {f"{prefix}{name}": value for name, value in zip(self.stored_names, stored, strict=False)}
            )
            del state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, *others)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the class from which this one was made: no module has this one under its name."""
        return _unfilled, (_own_class(self),), self.__getstate__()  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """The class's own text, and the format."""
        return f"{super().extra_repr()}, dtype={self.quantization.dtype}, group_size={self.quantization.group_size}"


class QuantizedLinear(QuantizedLayer, nn.Linear):  # type: ignore[override, misc]  # whose weight is a parameter
    """A quantised `nn.Linear`."""


class _Product(torch.autograd.Function):
    """A product with a matrix in codes, which is computed in both directions and kept in neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, found: Any, *stored: Tensor) -> Tensor:
        ctx.found = found
        ctx.save_for_backward(*stored)
        with torch.autocast(x.device.type, enabled=False):  # the caller has cast what is to be cast
            out: Tensor = found.multiply(x, bias, stored)
            return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = grad @ ctx.found.decode(ctx.saved_tensors, grad.dtype)
        if ctx.needs_input_grad[1]:
            of_bias = grad.flatten(0, -2).sum(0) if grad.dim() > 1 else grad
        return (of_x, of_bias, None, *[None] * (len(ctx.needs_input_grad) - 3))


def product(x: Tensor, bias: Tensor | None, found: Any, *stored: Tensor) -> Tensor:
    """Return the product with the matrix that `found.decode` makes of `stored`, in the type of `x`."""
    out: Tensor = _Product.apply(x, bias, found, *stored)  # type: ignore[no-untyped-call]
    return out


def quantize_layer(layer: nn.Module, weight: Tensor, dtype: str, group_size: int, *, double_quant: bool) -> None:
    """Make `layer`, whose weight has the values `weight`, a `QuantizedLayer`, in place."""
    is_transposed = not isinstance(layer, nn.Linear)
    rows, columns = reversed(weight.shape) if is_transposed else weight.shape
    del layer._parameters["weight"]
    layer.__class__ = quantized_class(type(layer))
    assert isinstance(layer, QuantizedLayer)  # just made
    layer.quantization = CodeFormat(dtype, group_size, double_quant, rows, columns)
    layer.is_transposed = is_transposed
    # Never on the meta device, from which nothing brings a buffer that no state dict has.
    layer.register_buffer("_type_of_weight", torch.empty(0, dtype=weight.dtype, device="cpu"), persistent=False)
    layer.store(weight)


def dequantize_layer(layer: QuantizedLayer) -> None:
    """Give `layer` its class and a frozen parameter `weight` again, in place."""
    weight = nn.Parameter(layer.weight.data.contiguous(), requires_grad=False)
    plain_class(layer)
    layer.register_parameter("weight", weight)


def plain_class(layer: QuantizedLayer) -> None:
    """Give `layer` its own class, without a weight."""
    for name in layer.stored_names:
        layer._parameters.pop(name, None)
    del layer._buffers["_type_of_weight"], layer.quantization, layer.is_transposed
    layer._non_persistent_buffers_set.discard("_type_of_weight")
    layer.__class__ = _own_class(layer)


def _own_class(layer: QuantizedLayer) -> Any:
    return next(kind for kind in type(layer).__mro__ if not issubclass(kind, QuantizedLayer))


def _unfilled(own: type) -> Any:
    kind: Any = quantized_class(own)
    return kind.__new__(kind)


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer computes as `nn.Linear` does, or transformers' Conv1D."""
    own = "forward" in layer.__dict__
    if isinstance(layer, nn.Linear):
        return type(layer).forward is nn.Linear.forward and not own
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") and not own


_CLASSES: dict[type, type] = {nn.Linear: QuantizedLinear}


def quantized_class(own: type) -> type:
    if own not in _CLASSES:
        _CLASSES[own] = type(f"Quantized{own.__name__}", (QuantizedLayer, own), {"__module__": __name__})
    return _CLASSES[own]


def present(parameter: Any) -> Any:
    """The parameter, whose values have been brought here: a function of autograd would take an empty one."""
    if type(parameter) in _ABSENT:
        Tensor.detach(parameter)
    return parameter
