"""Gathers and reduce-scatters that travel as small integers, over any backend (ZeRO++, Wang et al. 2023, sections 3.1
and 3.3).

[Note: Quantised collective semantics]
A gather gives every rank the same values: those that the codes stand for, its own part included. A reduce-scatter
quantises each rank's contribution once, sends every part straight to the rank that keeps it (an all-to-all, so that no
sum is ever quantised again), and adds in float32 in rank order. The scales of blocks depend on where a buffer
starts, so the bits of a result depend on how a sum is cut into buckets. What is not finite arrives as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from polyaccel.comm.base import Communicator
from polyaccel.comm.collective import UNEVEN_PARTS, Collective, Operation, ended
from polyaccel.comm.collectives.scratch import ScratchPool
from polyaccel.comm.work import CombinedWork, Work
from polyaccel.comm.wrappers.error_feedback import ErrorFeedback
from polyaccel.comm.wrappers.wrapped import WrappedCommunicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import ShardingError
from polyaccel.ops.base import DEQUANTIZE, QUANTIZE, REDUCE, SCALE

Bits = Literal[4, 8]
_CODES: dict[Bits, DType] = {4: DType.UINT8, 8: DType.INT8}
_ADDING = (ReduceOp.SUM, ReduceOp.AVG)


class QuantizedCommunicator(WrappedCommunicator):
    """`inner` whose collectives on floating buffers send codes: all-gathers of `gather_bits` and sums and averages by
    reduce-scatter of `reduce_bits` an element (None: as they are), with a float32 scale for every `block_numel`
    elements. Everything else is `inner`'s. `feedback` keeps what the codes of reductions leave out. See
    [Note: Quantised collective semantics].
    """

    native_uneven_ops: ClassVar[frozenset[Operation]] = UNEVEN_PARTS - {Operation.ALL_GATHER, Operation.REDUCE_SCATTER}

    def __init__(
        self,
        inner: Communicator,
        *,
        gather_bits: Bits | None,
        reduce_bits: Bits | None,
        block_numel: int,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        if block_numel < 2 or block_numel % 2:
            raise ShardingError(f"blocks of {block_numel} elements", hint="use an even number", value=block_numel)
        super().__init__(inner)
        self.deterministic = False  # the bits depend on where a buffer starts
        self.summed_first = ()
        self._gather_bits = gather_bits
        self._reduce_bits = reduce_bits
        self._block_numel = block_numel
        self._feedback = feedback
        self._scratch = ScratchPool(inner.accelerator)

    def start(self, collective: Collective) -> Work:
        kind, source, target = collective.operation, collective.source, collective.target
        if source is None or target is None or not source.dtype.is_floating or self.world_size == 1:
            return self.inner.call(collective)
        if kind is Operation.ALL_GATHER and self._gather_bits is not None:
            collective.check(self.rank, self.world_size)
            return ended(self._all_gather(collective, target, source, self._gather_bits), collective)
        if kind is Operation.REDUCE_SCATTER and self._reduce_bits is not None and collective.reduction in _ADDING:
            collective.check(self.rank, self.world_size)
            return ended(self._reduce_scatter(collective, target, source, self._reduce_bits), collective)
        return self.inner.call(collective)

    def _all_gather(self, collective: Collective, out: Buffer, source: Buffer, bits: Bits) -> Work:
        coded = _Coded(self, bits, source.numel)
        coded.quantize(source, self.rank)
        works = [
            self.inner.all_gather(
                whole, own, async_op=collective.async_op, label=collective.label, bucket=collective.bucket
            )
            for whole, own in zip(coded.wholes(), coded.part(self.rank), strict=True)
        ]

        def finish() -> None:
            for rank in range(self.world_size):
                coded.dequantize(out.view(rank * source.numel, source.numel), rank)
            coded.give_back()

        return CombinedWork(works, finish)

    def _reduce_scatter(self, collective: Collective, out: Buffer, source: Buffer, bits: Bits) -> Work:
        outgoing, incoming = (_Coded(self, bits, out.numel) for _ in range(2))
        parts = [source.view(rank * out.numel, out.numel) for rank in range(self.world_size)]
        if self._feedback is None:
            for rank, part in enumerate(parts):
                outgoing.quantize(part, rank)
        else:
            self._quantize_with_errors(parts, outgoing, collective.bucket, self._feedback)
        works = [
            self.inner.all_to_all(
                arrived, sent, async_op=collective.async_op, label=collective.label, bucket=collective.bucket
            )
            for arrived, sent in zip(incoming.wholes(), outgoing.wholes(), strict=True)
        ]

        def finish() -> None:
            self._add(incoming, out, collective.reduction)
            outgoing.give_back()
            incoming.give_back()

        return CombinedWork(works, finish)

    def _quantize_with_errors(
        self, parts: Sequence[Buffer], outgoing: _Coded, bucket: int | None, feedback: ErrorFeedback
    ) -> None:
        """Code each part and its error before, and keep the error of that."""
        numel = parts[0].numel
        blocks = [self._scratch.take(numel, DType.FLOAT32) for _ in range(2)]
        wanted, sent = (block.view(0, numel) for block in blocks)
        feedback.begin(bucket, numel, len(parts))
        for rank, part in enumerate(parts):
            wanted.copy_from(part)
            feedback.add_to(wanted, sent, bucket, rank)
            outgoing.quantize(wanted, rank)
            outgoing.dequantize(sent, rank)
            feedback.keep(wanted, sent, bucket, rank)
        feedback.end(bucket, numel)
        for block in blocks:
            self._scratch.give_back(block)

    def _add(self, coded: _Coded, out: Buffer, op: ReduceOp) -> None:
        kernels = self.accelerator.kernels()
        blocks = [self._scratch.take(out.numel, DType.FLOAT32) for _ in range(2)]
        total, part = (block.view(0, out.numel) for block in blocks)
        coded.dequantize(total, 0)
        for rank in range(1, self.world_size):
            coded.dequantize(part, rank)
            kernels[REDUCE](total, part, ReduceOp.SUM)
        if op is ReduceOp.AVG:
            kernels[SCALE](total, 1.0 / self.world_size)
        out.copy_from(total)
        for block in blocks:
            self._scratch.give_back(block)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        part = self.inner.split(ranks)
        if part is None:
            return None
        return QuantizedCommunicator(
            part, gather_bits=self._gather_bits, reduce_bits=self._reduce_bits, block_numel=self._block_numel
        )  # whose buckets have no errors yet


class _Coded:
    """Codes and scales of one part of `numel` elements for every rank, in scratch memory of `owner`."""

    def __init__(self, owner: QuantizedCommunicator, bits: Bits, numel: int) -> None:
        ranks, block_numel = owner.world_size, owner._block_numel
        self._kernels = owner.accelerator.kernels()
        self._pool = owner._scratch
        self._block_numel = block_numel
        self._numels = (numel if bits == 8 else (numel + 1) // 2, (numel + block_numel - 1) // block_numel)
        self._blocks = [
            self._pool.take(ranks * each, dtype)
            for each, dtype in zip(self._numels, (_CODES[bits], DType.FLOAT32), strict=True)
        ]
        self._ranks = ranks

    def wholes(self) -> tuple[Buffer, Buffer]:
        """The codes and the scales of all parts."""
        codes, scales = (
            block.view(0, self._ranks * each) for block, each in zip(self._blocks, self._numels, strict=True)
        )
        return codes, scales

    def part(self, rank: int) -> tuple[Buffer, Buffer]:
        """The codes and the scales of rank `rank`'s part."""
        codes, scales = (block.view(rank * each, each) for block, each in zip(self._blocks, self._numels, strict=True))
        return codes, scales

    def quantize(self, source: Buffer, rank: int) -> None:
        self._kernels[QUANTIZE](source, *self.part(rank), self._block_numel)

    def dequantize(self, out: Buffer, rank: int) -> None:
        self._kernels[DEQUANTIZE](out, *self.part(rank), self._block_numel)

    def give_back(self) -> None:
        for block in self._blocks:
            self._pool.give_back(block)
