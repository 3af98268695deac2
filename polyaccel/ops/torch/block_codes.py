"""Kernels of `BLOCK_CODE_OPS` on torch tensors, on any device that torch supports."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import CODE_BLOCK
from polyaccel.ops.base import Op
from polyaccel.ops.block_codes import DECODE_BLOCKS, ENCODE_BLOCKS, check_blocks
from polyaccel.ops.dynamic_code import code_borders, dynamic_code


def encode_blocks(source: Buffer, codes: Buffer, scales: Buffer, *, signed: bool) -> None:
    """Implement `EncodeBlocksFn`."""
    check_blocks(source, codes, scales)
    if source.numel:
        values = source.raw.float()
        blocks = functional.pad(values, (0, -values.numel() % CODE_BLOCK)).view(-1, CODE_BLOCK)
        largest, at = blocks.abs().max(dim=1)  # NaN where there is one
        scale = torch.where(largest.isfinite(), blocks.gather(1, at.unsqueeze(1)).squeeze(1), torch.nan)
        shares = (blocks / torch.where(scale == 0, 1.0, scale).unsqueeze(1)).view(-1)[: source.numel]
        codes.raw.copy_(torch.bucketize(shares, _borders(signed, values.device), out_int32=True))
        scales.raw.copy_(scale)
    codes.bump_version()
    scales.bump_version()


def decode_blocks(out: Buffer, codes: Buffer, scales: Buffer, *, signed: bool) -> None:
    """Implement `DecodeBlocksFn`."""
    check_blocks(out, codes, scales)
    if out.numel:
        target: Tensor = out.raw
        torch.index_select(_values(signed, target.device), 0, codes.raw.int(), out=target)
        whole = out.numel - out.numel % CODE_BLOCK
        target[:whole].view(-1, CODE_BLOCK).mul_(scales.raw[: whole // CODE_BLOCK].unsqueeze(1))
        if whole < out.numel:
            target[whole:].mul_(scales.raw[-1])
    out.bump_version()


@cache
def _values(signed: bool, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(dynamic_code(signed=signed))).to(device)


@cache
def _borders(signed: bool, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(code_borders(signed=signed))).to(device)


BLOCK_CODE_KERNELS: dict[Op[Any], Callable[..., Any]] = {ENCODE_BLOCKS: encode_blocks, DECODE_BLOCKS: decode_blocks}
