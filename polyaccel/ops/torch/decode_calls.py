"""The structures of csrc/kernels/kernels.h that decoding fills, from tensors."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from polyaccel.ops.decode import LayerPages, PackedWeight

TYPES = {torch.float32: 1, torch.bfloat16: 2}
"""PA_FLOAT32 and PA_BFLOAT16."""
ROWWISE = ("rms_norm", "layer_norm", "silu", "gelu", "gelu_tanh", "relu", "add")
"""The order of `pa_rowwise_kind`."""


class CLinear(ctypes.Structure):
    """`pa_linear`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "w", "bias", "y")),
        *((name, c_int64) for name in ("rows", "inner", "columns", "x_row", "y_row", "w_column", "w_row")),
        ("type", c_int32),
    )


class CGrouped(ctypes.Structure):
    """`pa_grouped`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "bias", "y", "codes", "scales", "steps", "step_scales", "step_sums")),
        *((name, c_int64) for name in ("rows", "inner", "columns", "group", "x_row", "y_row")),
        ("bits", c_int32),
        ("type", c_int32),
    )


_PAGES = ("page", "pages_row", "keys", "values")
_SIZES = ("sequences", "heads", "key_heads", "head", "rotated")
_STRIDES = ("q_row", "k_row", "v_row", "out_row", "q_head", "k_head", "v_head")
_MEMORY = ("q", "k", "v", "out", "cosines", "sines", "positions", "slots", "pages")


class CAttention(ctypes.Structure):
    """`pa_attention`."""

    _fields_ = (
        *((name, c_void_p) for name in _MEMORY),
        *((name, c_int64) for name in (*_PAGES, *_SIZES, *_STRIDES)),
        ("scale", c_float),
        ("type", c_int32),
    )

    def set_tokens(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Fill in what belongs to the new tokens; heads are the second dimension of q, k and v."""
        self.q, self.k, self.v, self.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        self.sequences, self.out_row = len(q), out.stride(0)
        (self.q_row, self.q_head, _), (self.k_row, self.k_head, _) = q.stride(), k.stride()
        self.v_row, self.v_head, _ = v.stride()
        self.slots, self.positions = slots.data_ptr(), positions.data_ptr()


class CRowwise(ctypes.Structure):
    """`pa_rowwise`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "other", "weight", "bias", "y")),
        *((name, c_int64) for name in ("width", "per_row", "x_row", "other_row", "y_row")),
        ("eps", c_float),
        ("kind", c_int32),
        ("type", c_int32),
    )


class CStep(ctypes.Structure):
    """`pa_step`."""

    _fields_ = (("call", c_void_p), ("kind", c_int64))


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def fits(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `pa_linear` takes a weight and a bias."""
    is_known = weight.dtype in TYPES and 1 in weight.stride() and weight.device.type == "cpu"
    return is_known and (bias is None or (bias.dtype is weight.dtype and bias.is_contiguous()))


def linear_call(weight: Tensor, bias: Tensor | None) -> CLinear:
    """The structure of a layer, without rows."""
    columns, inner = weight.shape
    w_column, w_row = weight.stride()
    sizes = (0, inner, columns, inner, columns, w_column, w_row)
    return CLinear(None, weight.data_ptr(), address(bias), None, *sizes, TYPES[weight.dtype])


def grouped_call(weight: PackedWeight) -> CGrouped:
    """The structure of a layer, without rows, bias and scratch memory."""
    memory = (None, None, None, weight.codes.data_ptr(), weight.scales.data_ptr(), None, None, None)
    return CGrouped(*memory, 0, weight.inputs, weight.outputs, weight.group_size, 0, weight.outputs, weight.bits, 0)


def scratch_numel(weight: PackedWeight, rows: int) -> int:
    """Float32 elements of the scratch memory of `pa_grouped`."""
    padded = -(-weight.group_size // 4) * 4
    return rows * -(-weight.inputs // weight.group_size) * (padded // 2 + 2)


def set_scratch(call: CGrouped, weight: PackedWeight, rows: int, scratch: Tensor) -> None:
    """Share out scratch memory of `scratch_numel` elements."""
    groups = -(-weight.inputs // weight.group_size)
    call.step_scales = scratch.data_ptr()
    call.step_sums = call.step_scales + 4 * rows * groups
    call.steps = call.step_sums + 4 * rows * groups


def attention_call(pages: LayerPages, turns: tuple[Tensor, Tensor] | None, heads: int, scale: float) -> CAttention:
    """The structure of attention over a cache, without new tokens."""
    rotated = 0 if turns is None else turns[0].shape[-1]
    call = CAttention(type=TYPES[pages.dtype], scale=scale, pages=pages.table.data_ptr())
    sizes = (
        pages.tokens,
        pages.table.shape[1],
        pages.keys,
        pages.values,
        0,
        heads,
        pages.key_heads,
        pages.head,
        rotated,
    )
    for name, value in zip((*_PAGES, *_SIZES), sizes, strict=True):
        setattr(call, name, value)
    if turns is not None:
        call.cosines, call.sines = turns[0].data_ptr(), turns[1].data_ptr()
    return call


def attention_scratch_numel(pages: LayerPages) -> int:
    """Float32 elements of the scratch memory of a thread of `pa_attend`."""
    return -(-pages.head // 16) * 16 + pages.tokens * int(pages.table.shape[1])
