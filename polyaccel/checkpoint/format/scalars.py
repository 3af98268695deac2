"""The plain values of a checkpoint (`polyaccel.core.tagged_json`): counters, hyperparameters, and the user's client
state."""

from __future__ import annotations

from typing import Any

from polyaccel.core import tagged_json
from polyaccel.errors import CheckpointError


def encode_plain(value: Any, where: str) -> Any:
    """`plain.to_tree`. Raises CheckpointError, naming the dotted key and the type, for anything but plain values."""
    try:
        return tagged_json.encode(value, where)
    except tagged_json.SerializationError as error:
        raise CheckpointError(
            f"a checkpoint cannot hold this: {error.message}", hint=error.hint, value=error.value
        ) from error


def decode_plain(tree: Any) -> Any:
    """The inverse of `encode_plain`. Raises CheckpointError for a tree that it does not make."""
    try:
        return tagged_json.decode(tree)
    except tagged_json.SerializationError as error:
        raise CheckpointError(
            f"the manifest holds {error.message}", hint=error.hint or "load another tag", value=error.value
        ) from error
