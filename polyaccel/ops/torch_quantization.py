"""Quantisation by blocks on torch tensors, on any device that torch knows."""

from __future__ import annotations

import torch
from torch import Tensor

from polyaccel.buffer import Buffer
from polyaccel.ops.quantization import MOST, bits_of


def quantize(source: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
    """See `QuantizeFn`."""
    bits = bits_of(source, codes, scales, block_numel)
    if source.numel:
        blocks = _blocks(source.raw.float(), block_numel)
        largest = blocks.abs().amax(dim=1)  # NaN if there is one
        scale = torch.where(largest.isfinite(), largest / MOST[bits], torch.nan)
        rounded = blocks.div_(torch.where(scale > 0, scale, torch.nan).unsqueeze(1)).round_()
        values = rounded.nan_to_num_(0.0).clamp_(-MOST[bits], MOST[bits]).to(torch.int8).view(-1)
        scales.raw.copy_(scale)
        if bits == 8:
            codes.raw.copy_(values[: source.numel])
        else:
            pairs = (values[: 2 * codes.numel].view(torch.uint8) & 15).view(-1, 2)
            codes.raw.copy_(pairs[:, 0] | pairs[:, 1] << 4)
    codes.mark_written()
    scales.mark_written()


def dequantize(out: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
    """See `DequantizeFn`."""
    values: Tensor = codes.raw
    if bits_of(out, codes, scales, block_numel) == 4:
        pairs = torch.stack((values & 15, values >> 4), dim=1).view(-1)[: out.numel]
        values = (pairs ^ 8).to(torch.int8) - 8
    if out.numel:
        blocks = _blocks(values.float(), block_numel).mul_(scales.raw.unsqueeze(1))
        out.raw.copy_(blocks.view(-1)[: out.numel])
    out.mark_written()


def _blocks(values: Tensor, block_numel: int) -> Tensor:
    """A copy of shape (blocks, block_numel), the last block filled up with zeros."""
    missing = -values.numel() % block_numel
    return torch.cat((values, values.new_zeros(missing))).view(-1, block_numel)
