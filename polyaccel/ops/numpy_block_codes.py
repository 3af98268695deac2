"""Kernels of `BLOCK_CODE_OPS` on numpy arrays, with the bits of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import CODE_BLOCK
from polyaccel.ops.base import Op
from polyaccel.ops.block_codes import DECODE_BLOCKS, ENCODE_BLOCKS, check_blocks
from polyaccel.ops.dynamic_code import code_borders, dynamic_code


def encode_blocks(source: Buffer, codes: Buffer, scales: Buffer, *, signed: bool) -> None:
    """Implement `EncodeBlocksFn`."""
    check_blocks(source, codes, scales)
    if source.numel:
        with np.errstate(all="ignore"):
            values = source.raw.astype(np.float32)
            blocks = np.pad(values, (0, -values.size % CODE_BLOCK)).reshape(-1, CODE_BLOCK)
            magnitudes = np.abs(blocks)
            at = np.argmax(magnitudes, axis=1)[:, None]  # the first NaN where there is one
            scale = np.take_along_axis(blocks, at, axis=1)[:, 0]
            scale = np.where(np.isfinite(scale), scale, np.float32(np.nan))
            shares = (blocks / np.where(scale == 0, np.float32(1), scale)[:, None]).reshape(-1)[: values.size]
        codes.raw[:] = np.searchsorted(code_borders(signed=signed), shares)
        scales.raw[:] = scale
    codes.bump_version()
    scales.bump_version()


def decode_blocks(out: Buffer, codes: Buffer, scales: Buffer, *, signed: bool) -> None:
    """Implement `DecodeBlocksFn`."""
    check_blocks(out, codes, scales)
    with np.errstate(all="ignore"):
        out.raw[:] = dynamic_code(signed=signed)[codes.raw] * np.repeat(scales.raw, CODE_BLOCK)[: out.numel]
    out.bump_version()


BLOCK_CODE_KERNELS: dict[Op[Any], Callable[..., Any]] = {ENCODE_BLOCKS: encode_blocks, DECODE_BLOCKS: decode_blocks}
