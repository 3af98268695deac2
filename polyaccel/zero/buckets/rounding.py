"""How a master weight becomes the parameter of 16 bits that stands for it.

To nearest even, or stochastically ([Note: Stochastic rounding] in `ops.base`). Then the random bits follow from the
parameter's name, how many updates it has had and the element's index in it, and from nothing that a stage, a bucket, a
device or a restart could change: rounding the same master weights again, after loading a checkpoint for instance, gives
the same parameter. One that was never updated is rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import ParamSpec
from polyaccel.ops.base import CAST, StochasticRounding


def rounding_of(param: ParamSpec, step: int, start: int = 0) -> StochasticRounding | None:
    """The stochastic rounding of the elements of `param` from `start` on after `step` updates; None is to nearest."""
    if not (step and param.dtype.is_floating and param.dtype.itemsize == 2):
        return None
    digest = blake2b(f"{step} {param.fqn}".encode(), digest_size=8).digest()
    return StochasticRounding(int.from_bytes(digest, "little"), start)


class WeightRounding:
    """The rounding of every parameter. `steps` counts their updates, and is read again each time."""

    def __init__(self, steps: Mapping[str, int], accelerator: Accelerator, *, is_stochastic: bool) -> None:
        self._steps = steps
        self._accelerator = accelerator
        self.is_stochastic = is_stochastic

    def make_rounding(self, param: ParamSpec, start: int) -> StochasticRounding | None:
        """Return the rounding of elements from `start`; None is to nearest."""
        return rounding_of(param, self._steps.get(param.fqn, 0), start) if self.is_stochastic else None

    def write(self, precise: Buffer, out: Buffer, param: ParamSpec, start: int) -> None:
        """Write the elements of `param` from `start` on to `out`, wherever it is."""
        rounding = self.make_rounding(param, start)
        if rounding is not None:
            near = self._accelerator.allocate(precise.numel, precise.dtype)
            near.copy_from(precise)
            precise = self._accelerator.allocate(out.numel, out.dtype)
            self._accelerator.kernels()[CAST](near, precise, rounding)
        out.copy_from(precise)

    def leads_to(self, rounded: Buffer, precise: Buffer, param: ParamSpec, start: int) -> bool:
        """Whether `rounded` is what `write` would make of `precise`."""
        again = self._accelerator.allocate(precise.numel, rounded.dtype)
        self.write(precise, again, param, start)
        return again.to_bytes() == rounded.to_bytes()
