"""`client_state` of a checkpoint: plain values stand in it as they are, and tensors beside them as `torch.save` writes.

polyaccel's checkpoints hold plain values only. What is more goes through `torch.save` and comes back through
`torch.load(weights_only=True)`, which runs no code.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

import torch

from polyaccel.errors import CheckpointError

_KEY = "deepspeed_client_state"


def packed(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` in plain values. Raises CheckpointError for what could not be read back safely."""
    if _is_plain(dict(state)):
        return dict(state)
    stream = io.BytesIO()
    torch.save(dict(state), stream)
    data = stream.getvalue()
    _read(data, "client_state cannot be saved", "keep tensors, numbers, strings, lists and dicts in it")
    return {_KEY: base64.b64encode(data).decode()}


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """What `packed` was given."""
    if set(state) != {_KEY}:
        return dict(state)
    return _read(base64.b64decode(state[_KEY]), "the saved client_state cannot be read", "load another tag")


def _read(data: bytes, what: str, cure: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{what}: {reason}", cure=cure) from error
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list):
        return type(value) is list and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
