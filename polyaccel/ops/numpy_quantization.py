"""Quantisation by blocks on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.buffer import Buffer
from polyaccel.ops.quantization import MOST, bits_of

Array = npt.NDArray[Any]


def quantize(source: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
    """See `QuantizeFn`."""
    bits = bits_of(source, codes, scales, block_numel)
    with np.errstate(all="ignore"):
        blocks = _blocks(source.raw.astype(np.float32), block_numel)
        largest = np.max(np.abs(blocks), axis=1, initial=0)  # NaN if there is one
        scale = np.where(np.isfinite(largest), largest / np.float32(MOST[bits]), np.float32(np.nan))
        rounded = np.rint(blocks / np.where(scale > 0, scale, np.float32(np.nan))[:, None])
        values = np.nan_to_num(rounded).clip(-MOST[bits], MOST[bits]).astype(np.int8).reshape(-1)
    scales.raw[:] = scale
    if bits == 8:
        codes.raw[:] = values[: source.numel]
    else:
        pairs = (values[: 2 * codes.numel].view(np.uint8) & 15).reshape(-1, 2)
        codes.raw[:] = pairs[:, 0] | pairs[:, 1] << 4
    codes.mark_written()
    scales.mark_written()


def dequantize(out: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
    """See `DequantizeFn`."""
    values = codes.raw
    if bits_of(out, codes, scales, block_numel) == 4:
        low, high = codes.raw & 15, codes.raw >> 4
        values = (np.stack((low, high), axis=1).reshape(-1)[: out.numel] ^ 8).astype(np.int8) - 8
    with np.errstate(all="ignore"):
        blocks = _blocks(values.astype(np.float32), block_numel) * scales.raw[:, None]
        out.raw[:] = blocks.reshape(-1)[: out.numel]
    out.mark_written()


def _blocks(values: Array, block_numel: int) -> Array:
    """Shape (blocks, block_numel), the last block filled up with zeros."""
    missing = -values.size % block_numel
    return np.concatenate((values, np.zeros(missing, values.dtype))).reshape(-1, block_numel)
