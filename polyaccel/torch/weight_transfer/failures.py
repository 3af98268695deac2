"""Failures of a weight transfer that every rank raises, as plain values that ranks exchange."""

from __future__ import annotations

from polyaccel.errors import CheckpointError, CommError, CommTimeout, PolyaccelError

Packed = tuple[int, str, str, str]
"""Kind, message, hint and value of a failure."""
_KINDS = (CommTimeout, CommError, CheckpointError, PolyaccelError)
"""What a failed transfer may be, the narrower first."""


def packed(failure: Exception) -> Packed:
    """Return a failure as plain values."""
    kind = next((number for number, kind in enumerate(_KINDS) if isinstance(failure, kind)), len(_KINDS) - 1)
    if isinstance(failure, PolyaccelError):
        return kind, failure.message, failure.hint, str(failure.value)
    return kind, f"weights were not sent: {type(failure).__name__}: {failure}", "look at the destination", ""


def unpacked(found: Packed) -> PolyaccelError:
    """Return the error of a failure on any rank."""
    kind, message, hint, value = found
    return _KINDS[kind](message, hint=hint, value=value)
