"""Values in 8 and 4 bits with their scales, as functions of whole operands.

Float8 is Micikevicius et al. 2022 (arXiv 2209.05433): E4M3 has 3 bits of mantissa and ends at 448, E5M2 2 bits and
57344. Scales are those of torchao's float8 training. Blocks of 32 elements with a power of two are the OCP Microscaling
Formats specification 1.0, sections 5 and 6.3 (Rouhani et al. 2023, arXiv 2310.10537).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 32
"""Elements that share a power of two."""
_LEAST = 1e-12
"""The least magnitude that a scale is made for: torchao's."""
_FLOAT8_EXPONENT, _FLOAT4_EXPONENT = 8, 2
"""Exponents of the largest number of E4M3, 448, and of E2M1, 6."""
_FLOAT4_MAX = 6.0
_MOST_EXPONENT = 127
"""Of a scale in E8M0."""


def float8_scale(amax: Tensor, dtype: torch.dtype, *, is_power: bool) -> Tensor:
    """Return the factor that brings the magnitude `amax` to the largest of `dtype`; rounded down to a power of two."""
    scale = (torch.finfo(dtype).max / amax.double().clamp(min=_LEAST)).float()
    if not is_power:
        return scale
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(mantissa.sign() * 0.5, exponent)


def to_float8(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values` times `scale` in `dtype`, rounded to even; what is too large becomes the largest."""
    largest = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-largest, largest).to(dtype)


def in_float8(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `values` are in `dtype` with `scale`, in float32."""
    return to_float8(values, scale, dtype).float() / scale


def to_float4(values: Tensor) -> Tensor:
    """Return float32 `values` at the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (E2M1), ties to even mantissas."""
    size = values.abs().clamp(max=_FLOAT4_MAX)
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, values)


def in_blocks(values: Tensor, dim: int, bits: int) -> Tensor:
    """Return what `values` are in MXFP8 (E4M3) or MXFP4, in float32, in blocks of 32 along `dim`.

    The last block of a row may be shorter. A block with an infinite or undefined element is undefined.
    """
    moved = values.float().movedim(dim, -1)
    size = moved.shape[-1]
    rows = functional.pad(moved, (0, -size % BLOCK))
    rows = rows.view(*rows.shape[:-1], -1, BLOCK)
    amax = rows.abs().amax(-1, keepdim=True)
    top = _FLOAT8_EXPONENT if bits == 8 else _FLOAT4_EXPONENT
    exponent = (torch.frexp(amax).exponent - 1 - top).clamp(-_MOST_EXPONENT, _MOST_EXPONENT)
    scale = torch.where(amax.isfinite(), torch.ldexp(torch.ones_like(amax), exponent), torch.nan)
    rounded = _round(bits)(rows / scale) * scale
    return rounded.flatten(-2)[..., :size].movedim(-1, dim)


def _round(bits: int) -> Callable[[Tensor], Tensor]:
    if bits != 8:
        return to_float4
    one = torch.ones(())
    return lambda values: to_float8(values, one.to(values.device), torch.float8_e4m3fn).float()
