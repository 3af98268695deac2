"""A matrix as codes of 4 or 8 bits, with a scale for each group of a row.

[Note: Codes of frozen weights]
A row is cut into groups of `group_size` inputs; its last group may be shorter. The scale of a group is its largest
magnitude, in float32. `int8` and `int4` have the integers of [Note: Integers in groups] in integer_groups, the second
plus 7. A code of `nf4` stands for the level between -1 and 1 that is nearest to a weight over its scale: one of 16,
quantiles of a normal distribution (arXiv 2305.14314, appendix E). Of 4 bits two codes are a byte, the first in the high
bits.

Double quantisation holds the scales of a row as a byte each. The least one of 256 scales and a 255th of their span are
in float32. Floats are stored as int32 with the same bits: no engine converts integers to the type of its parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polyaccel.errors import PolyaccelError
from polyaccel.torch.integer_groups import MOST, in_groups, integers, magnitudes, steps_of

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The levels of `nf4`, ascending."""
_BITS = {"int4": 4, "int8": 8}
DTYPES = ("nf4", *_BITS)
SCALES_A_SPAN = 256
"""Scales that share a least one and a step, under double quantisation."""
_STEPS = 255


class WeightFormat(ABC):
    """What a product has to know of a matrix in codes."""

    @abstractmethod
    def decode(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the matrix as `dtype`."""

    def multiply(self, x: Tensor, bias: Tensor | None, stored: Sequence[Tensor]) -> Tensor:
        """Return the forward product; backward multiplies by `decode`."""
        return functional.linear(x, self.decode(stored, x.dtype), bias)


@dataclass(frozen=True)
class CodeFormat(WeightFormat):
    """How a matrix of `rows` x `columns` is stored. See [Note: Codes of frozen weights].

    Raises PolyaccelError for an unknown `dtype`, and for a group of no elements.
    """

    dtype: str
    group_size: int
    double_quant: bool
    rows: int
    columns: int

    def __post_init__(self) -> None:
        require_format(self.dtype, self.group_size)

    @property
    def size(self) -> int:
        """The inputs of a whole group."""
        return min(self.group_size, self.columns)

    @property
    def groups(self) -> int:
        """The groups of a row."""
        return -(-self.columns // self.size)

    @property
    def code_name(self) -> str:
        """What a layer calls its codes: a state dict of another format does not fit, though its shapes may."""
        return f"weight_{self.dtype}_{self.size}"

    def encode(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the codes and scales of a matrix: two tensors, or three under double quantisation.

        Raises PolyaccelError for a matrix of another shape.
        """
        if weight.shape != (self.rows, self.columns):
            raise PolyaccelError(
                f"a weight of shape {tuple(weight.shape)} for a layer of {self.rows} outputs and {self.columns} inputs",
                hint="load the weights of a model of the same sizes",
                value=tuple(weight.shape),
            )
        groups = in_groups(weight.detach().float(), self.size)
        stored = self._stored(magnitudes(groups))
        codes = self._codes(groups, self.scales(stored)).flatten(1)[:, : self.columns].contiguous()
        if self.dtype == "int8":
            return codes, *stored
        codes = functional.pad(codes, (0, self.columns % 2))
        return codes[:, 0::2] << 4 | codes[:, 1::2], *stored

    def _codes(self, groups: Tensor, scales: Tensor) -> Tensor:
        if self.dtype in _BITS:
            found = integers(groups, scales, _BITS[self.dtype])
            return found if self.dtype == "int8" else (found + MOST[4]).to(torch.uint8)
        levels = _levels(groups.device)
        units = groups / torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
        return torch.bucketize(units.contiguous(), (levels[1:] + levels[:-1]) / 2).to(torch.uint8)

    def _stored(self, scales: Tensor) -> tuple[Tensor, ...]:
        if not self.double_quant:
            return (_as_int(scales),)
        spans = _spans(scales)
        least = spans.amin(-1, keepdim=True)
        step = (spans.amax(-1, keepdim=True) - least) / _STEPS
        codes = ((spans - least) / torch.where(step == 0, 1.0, step)).round_().clamp_(0, _STEPS).to(torch.uint8)
        return codes.flatten(1)[:, : self.groups].contiguous(), _as_int(torch.cat([least, step], -1))

    def scales(self, stored: Sequence[Tensor]) -> Tensor:
        """Return the scales (rows, groups) in float32 from what is stored of them."""
        if not self.double_quant:
            return stored[0].view(torch.float32)
        spans = stored[1].view(torch.float32)
        scales = _spans(stored[0].float()) * spans[..., 1:] + spans[..., :1]
        return scales.flatten(1)[:, : self.groups]

    def decode(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the matrix as `dtype`, computed in float32."""
        codes, *others = stored
        scales = self.scales(others).unsqueeze(-1)
        if self.dtype in _BITS:
            scales = steps_of(scales, _BITS[self.dtype])
        if self.dtype == "int8":
            units = codes.float()
        else:
            pairs = _pairs(self.dtype, codes.device)
            units = pairs.index_select(0, codes.flatten().int()).view(self.rows, -1)[:, : self.columns]
        padding = self.groups * self.size - self.columns
        grouped = (functional.pad(units, (0, padding)) if padding else units).reshape(self.rows, self.groups, self.size)
        return (grouped * scales).flatten(1)[:, : self.columns].to(dtype)


def require_format(dtype: str, group_size: int) -> None:
    """Raise PolyaccelError unless there is such a format."""
    if dtype not in DTYPES:
        raise PolyaccelError(f"no quantised weights of {dtype!r}", hint=f"use one of {', '.join(DTYPES)}", value=dtype)
    if group_size < 1:
        raise PolyaccelError(f"quantised weights with group_size {group_size}", hint="use 64", value=group_size)


def _spans(scales: Tensor) -> Tensor:
    """The scales of rows in spans; the last one is filled up with its last scale, which changes no span's bounds."""
    groups = scales.shape[1]
    size = min(SCALES_A_SPAN, groups)
    padding = -groups % size
    filled = torch.cat([scales, scales[:, -1:].expand(-1, padding)], 1) if padding else scales
    return filled.view(len(scales), -1, size)


def _as_int(floats: Tensor) -> Tensor:
    return floats.contiguous().view(torch.int32)


_TABLES: dict[tuple[str, str, torch.device], Tensor] = {}


def _levels(device: torch.device) -> Tensor:
    return _table("levels", "nf4", device, lambda: torch.tensor(LEVELS))


def _pairs(dtype: str, device: torch.device) -> Tensor:
    """What each byte stands for, two levels or two integers: one look-up gives both."""

    def make() -> Tensor:
        levels = torch.tensor(LEVELS) if dtype == "nf4" else torch.arange(16.0) - MOST[4]
        return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1)

    return _table("pairs", dtype, device, make)


def _table(kind: str, dtype: str, device: torch.device, make: Any) -> Tensor:
    key = (kind, dtype, device)
    if key not in _TABLES:
        with torch.device("cpu"):
            _TABLES[key] = make().to(device)
    return _TABLES[key]
