"""The sender of weights over shared memory: two segments that it fills in turn.

[Note: Segments of a weight transfer]
One memory without a name (memfd) holds two segments. The sender fills one while receivers read the other, so that a
transfer takes the longer of both times and not their sum. The extra memory is two segments, whatever the size of the
model: a tensor that is longer is sent in pieces. The memory reaches receivers as an open file over a Unix socket, so it
has no name that a killed process would leave behind. Several receivers read the same segments.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from polyaccel.job.memory_server.protocol import seal_length
from polyaccel.ops.native import crc32
from polyaccel.torch.weight_transfer.manifest import Manifest
from polyaccel.torch.weight_transfer.peers import Peers

SEGMENTS = 2
ALIGNMENT_NBYTES = 64
_CHUNK_NBYTES = 1 << 20
"""Copied at once, then summed while it is in the processor's cache."""


class SharedMemorySender:
    """Sends the tensors of `manifest` to all `addresses`. Rank 0 alone has one.

    Args:
        addresses: Paths of the receivers' sockets.
        manifest: What is sent.
        segment_nbytes: Size of each of the two segments.
        timeout_s: Longest wait for a receiver.

    Raises:
        CommError: A receiver is not there or has gone.
        CommTimeout: A receiver did not answer in time.
        PolyaccelError: A receiver refused the weights.
    """

    def __init__(self, addresses: Sequence[str], manifest: Manifest, segment_nbytes: int, timeout_s: float) -> None:
        self._addresses = addresses
        self._segment_nbytes = -(-segment_nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        self._peers = Peers(timeout_s)
        self._resources = ExitStack()
        self._resources.callback(self._peers.close)
        self._pieces: list[tuple[int, int, int, int, int]] = []
        self._at = self._filled = 0
        self.buckets = 0
        """Segments that were sent."""
        try:
            self._open(addresses, manifest)
        except BaseException:
            self.close()
            raise

    def _open(self, addresses: Sequence[str], manifest: Manifest) -> None:
        memory = os.memfd_create("polyaccel-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._resources.callback(os.close, memory)
        os.ftruncate(memory, SEGMENTS * self._segment_nbytes)
        seal_length(memory)
        whole = torch.frombuffer(mmap.mmap(memory, SEGMENTS * self._segment_nbytes), dtype=torch.uint8)
        self._segments = whole.view(SEGMENTS, -1)
        self._views = [segment.numpy().data for segment in self._segments]
        head = {"type": "manifest", **manifest.head(), "segments": SEGMENTS, "segment_nbytes": self._segment_nbytes}
        tensors = manifest.encoded_tensors()
        for address in addresses:
            self._peers.connect(address, partial(_unix_connection, address))
            self._peers.send(address, head, tensors, memory)
        self._peers.expect("ready")

    def add(self, place: int, tensor: Tensor, dtype: torch.dtype) -> None:
        """Send a tensor as `dtype`: copy it into segments, and pass on those that are full."""
        flat, crc, start = tensor.reshape(-1), 0, 0
        size, numel = dtype.itemsize, tensor.numel()
        chunk = _CHUNK_NBYTES // size
        while start < numel or numel == 0:
            room = (self._segment_nbytes - self._at) // size
            if room == 0:
                self._flush()
                continue
            count, at = min(room, numel - start), self._at
            target = self._segments[self._filled % SEGMENTS][at : at + count * size].view(dtype)
            view = self._views[self._filled % SEGMENTS]
            for first in range(0, count, chunk):
                end = min(first + chunk, count)
                target[first:end].copy_(flat[start + first : start + end])
                crc = crc32(view[at + first * size : at + end * size], crc)
            self._pieces.append((place, start, count, at, crc))
            self._at = min(self._segment_nbytes, -(-(at + count * size) // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES)
            start += count
            if numel == 0:
                return

    def finish(self) -> None:
        """Send what is left, and wait until every receiver has all."""
        if self._pieces:
            self._flush()
        if self.buckets:
            self._peers.expect("done")
        for address in self._addresses:
            self._peers.send(address, {"type": "end"})
        self._peers.expect("complete")

    def abort(self, problem: str) -> None:
        """Report to the receivers that the rest will not come."""
        self._peers.abort(problem)

    def close(self) -> None:
        """Close the connections."""
        self._resources.close()

    def _flush(self) -> None:
        """Pass the segment on, and wait until receivers have done with the other one."""
        note = json.dumps(self._pieces).encode()
        for address in self._addresses:
            self._peers.send(address, {"type": "bucket", "segment": self._filled % SEGMENTS}, note)
        if self.buckets:
            self._peers.expect("done")
        self._pieces, self._at = [], 0
        self._filled += 1
        self.buckets += 1


def _unix_connection(address: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection
