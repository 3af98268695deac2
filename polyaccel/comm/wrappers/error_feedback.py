"""What quantisation leaves out of gradients, added to the next ones (LoCo, Xie et al. 2024, arXiv 2407.04480).

A rank keeps the error of what it has sent, part by part, as a moving average in 8 bits: `beta` of the one before, and
the rest of what this reduction left out. The first reduction after a reset has no error to add.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.ops.base import DEQUANTIZE, QUANTIZE, REDUCE, SCALE


@dataclass(eq=False, slots=True)
class _Errors:
    """The errors of one bucket's parts: codes and scales."""

    codes: Buffer
    scales: Buffer
    reductions: int = 0
    """Since the last reset."""


class ErrorFeedback:
    """The errors of a rank's reductions over one group, by bucket.

    Args:
        accelerator: Whose memory has the errors.
        beta: What is kept of an error in a reduction.
        reset_every: Reductions of a bucket after which its errors begin at zero again.
        block_numel: Elements that share a scale.
    """

    def __init__(self, accelerator: Accelerator, *, beta: float, reset_every: int, block_numel: int) -> None:
        self._accelerator = accelerator
        self._kernels = accelerator.kernels()
        self._beta = beta
        self._reset_every = reset_every
        self._block_numel = block_numel
        self._errors: dict[tuple[int | None, int], _Errors] = {}

    def begin(self, bucket: int | None, numel: int, parts: int) -> None:
        """A reduction of `parts` parts of `numel` elements begins."""
        errors = self._errors.get((bucket, numel))
        if errors is None:
            scales = -(-numel // self._block_numel)
            codes = self._accelerator.allocate(parts * numel, DType.INT8)
            errors = _Errors(codes, self._accelerator.allocate(parts * scales, DType.FLOAT32))
            self._errors[bucket, numel] = errors
        elif errors.reductions >= self._reset_every:
            errors.reductions = 0

    def add_to(self, wanted: Buffer, room: Buffer, bucket: int | None, part: int) -> None:
        """Add the error of a part to what is to be sent, in float32; `room` is overwritten."""
        errors = self._errors[bucket, wanted.numel]
        if errors.reductions:
            self._read(errors, part, room)
            self._kernels[REDUCE](wanted, room, ReduceOp.SUM)

    def keep(self, wanted: Buffer, sent: Buffer, bucket: int | None, part: int) -> None:
        """Keep the error of a part: what codes have `sent` in place of `wanted`. Both are overwritten."""
        errors, numel, kernels = self._errors[bucket, wanted.numel], wanted.numel, self._kernels
        kernels[SCALE](sent, -1.0)
        kernels[REDUCE](sent, wanted, ReduceOp.SUM)
        kernels[SCALE](sent, 1.0 - self._beta)
        if errors.reductions:
            self._read(errors, part, wanted)
            kernels[SCALE](wanted, self._beta)
            kernels[REDUCE](sent, wanted, ReduceOp.SUM)
        kernels[QUANTIZE](sent, *self._part(errors, part, numel), self._block_numel)

    def end(self, bucket: int | None, numel: int) -> None:
        """All parts of a reduction are kept."""
        self._errors[bucket, numel].reductions += 1

    def forget(self) -> None:
        """Begin at zero again: gradients have another scale, or were not finite."""
        for errors in self._errors.values():
            errors.reductions = 0

    def _read(self, errors: _Errors, part: int, out: Buffer) -> None:
        self._kernels[DEQUANTIZE](out, *self._part(errors, part, out.numel), self._block_numel)

    def _part(self, errors: _Errors, part: int, numel: int) -> tuple[Buffer, Buffer]:
        blocks = -(-numel // self._block_numel)
        return errors.codes.view(part * numel, numel), errors.scales.view(part * blocks, blocks)
