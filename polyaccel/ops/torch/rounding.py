"""Writing weights to torch tensors of their type, rounded to nearest even or stochastically.

See [Note: Stochastic rounding] in `polyaccel.ops.base`. torch computes with signed integers only. In 32 bits their sums
and products wrap like those of unsigned integers; the sign bits that a shift to the right brings in are masked away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyaccel.ops.base import StochasticRounding
from polyaccel.ops.rounding import MULTIPLIERS, SHIFTS, halves


def write_weights(target: Tensor, values: Tensor, rounding: StochasticRounding | None) -> None:
    """Copy `values` to `target` in `target`'s type: stochastically with a `rounding` and 16 bits, else to nearest.

    `rounding.start` is the index of the first element.
    """
    if rounding is None or target.dtype not in (torch.bfloat16, torch.float16):
        target.copy_(values)
        return
    bits = values.float().view(torch.int32)
    random = _random_bits(rounding, bits)
    narrow = _bfloat16 if target.dtype is torch.bfloat16 else _float16
    target.view(torch.int16).copy_(narrow(bits, random))


def _random_bits(rounding: StochasticRounding, like: Tensor) -> Tensor:
    """See `polyaccel.ops.rounding`."""
    low, high = map(signed, halves(rounding.key))
    x = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
    x.add_(signed(rounding.start)).bitwise_xor_(low)
    for round_, (shift, multiplier) in enumerate(zip(SHIFTS, MULTIPLIERS, strict=False)):
        x.bitwise_xor_(_shifted(x, shift)).mul_(signed(multiplier))
        if round_ == 0:
            x.add_(high)
    return x.bitwise_xor_(_shifted(x, SHIFTS[-1]))


def signed(value: int) -> int:
    """The lower 32 bits of `value` as a signed number."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def _shifted(x: Tensor, places: int) -> Tensor:
    """`x >> places` with zeros coming in."""
    return (x >> places).bitwise_and_((1 << 32 - places) - 1)


def _bfloat16(bits: Tensor, random: Tensor) -> Tensor:
    magnitude = bits & 0x7FFFFFFF
    rounded = (bits + torch.where(magnitude > 0x7F7F0000, 0x8000, _shifted(random, 16))) >> 16
    return torch.where(magnitude > 0x7F800000, bits >> 16 | 0x40, rounded)


def _float16(bits: Tensor, random: Tensor) -> Tensor:
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + torch.where(magnitude > 0x477FE000, 0x1000, _shifted(random, 19)) - (112 << 23)) >> 13
    special = torch.where(magnitude > 0x7F800000, 0x7E00 | magnitude >> 13 & 0x3FF, 0x7C00)
    is_small = magnitude < 0x38800000
    # In units of 2**-24 with 21 binary places, which are added apart for want of a 32nd bit.
    places = (torch.where(is_small, magnitude, 0).view(torch.float32) * 2.0**45).to(torch.int32)
    small = (places >> 21) + (((places & 0x1FFFFF) + _shifted(random, 11)) >> 21)
    found = torch.where(magnitude >= 0x47800000, special, torch.where(is_small, small, normal))
    return torch.where(bits < 0, found - 0x8000, found)
