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
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor

from polyaccel.errors import CommError, CommTimeout, PolyaccelError
from polyaccel.job.memory_server.protocol import ProtocolError, receive, seal_length, send
from polyaccel.ops.native import crc32
from polyaccel.torch.weight_transfer.manifest import Manifest

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
        self._timeout_s = timeout_s
        self._segment_nbytes = -(-segment_nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        self._peers: dict[str, socket.socket] = {}
        self._resources = ExitStack()
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
            self._peers[address] = peer = self._resources.enter_context(socket.socket(socket.AF_UNIX))
            peer.settimeout(self._timeout_s)
            try:
                peer.connect(address)
            except OSError as error:
                raise CommError(
                    f"no receiver of weights at {address}: {error}",
                    hint="start a WeightReceiver there first, on the host of rank 0",
                    value=address,
                ) from error
            self._send(address, head, tensors, memory)
        self._expect("ready")

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
            self._expect("done")
        for address in self._peers:
            self._send(address, {"type": "end"})
        self._expect("complete")

    def abort(self, problem: str) -> None:
        """Report to the receivers that the rest will not come."""
        for peer in self._peers.values():
            with suppress(OSError):
                peer.setblocking(False)  # a stopped receiver does not keep the trainer once more
                send(peer, {"type": "abort", "problem": problem})

    def close(self) -> None:
        """Close the connections."""
        self._resources.close()

    def _flush(self) -> None:
        """Pass the segment on, and wait until receivers have done with the other one."""
        note = json.dumps(self._pieces).encode()
        for address in self._peers:
            self._send(address, {"type": "bucket", "segment": self._filled % SEGMENTS}, note)
        if self.buckets:
            self._expect("done")
        self._pieces, self._at = [], 0
        self._filled += 1
        self.buckets += 1

    def _send(self, address: str, head: dict[str, Any], note: bytes = b"", memory: int | None = None) -> None:
        try:
            send(self._peers[address], head, note, memory)
        except TimeoutError:
            raise self._late(address, "read a message") from None
        except OSError as error:
            # A receiver that refuses says why before it leaves.
            with suppress(OSError, EOFError, ProtocolError):
                self._require_accepted(address, receive(self._peers[address]))
            raise _lost(address, str(error)) from error

    def _expect(self, kind: str) -> None:
        """Wait for a message of this kind from each receiver."""
        for address, peer in self._peers.items():
            try:
                found = receive(peer)
            except TimeoutError:
                raise self._late(address, f"answer {kind!r}") from None
            except (OSError, EOFError, ProtocolError) as error:
                raise _lost(address, str(error)) from error
            if found is None:
                raise _lost(address, "it closed the connection")
            self._require_accepted(address, found)
            if found[0].get("type") != kind:
                raise _lost(address, f"it answered {found[0].get('type')!r} in place of {kind!r}")

    def _require_accepted(self, address: str, found: tuple[dict[str, Any], bytes, int | None] | None) -> None:
        if found is not None and found[2] is not None:
            os.close(found[2])
        if found is not None and found[0].get("type") == "refused":
            problem = str(found[0].get("problem"))[:1000]
            raise PolyaccelError(
                f"the receiver at {address} refused the weights: {problem}",
                hint="give the receiver the model that is trained",
                value=address,
            )

    def _late(self, address: str, what: str) -> CommTimeout:
        return CommTimeout(
            f"timed out after {self._timeout_s:g} s waiting for the receiver at {address} to {what}",
            hint="look at the receiver; training can continue, and the next transfer starts from the beginning",
            value=address,
        )


def _lost(address: str, why: str) -> CommError:
    return CommError(
        f"lost the receiver of weights at {address}: {why}",
        hint="start it again; training can continue, and the next transfer starts from the beginning",
        value=address,
    )
