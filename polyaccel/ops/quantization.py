"""What a quantised buffer consists of: which width its codes have, and whether their sizes fit together."""

from __future__ import annotations

from polyaccel.buffer import Buffer
from polyaccel.errors import ShardingError
from polyaccel.types import DType

MOST = {8: 127, 4: 7}
"""The largest code of each width."""


def bits_of(values: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> int:
    """8 for int8 `codes`, 4 for uint8. Raises ShardingError when types or sizes are not those of `QuantizeFn`."""
    bits = {DType.INT8: 8, DType.UINT8: 4}.get(codes.dtype)
    if bits is None:
        raise ShardingError(
            f"{codes!r} cannot hold codes", cure="use int8, or uint8 for 4 bits", value=codes.dtype.value
        )
    if block_numel < 1 or (bits == 4 and block_numel % 2):
        raise ShardingError(
            f"blocks of {block_numel} cannot be quantised to {bits} bits", cure="use an even size", value=block_numel
        )
    wanted = values.numel if bits == 8 else (values.numel + 1) // 2
    if codes.numel != wanted:
        raise ShardingError(f"{codes!r} does not match {values!r}: {wanted} are needed", value=codes.numel)
    blocks = (values.numel + block_numel - 1) // block_numel
    if scales.numel != blocks or scales.dtype is not DType.FLOAT32:
        raise ShardingError(f"{scales!r} are not the {blocks} float32 scales of {values!r}", value=scales.numel)
    return bits
