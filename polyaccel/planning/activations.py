"""What a training pass keeps of a model's activations, as a forecast shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActivationNeeds:
    """Bytes of one pass on one rank: those kept for backward at the end of the forward pass, and the most at a time in
    both. `way` says what is recomputed; `is_own`: it is what the config asks for."""

    way: str
    kept_nbytes: int
    peak_nbytes: int
    is_own: bool
