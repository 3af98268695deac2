"""Which element types surround the parameters: those of master weights, of optimizer states, and of gradients."""

from __future__ import annotations

from dataclasses import dataclass

from polyaccel.types import DType


@dataclass(frozen=True, slots=True)
class Precision:
    """Element types of what surrounds the parameters, whose own types are those of their buckets.

    `master` is that of master weights (never narrower than the parameter), `states` that of optimizer states. `reduce`
    is that in which gradients travel, `accumulate` that in which they rest until the update.
    """

    master: DType = DType.FLOAT32
    states: DType = DType.FLOAT32
    reduce: DType | None = None
    """None: the parameter's own."""
    accumulate: DType | None = None
    """None: as `reduce`, or float32 where that has 16 bits and there are several micro-batches."""

    def master_of(self, param: DType) -> DType:
        """In which type a parameter of `param` is updated."""
        return param if param.is_floating and param.itemsize >= self.master.itemsize else self.master

    def reduce_of(self, param: DType) -> DType:
        """In which type its gradients travel."""
        return self.reduce or param

    def gradient_of(self, param: DType, *, accumulates: bool) -> DType:
        """In which type its gradients wait for the update. `accumulates`: over several micro-batches."""
        travels = self.reduce_of(param)
        return self.accumulate or (DType.FLOAT32 if accumulates and travels.itemsize < 4 else travels)


DEFAULT_PRECISION = Precision()
"""Masters and states in float32, gradients as the parameters."""
