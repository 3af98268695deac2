"""Optimizer states in a byte an element, as buffers of float32 numbers.

[Note: Blocks of states]
Blocks are counted from the start of a parameter, and shards end where blocks end (`SliceOptimizer.granules`). So codes
do not depend on stage, ranks or buckets. The last block of a parameter is as long as what is left. Whatever reads or
writes a `BlockBuffer` sees numbers: checkpoints hold float32, and load into states of 32 bits and back.
A write that ends inside a block keeps the numbers of that block, so that the next write of its rest encodes them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer, CountedBuffer, WriteCount
from polyaccel.core.types import CODE_BLOCK, DType
from polyaccel.errors import InvariantError
from polyaccel.ops.block_codes import DECODE_BLOCKS, ENCODE_BLOCKS, blocks_in
from polyaccel.zero.plan.layout import Slice

_TILE_NUMEL = 2**20


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Elements [offset, end) of the buffer, whose first block has the number `block`."""

    offset: int
    end: int
    block: int


@dataclass(slots=True)
class BlockMemory:
    """Codes and scales of a state, and the stretches of the shard that they are of."""

    codes: Buffer
    scales: Buffer
    compute: Accelerator
    signed: bool
    stretches: Sequence[_Stretch]
    open_blocks: dict[int, Buffer] = field(default_factory=dict)
    """The numbers of blocks that were written in part, by block."""

    @classmethod
    def over(
        cls, codes: Buffer, scales: Buffer, compute: Accelerator, slices: Sequence[Slice], *, signed: bool
    ) -> BlockMemory:
        """The memory of a shard with `slices`, each of which begins with a block."""
        stretches, block = list[_Stretch](), 0
        for piece in slices:
            end = piece.shard_offset + piece.length
            last = stretches[-1] if stretches else None
            if last is not None and last.end == piece.shard_offset and (last.end - last.offset) % CODE_BLOCK == 0:
                stretches[-1] = _Stretch(last.offset, end, last.block)
            else:
                stretches.append(_Stretch(piece.shard_offset, end, block))
            block += blocks_in(piece.length)
        return cls(codes, scales, compute, signed, stretches)

    def parts(self, begin: int, end: int) -> Iterator[tuple[_Stretch, int, int]]:
        """What [begin, end) of the buffer has of each stretch: (stretch, first and last element, from its start)."""
        for one in self.stretches:
            low, high = max(begin, one.offset), min(end, one.end)
            if low < high:
                yield one, low - one.offset, high - one.offset

    def decode(self, one: _Stretch, low: int, high: int, out: Buffer) -> None:
        """Decode elements of a stretch, from the start of a block on."""
        self.compute.kernels()[DECODE_BLOCKS](out, *self._views(one, low, high), signed=self.signed)

    def encode(self, one: _Stretch, low: int, high: int, source: Buffer) -> None:
        """Encode elements of a stretch, from the start of a block to the end of one."""
        self.compute.kernels()[ENCODE_BLOCKS](source, *self._views(one, low, high), signed=self.signed)

    def _views(self, one: _Stretch, low: int, high: int) -> tuple[Buffer, Buffer]:
        codes = self.codes.view(one.offset + low, high - low)
        return codes, self.scales.view(one.block + low // CODE_BLOCK, blocks_in(high - low))

    def write_inside(self, one: _Stretch, low: int, high: int, source: Buffer) -> None:
        """Overwrite a part of one block."""
        block = one.block + low // CODE_BLOCK
        begin = low - low % CODE_BLOCK
        end = min(begin + CODE_BLOCK, one.end - one.offset)
        if (numbers := self.open_blocks.get(block)) is None:
            numbers = self.open_blocks[block] = self.compute.allocate(end - begin, DType.FLOAT32)
            self.decode(one, begin, end, numbers)
        numbers.view(low - begin, high - low).copy_from(source)
        self.encode(one, begin, end, numbers)


class BlockBuffer(CountedBuffer):
    """Elements [offset, offset + numel) of a state. Padding between parameters is zero, and stays so."""

    def __init__(self, memory: BlockMemory, numel: int, *, offset: int = 0, writes: WriteCount | None = None) -> None:
        super().__init__(writes)
        self.memory = memory
        self.numel = numel
        self.dtype = DType.FLOAT32
        self.device = memory.codes.device
        self._offset = offset

    @property
    def raw(self) -> Any:
        self._refuse("raw memory")

    def data_ptr(self) -> int:
        self._refuse("address")

    def _refuse(self, what: str) -> NoReturn:
        raise InvariantError(f"{self!r} is held in 8 bits and has no {what}", hint="copy it to a buffer of numbers")

    def view(self, offset: int, numel: int) -> BlockBuffer:
        self._check_range(offset, numel)
        return BlockBuffer(self.memory, numel, offset=self._offset + offset, writes=self._writes)

    def decode_to(self, out: Buffer) -> None:
        """Write the numbers to float32 memory of the kernels."""
        memory, reached = self.memory, 0
        for one, low, high in memory.parts(self._offset, self._offset + self.numel):
            start = one.offset + low - self._offset
            if reached < start:
                out.view(reached, start - reached).fill(0.0)
            if inside := low % CODE_BLOCK:
                stop = min(high, low - inside + CODE_BLOCK)
                block = memory.compute.allocate(stop - low + inside, DType.FLOAT32)
                memory.decode(one, low - inside, stop, block)
                out.view(start, stop - low).copy_from(block.view(inside, stop - low))
                start, low = start + stop - low, stop
            if low < high:
                memory.decode(one, low, high, out.view(start, high - low))
            reached = start + high - low
        if reached < self.numel:
            out.view(reached, self.numel - reached).fill(0.0)

    def encode_from(self, source: Buffer) -> None:
        """Overwrite with numbers of float32 in memory of the kernels."""
        memory = self.memory
        for one, low, high in memory.parts(self._offset, self._offset + self.numel):
            start = one.offset - self._offset
            inner = min(high, low + -low % CODE_BLOCK)
            outer = high if one.offset + high == one.end else max(inner, high - high % CODE_BLOCK)
            if low < inner:
                memory.write_inside(one, low, inner, source.view(start + low, inner - low))
            if inner < outer:
                memory.encode(one, inner, outer, source.view(start + inner, outer - inner))
            if outer < high:
                memory.write_inside(one, outer, high, source.view(start + outer, high - outer))
        self.bump_version()

    def copy_from(self, source: Buffer) -> None:
        self._check_source(source)
        for start, numel in self._tiles():
            tile = self.memory.compute.allocate(numel, DType.FLOAT32)
            tile.copy_from(source.view(start, numel))
            self.view(start, numel).encode_from(tile)

    def fill(self, value: float) -> None:
        for start, numel in self._tiles():
            tile = self.memory.compute.allocate(numel, DType.FLOAT32)
            tile.fill(value)
            self.view(start, numel).encode_from(tile)

    def to_bytes(self) -> bytes:
        found = self.memory.compute.allocate(self.numel, DType.FLOAT32)
        self.decode_to(found)
        return found.to_bytes()

    def from_bytes(self, data: bytes | bytearray | memoryview) -> None:
        self._check_nbytes(data)
        numbers = self.memory.compute.allocate(self.numel, DType.FLOAT32)
        numbers.from_bytes(data)
        self.encode_from(numbers)

    def _tiles(self) -> list[tuple[int, int]]:
        return [(start, min(_TILE_NUMEL, self.numel - start)) for start in range(0, self.numel, _TILE_NUMEL)]


def memory_of(state: Buffer) -> tuple[Buffer, ...]:
    """Return the buffers that a state lies in."""
    return (state.memory.codes, state.memory.scales) if isinstance(state, BlockBuffer) else (state,)
