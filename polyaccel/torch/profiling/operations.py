"""The floating-point operations of torch's ops: torch's own formulas, and those of ops that it has none for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def _linear(x: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """A product by oneDNN, of shapes."""
    return int(2 * prod(x) * weight[0])


def _with_shapes(formula: Any) -> Any:
    """`formula` of shapes as a formula of tensors, as torch keeps its own."""

    def of_tensors(*args: Any, out_val: Any = None, **named: Any) -> int:
        shapes = [arg.shape if isinstance(arg, torch.Tensor) else arg for arg in args]
        return int(formula(*shapes, **named))

    return of_tensors


def _recurrent_layer(x: Any, *rest: Any, **_: Any) -> int:
    """One layer in one direction by oneDNN: weights of the input, and of the state."""
    return int(2 * _rows(x) * sum(weight.numel() for weight in rest[:2]))


def _recurrent(x: Any, weights: Any, *_: Any, **__: Any) -> int:
    """All layers by cuDNN or MIOpen: every matrix once for each row of the input."""
    return int(2 * _rows(x) * sum(weight.numel() for weight in weights if weight.dim() == _MATRIX))


def _recurrent_mps(x: Any, _: Any, weights: Any, *__: Any, **___: Any) -> int:
    return _recurrent(x, weights)


def _trilinear(
    first: Any, weight: Any, second: Any, expand1: Any, expand2: Any, expand3: Any, *_: Any, **__: Any
) -> int:
    """A multiplication and an addition for each element of the product before it is summed."""
    shapes = []
    for tensor, dims in ((first, expand1), (weight, expand2), (second, expand3)):
        shape = list(tensor.shape)
        for dim in sorted(dims):
            shape.insert(dim, 1)
        shapes.append(shape)
    return int(2 * prod(max(sizes) for sizes in zip(*shapes, strict=True)))


def _mm(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """A product of which one matrix may be sparse: only its elements count."""
    if left.layout is not torch.strided:
        return int(2 * _stored(left) * right.shape[1])
    if right.layout is not torch.strided:
        return int(2 * left.shape[0] * _stored(right))
    return int(2 * left.numel() * right.shape[1])


def _addmm(_: Any, left: Any, right: Any, *__: Any, **___: Any) -> int:
    return _mm(left, right)


def _stored(matrix: Any) -> int:
    values = matrix._nnz() if matrix.layout is torch.sparse_coo else matrix.values().numel()
    return int(values)


def _mv(matrix: Any, *_: Any, **__: Any) -> int:
    return int(2 * (matrix.numel() if matrix.layout is torch.strided else _stored(matrix)))


def _addmv(_: Any, matrix: Any, *__: Any, **___: Any) -> int:
    return _mv(matrix)


def _dot(vector: Any, *_: Any, **__: Any) -> int:
    return int(2 * vector.numel())


def _addr(_: Any, left: Any, right: Any, *__: Any, **___: Any) -> int:
    return int(2 * left.numel() * right.numel())


def _addbmm(_: Any, left: Any, right: Any, *__: Any, **___: Any) -> int:
    return int(2 * left.numel() * right.shape[2])


def _grouped_mm(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Groups of rows of `left`, or of the dimension that is summed over."""
    return int(2 * left.numel() * right.shape[-1])


def _embedding_bag(weight: Any, indices: Any, *rest: Any, per_sample_weights: Any = None, **_: Any) -> int:
    """Weighted sums; a sum or mean without weights is counted nowhere."""
    weighted = per_sample_weights if per_sample_weights is not None else rest[4] if len(rest) > _WEIGHTS_AT else None
    return 0 if weighted is None else int(2 * indices.numel() * weight.shape[1])


def _rows(x: Any) -> int:
    return int(x.numel() // max(1, x.shape[-1]))


_MATRIX = 2
_WEIGHTS_AT = 4
_OWN = {
    "mkldnn_rnn_layer": _recurrent_layer,
    "_cudnn_rnn": _recurrent,
    "miopen_rnn": _recurrent,
    "_lstm_mps": _recurrent_mps,
    "_trilinear": _trilinear,
    "mm": _mm,
    "_sparse_mm": _mm,
    "addmm": _addmm,
    "_sparse_addmm": _addmm,
    "_int_mm": _mm,
    "mv": _mv,
    "addmv": _addmv,
    "dot": _dot,
    "vdot": _dot,
    "addr": _addr,
    "addbmm": _addbmm,
    "_grouped_mm": _grouped_mm,
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_forward_only": _embedding_bag,
}
_HEAVY = re.compile(
    "mm|mv|conv|rnn|lstm|gru|linear|attention|linalg|fft|cholesky|solve|inverse|svd|lu_factor|geqrf|ormqr|orgqr|"
    "matrix_exp|cdist|pdist|multi_head|transformer_encoder|ctc_loss|einsum|histogram"
)
"""Parts of the names of torch's ops that take more than a few operations an element."""
_LIGHT = re.compile("upsample|check_errors|to_sparse|_prepack|fftshift|fftfreq|conv_tbc_reorder|_weight_int4pack$")


def is_uncounted(operation: Any) -> bool:
    """Whether an op without a formula may do much: unknown ops of libraries, and some of torch's."""
    packet: str = getattr(operation, "_qualified_op_name", "") or str(getattr(operation, "__name__", operation))
    space, _, name = packet.rpartition("::")
    if space in ("aten", "prims"):
        return bool(_HEAVY.search(name)) and not _LIGHT.search(name)
    return space not in _LIGHT_LIBRARIES and not _LIGHT.search(name)


_LIGHT_LIBRARIES = ("c10d", "_c10d_functional", "c10d_functional", "profiler", "prim", "inductor", "debugprims")


def formulas() -> Mapping[Any, Any]:
    """Formula by op, each called with the op's arguments and `out_val`."""
    more: dict[Any, Any] = {}
    for name, same in (
        ("_scaled_dot_product_flash_attention_for_cpu", _aten._scaled_dot_product_flash_attention),
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            _aten._scaled_dot_product_flash_attention_backward,
        ),
    ):
        if hasattr(_aten, name):
            more[getattr(_aten, name)] = flop_registry[same]
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        more[torch.ops.mkldnn._linear_pointwise] = _with_shapes(_linear)
    in_place = {f"{name}_": formula for name, formula in _OWN.items() if name.startswith("add")}
    in_place["baddbmm_"] = flop_registry[_aten.baddbmm]
    own = {getattr(_aten, name): formula for name, formula in {**_OWN, **in_place}.items() if hasattr(_aten, name)}
    return {**more, **flop_registry, **own}


_counting: list[CountingMode] = []


def count_operations(operations: int) -> None:
    """Report operations to the counters that torch's dispatcher does not see, because they are not ops of torch's."""
    for each in _counting:
        each.total += operations


class CountingMode(TorchDispatchMode):
    """Counts the operations of what runs inside, in `total`, and what `count_operations` receives meanwhile.

    `uncounted` are the ops that ran and have no formula, although they may do much.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.uncounted: set[str] = set()
        self._formulas = formulas()
        self._passed: set[Any] = set()

    def __enter__(self) -> CountingMode:
        _counting.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        _counting.remove(self)
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", func)
        formula = self._formulas.get(packet)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        elif packet not in self._passed:
            self._passed.add(packet)
            if is_uncounted(packet):
                self.uncounted.add(str(packet))
        return out
