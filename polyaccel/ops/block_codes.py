"""The operations on blocks of numbers in 8 bits of a dynamic code: how optimizer states are held in a byte an element.

`polyaccel.ops.dynamic_code` has the values of the code. Signed ones are for averages, the others for magnitudes.

A block's scale is its element of the largest magnitude, with its sign; bitsandbytes takes the magnitude. So that
element stands for 1, which the signed code has and -1 not, and a block that is decoded and encoded again has the bits
that it had: checkpoints hold the numbers, and resume with the same bytes.

Accelerators whose kernel table lacks one of `BLOCK_CODE_OPS` hold no states in 8 bits.
"""

from __future__ import annotations

from typing import Any, Protocol

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import CODE_BLOCK, DType
from polyaccel.errors import ShardingError
from polyaccel.ops.base import Op


class EncodeBlocksFn(Protocol):
    def __call__(self, source: Buffer, codes: Buffer, scales: Buffer, *, signed: bool) -> None:
        """Encode blocks of `CODE_BLOCK` elements, each number as the nearest of the code times the scale.

        A block that is not finite has scale NaN, so that it is decoded to NaN. A block of zeros has scale 0.

        Args:
            source: Elements of a floating-point type, float32 where `codes` stand for them exactly.
            codes: Overwritten. uint8, one an element: places in `dynamic_code`.
            scales: Overwritten. float32, one a block. The last block may be shorter.
            signed: The code that has negative values too.

        Raises:
            ShardingError: Sizes or types do not fit.
        """


class DecodeBlocksFn(Protocol):
    def __call__(self, out: Buffer, codes: Buffer, scales: Buffer, *, signed: bool) -> None:
        """Compute `out[i] = code[codes[i]] * scales[i // CODE_BLOCK]`.

        Args:
            out: Overwritten. float32.
            codes: Codes of `EncodeBlocksFn`.
            scales: Scales of `EncodeBlocksFn`.
            signed: As they were encoded.

        Raises:
            ShardingError: Sizes or types do not fit.
        """


ENCODE_BLOCKS: Op[EncodeBlocksFn] = Op("encode_blocks", "blocks of numbers to 8 bits of a dynamic code")
DECODE_BLOCKS: Op[DecodeBlocksFn] = Op("decode_blocks", "8 bits of a dynamic code back to numbers")

BLOCK_CODE_OPS: tuple[Op[Any], ...] = (ENCODE_BLOCKS, DECODE_BLOCKS)
"""The ops of which an accelerator's kernel table has all or none."""


def blocks_in(numel: int) -> int:
    """Return the number of blocks that `numel` elements need."""
    return -(-numel // CODE_BLOCK)


def check_blocks(values: Buffer, codes: Buffer, scales: Buffer) -> None:
    """Raise ShardingError where sizes or types are not those of `EncodeBlocksFn`."""
    if codes.dtype is not DType.UINT8 or codes.numel != values.numel:
        raise ShardingError(f"{codes!r} are not the uint8 codes of {values!r}", value=codes.numel)
    if scales.dtype is not DType.FLOAT32 or scales.numel != blocks_in(values.numel):
        raise ShardingError(
            f"{scales!r} are not the {blocks_in(values.numel)} float32 scales of {values!r}", value=scales.numel
        )
