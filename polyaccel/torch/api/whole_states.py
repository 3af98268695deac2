"""States of a client's optimizer: what kinds there are, and as a checkpoint has those of whole parameters, a blob for
each rank that owns some, by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyaccel.checkpoint.format.torch_values import packed, unpacked
from polyaccel.checkpoint.load.cooperative.blobs import OWNED_STATES
from polyaccel.errors import CheckpointError

CLIENT_OPTIMIZER = "client_optimizer"
_WHAT = "the state of the optimizer"


@dataclass(frozen=True, slots=True)
class StatesByKind:
    """An optimizer's states on one rank, as plain values, by parameter: the element types of those with a value for
    each element, numbers, and the names of the rest. `kept` are those of whole parameters that only this rank has."""

    flat: dict[str, dict[str, str]]
    numbers: dict[str, dict[str, float]]
    others: list[tuple[str, str]]
    kept: list[tuple[str, str]]


def blob_name(rank: int) -> str:
    """Return the name of the blob that `rank` saves for all."""
    return f"{OWNED_STATES}{rank}"


def blobs_of(blobs: Mapping[str, bytes]) -> list[bytes]:
    """Return those of all ranks, from what they saved for all."""
    return [blob for name, blob in sorted(blobs.items()) if name.startswith(OWNED_STATES)]


def pack_states(states: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Serialise states by parameter. Raises CheckpointError for values that a checkpoint cannot hold."""
    return packed({"states": {fqn: dict(values) for fqn, values in states.items()}}, _WHAT)


def unpack_states(blobs: Sequence[bytes]) -> dict[str, dict[str, Any]]:
    """Read what `pack_states` gave on all ranks. Raises CheckpointError for other bytes."""
    found: dict[str, dict[str, Any]] = {}
    for blob in blobs:
        try:
            states = unpacked(blob, _WHAT)["states"]
            found |= {str(fqn): dict(values) for fqn, values in states.items()}
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the saved state of the optimizer is none: {error!r}", hint="load another tag"
            ) from error
    return found
