"""The norm of all ranks' gradients, and the factor by which they are clipped."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, isfinite, sqrt


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """The norm of all ranks' gradients, loss scale divided out.

    `first_nonfinite_param` is the first parameter, in layout order, whose gradient is not finite.
    """

    norm: float
    first_nonfinite_param: str | None

    @classmethod
    def from_squares(
        cls, names: Sequence[Sequence[str]], squares: Sequence[Sequence[float]], loss_scale: float
    ) -> GradientNorm:
        """Add up the squared norms of all parameters, those of each pipeline stage in the order of their `names`."""
        stages = list(zip(names, squares, strict=True))
        bad = [(name, value) for stage in stages for name, value in zip(*stage, strict=True) if not isfinite(value)]
        if not bad:
            return cls(_float32(sqrt(fsum(fsum(values) for values in squares)) / loss_scale), None)
        is_nan = any(value != value for _, value in bad)
        return cls(float("nan" if is_nan else "inf"), bad[0][0])

    @property
    def overflow(self) -> bool:
        return self.first_nonfinite_param is not None

    def clip_factor(self, max_norm: float) -> float:
        """The factor that brings the norm to at most `max_norm`; 1 when that is 0 (off).

        NaN for a norm that is NaN, so that the fault stays visible.
        """
        if max_norm <= 0.0:
            return 1.0
        factor = max_norm / (self.norm + 1e-6)
        return 1.0 if factor > 1.0 else factor


def _float32(value: float) -> float:
    """`value` rounded to float32: differences in the order of float64 additions vanish."""
    if not isfinite(value) or abs(value) > 3.4e38:
        return value
    return float(struct.unpack("f", struct.pack("f", value))[0])
