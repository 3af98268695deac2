"""`WeightReceiver`: the end of a weight transfer over shared memory or groups, in the process of a server."""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import torch

from polyaccel.errors import CommError, CommTimeout, PolyaccelError
from polyaccel.job.memory_server.protocol import has_sealed_length, is_own_user, send
from polyaccel.ops.native import crc32
from polyaccel.torch.weight_transfer.group_update import begun, greeted, listen
from polyaccel.torch.weight_transfer.held_groups import ReceiverGroups
from polyaccel.torch.weight_transfer.manifest import Manifest, TensorInfo, parse_manifest
from polyaccel.torch.weight_transfer.messages import gone, message, message_with_memory, wrong_digest
from polyaccel.torch.weight_transfer.sender import ALIGNMENT_NBYTES, SEGMENTS
from polyaccel.torch.weight_transfer.update import WeightPiece, WeightUpdate

SCHEME, TCP = "unix:", "tcp://"


class WeightReceiver:
    """Receives the weights of a training engine, as often as it sends them. Without torch's default group.

    Processes of other users, or without the secret, are refused.

    Args:
        address: Path of a Unix socket, which is made here, for a trainer on this host; `unix:` may stand before it. Or
            `tcp://HOST:PORT`, an address of this host that the trainer reaches. Both then need the same secret in
            POLYACCEL_JOB_SECRET.
        timeout_s: Longest wait for the trainer within a transfer. The trainer's own limit counts between messages of
            `tcp://`.

    Raises:
        CommError: The socket cannot be made, or there is no secret.

    Example:
        ```python
        with WeightReceiver("unix:/tmp/policy.sock") as receiver:
            while serving:
                receiver.receive().load_into(model)
        ```
    """

    def __init__(self, address: str, *, timeout_s: float = 60.0) -> None:
        self.address = address
        """Where trainers send to."""
        self._path = None if address.startswith(TCP) else Path(address.removeprefix(SCHEME))
        self._timeout_s = timeout_s
        self._groups = ReceiverGroups()
        try:
            self._listener = listen(address.removeprefix(TCP)) if self._path is None else _listen_here(self._path)
        except OSError as error:
            raise CommError(
                f"no socket for weights can be made at {address}: {error}",
                hint="name a path of at most 100 characters in a folder that exists, or an own address and a free port",
                value=address.removeprefix(SCHEME),
            ) from error
        if self._path is None:
            host, port = address.rpartition(":")[0], self._listener.getsockname()[1]
            self.address = f"{host}:{port}"

    def receive(self, timeout_s: float | None = None) -> WeightUpdate:
        """Wait for the next transfer.

        Args:
            timeout_s: Longest wait for its beginning; None waits for ever.

        Returns:
            The transfer, of which no tensor has been read yet.

        Raises:
            CommTimeout: No trainer has sent.
            CommError: The trainer is another user's, has gone, or speaks another protocol.
        """
        deadline = None if timeout_s is None else monotonic() + timeout_s
        while True:
            connection = self._accepted(timeout_s, deadline)
            if self._path is None and not greeted(connection):
                connection.close()  # a stranger, who ends nothing
                continue
            connection.settimeout(self._timeout_s)
            try:
                if self._path is None:
                    return begun(connection, self._timeout_s, self._groups)
                if not is_own_user(connection):
                    raise CommError(f"another user's process sends weights to {self.address}", value=self.address)
                return _begun(connection, self._timeout_s)
            except BaseException:
                connection.close()
                raise

    def _accepted(self, timeout_s: float | None, deadline: float | None) -> socket.socket:
        self._listener.settimeout(None if deadline is None else max(0.0, deadline - monotonic()))
        try:
            return self._listener.accept()[0]
        except (TimeoutError, BlockingIOError):
            raise CommTimeout(
                f"timed out after {timeout_s:g} s waiting for weights at {self.address}",
                hint="call engine.send_weights with this address",
                value=self.address.removeprefix(SCHEME),
            ) from None

    def close(self) -> None:
        """Remove the socket, and leave groups."""
        self._listener.close()
        self._groups.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> WeightReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SharedMemoryUpdate(WeightUpdate):
    """A transfer whose pieces lie in the segments of `memory`. See [Note: Segments of a weight transfer]."""

    def __init__(self, manifest: Manifest, connection: socket.socket, memory: mmap.mmap, timeout_s: float) -> None:
        super().__init__(manifest)
        self._connection, self._timeout_s = connection, timeout_s
        self._segments = torch.frombuffer(memory, dtype=torch.uint8).view(SEGMENTS, -1)
        self._views = [segment.numpy().data for segment in self._segments]

    def refuse(self, problem: str) -> None:
        with suppress(OSError):
            send(self._connection, {"type": "refused", "problem": problem})
        self._connection.close()

    def _received(self) -> Generator[WeightPiece, None, None]:
        try:
            self._answer({"type": "ready"})
            crc = 0
            while (found := message(self._connection, self._timeout_s))[0].get("type") == "bucket":
                head, note = found
                segment = head.get("segment")
                if not isinstance(segment, int) or segment not in range(SEGMENTS):
                    raise CommError(f"malformed weight transfer: segment {segment!r}"[:300])
                for place, start, count, at, digest in _rows(note):
                    info, end = self._info(place), at + count * self._info(place).dtype.itemsize
                    if min(start, count, at) < 0 or start + count > info.numel or end > len(self._views[segment]):
                        raise CommError(f"malformed weight transfer: a piece of {info.name!r} lies outside")
                    crc = crc32(self._views[segment][at:end], crc if start else 0)
                    if crc != digest:
                        raise wrong_digest(info.name)
                    yield WeightPiece(place, start, self._segments[segment][at:end].view(info.dtype))
                self._answer({"type": "done", "segment": segment})
            if found[0].get("type") == "abort":
                raise CommError(f"the trainer ended the weight transfer: {found[0].get('problem')}"[:1000])
            if found[0].get("type") != "end":
                raise CommError(f"malformed weight transfer: a message {found[0].get('type')!r}"[:300])
            with suppress(OSError):  # the weights are all here, whether the trainer still is or not
                send(self._connection, {"type": "complete"})
        except PolyaccelError as error:
            self.refuse(error.message)
            raise
        finally:
            self._connection.close()

    def _info(self, place: int) -> TensorInfo:
        if not 0 <= place < len(self.tensors):
            raise CommError(f"malformed weight transfer: tensor {place} of {len(self.tensors)}")
        return self.tensors[place]

    def _answer(self, head: dict[str, Any]) -> None:
        try:
            send(self._connection, head)
        except OSError as error:
            raise gone(str(error)) from error


def _listen_here(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            path.unlink()  # of a process that was killed
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _begun(connection: socket.socket, timeout_s: float) -> SharedMemoryUpdate:
    head, note, memory = message_with_memory(connection, timeout_s)
    try:
        if head.get("type") != "manifest" or memory is None:
            raise CommError(f"malformed weight transfer: it begins with {head.get('type')!r}"[:300])
        try:
            manifest = parse_manifest(head, json.loads(note))
        except (ValueError, RecursionError) as error:
            raise CommError(f"malformed manifest of a weight transfer: {error}"[:300]) from error
        segments, nbytes = head.get("segments"), head.get("segment_nbytes")
        size = os.fstat(memory).st_size
        is_size = isinstance(nbytes, int) and nbytes > 0 and nbytes % ALIGNMENT_NBYTES == 0
        if segments != SEGMENTS or not is_size or size != SEGMENTS * int(nbytes or 0):
            raise CommError(f"malformed weight transfer: {segments} segments of {nbytes} bytes"[:300])
        if not has_sealed_length(memory):
            raise CommError("malformed weight transfer: the length of its memory can change")
        return SharedMemoryUpdate(manifest, connection, mmap.mmap(memory, size), timeout_s)
    finally:
        if memory is not None:
            os.close(memory)


def _rows(note: bytes) -> list[tuple[int, int, int, int, int]]:
    try:
        rows = [(int(a), int(b), int(c), int(d), int(e)) for a, b, c, d, e in json.loads(note)]
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise CommError(f"malformed pieces of a weight transfer: {error!r}"[:300]) from error
    return rows
