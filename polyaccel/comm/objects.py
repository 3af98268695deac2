"""Objects through collectives of bytes, for backends that can only move buffers."""

from __future__ import annotations

import pickle
from typing import Any

from polyaccel.buffer import Buffer
from polyaccel.comm.base import CallInfo, Communicator
from polyaccel.types import DType

_HEADER_NBYTES = 8
_FRAME_NBYTES = 2048  # most objects fit into one frame, which needs one collective instead of two
_INFO = CallInfo("objects")


def gather_objects(communicator: Communicator, value: Any) -> list[Any]:
    """Every rank's `value` in rank order. `value` must pickle.

    Every rank sends one frame: the length of its pickle and as much of it as fits. A second collective carries the
    rest where the longest needs one; then all ranks know it from the lengths.
    """
    payload = pickle.dumps(value)
    room = _FRAME_NBYTES - _HEADER_NBYTES
    head = len(payload).to_bytes(_HEADER_NBYTES, "little") + payload[:room]
    frames = _gather_bytes(communicator, head, _FRAME_NBYTES)
    lengths = [int.from_bytes(frame[:_HEADER_NBYTES], "little") for frame in frames]
    bodies = [frame[_HEADER_NBYTES:] for frame in frames]
    if max(lengths) > room:
        tails = _gather_bytes(communicator, payload[room:], max(lengths) - room)
        bodies = [body + tail for body, tail in zip(bodies, tails, strict=True)]
    return [pickle.loads(body[:length]) for body, length in zip(bodies, lengths, strict=True)]


def _gather_bytes(communicator: Communicator, data: bytes, nbytes: int) -> list[bytes]:
    """Every rank's `data`, each padded to `nbytes`."""
    whole: Buffer = communicator.allocate(nbytes * communicator.world_size, DType.UINT8)
    own = whole.view(nbytes * communicator.rank, nbytes)
    own.from_bytes(data.ljust(nbytes, b"\0"))
    communicator.all_gather(whole, own, info=_INFO)
    gathered = whole.to_bytes()
    return [gathered[start : start + nbytes] for start in range(0, len(gathered), nbytes)]
