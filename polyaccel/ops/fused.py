"""Updates as one sweep over a slice by a compiled kernel: csrc on the host, Triton on devices.

Both get a formula's constants in the same order and compute in float32 with one rounding an operation
([Note: One rounding per operation] in csrc/kernels/updates.h). So they agree bitwise, with each other and with
`polyaccel.ops.numpy`, and moving a state between device and host changes no number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import ShardingError
from polyaccel.ops.base import CAST, UPDATE, Formula, KernelTable, Rule, StochasticRounding

COMPUTED_IN_FLOAT32 = frozenset({DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16})


class FusedKernels(ABC):
    """The ops `update` and `cast` as sweeps. Formulas that are not compiled, and element types or memory that a sweep
    does not take, are left to `fallback`."""

    def __init__(self, fallback: KernelTable) -> None:
        self._fallback = fallback

    @abstractmethod
    def _has(self, formula: Formula) -> bool:
        """Whether the formula is compiled."""

    @abstractmethod
    def _fits(self, buffers: Sequence[Buffer | None]) -> bool:
        """Whether a sweep takes these element types, in the memory where they are."""

    @abstractmethod
    def _sweep(
        self,
        name: str,
        arrays: Sequence[Buffer],
        out: Buffer | None,
        constants: Sequence[float],
        rounding: StochasticRounding | None,
    ) -> None:
        """Run the sweep `name` on `arrays` (weights, gradient, ...), equal numel; write weights to `out`."""

    def update(
        self,
        rule: Rule,
        master: Buffer,
        grad: Buffer,
        states: Sequence[Buffer],
        out: Buffer | None = None,
        grad_scale: float = 1.0,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """See `UpdateFn`."""
        arrays = (master, grad, *states)
        if not (self._has(rule.formula) and self._fits((*arrays, out))):
            self._fallback[UPDATE](rule, master, grad, states, out, grad_scale, rounding)
            return
        rule.check(master, grad, states, out)
        self._sweep(rule.formula.name, arrays, out, (*rule.constants, grad_scale), rounding)
        rule.bump_version(master, states, out)

    def cast(self, source: Buffer, out: Buffer, rounding: StochasticRounding | None = None) -> None:
        """See `CastFn`."""
        if not self._fits((source, out)):
            self._fallback[CAST](source, out, rounding)
            return
        if source.numel != out.numel:
            raise ShardingError(f"{out!r} does not match {source!r}", value=out.numel)
        self._sweep("cast", (source,), out, (), rounding)
        out.bump_version()
