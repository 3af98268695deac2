"""A transfer over groups at its receiver. See [Note: Groups of a weight transfer]."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch

from polyaccel.accelerators.detect import host_accelerator
from polyaccel.comm.base import Communicator, Rendezvous
from polyaccel.comm.init.backends import comm_backend
from polyaccel.comm.work import DONE, Work
from polyaccel.errors import CommError, PolyaccelError
from polyaccel.job.auth import job_secret_from_env
from polyaccel.job.memory_server.protocol import ProtocolError, check_secret, receive, send
from polyaccel.ops.native import crc32
from polyaccel.torch.weight_transfer.groups import BUCKETS, OF_RECEIVER, OF_TRAINER, host_and_port, no_secret
from polyaccel.torch.weight_transfer.held_groups import ReceiverGroups
from polyaccel.torch.weight_transfer.manifest import Manifest, parse_manifest
from polyaccel.torch.weight_transfer.messages import gone, message, wrong_digest
from polyaccel.torch.weight_transfer.schedule import DIGEST_NBYTES, GroupMessage, decoded
from polyaccel.torch.weight_transfer.update import WeightPiece, WeightUpdate

_GREETING_S = 10.0
_MOMENT_S = 0.5
"""A trainer that ends a transfer reports before that."""


class GroupUpdate(WeightUpdate):
    """A transfer whose messages come from the `groups` of a message `head`. Groups of earlier ones are `held`."""

    def __init__(
        self,
        manifest: Manifest,
        connection: socket.socket,
        head: dict[str, Any],
        messages: Sequence[GroupMessage],
        held: ReceiverGroups,
    ) -> None:
        super().__init__(manifest)
        self._connection, self._messages, self._held = connection, messages, held
        try:
            self._rank, self._world_size = int(head["rank"]), int(head["world_size"])
            self._timeout_s, self._backend = float(head["timeout_s"]), str(head["backend"])
            self._places = {int(owner): (str(host), int(port), str(one)) for owner, host, port, one in head["groups"]}
        except (KeyError, TypeError, ValueError) as error:
            raise CommError(f"malformed weight transfer: {error!r}"[:300]) from error

    def refuse(self, problem: str) -> None:
        with suppress(OSError):
            send(self._connection, {"type": "refused", "problem": problem})
        self._connection.close()

    def _received(self) -> Generator[WeightPiece, None, None]:
        with ExitStack() as stack:
            stack.callback(self._connection.close)
            on_failure = stack.enter_context(ExitStack())
            on_failure.callback(self._held.close)  # messages may be under way
            try:
                send(self._connection, {"type": "ready"})
                self._held.keep_only(identity for _, _, identity in self._places.values())
                groups = {owner: self._join(owner) for owner in sorted(self._places)}
                capacity = max((one.nbytes for one in self._messages), default=0)
                buckets = [_Bucket(capacity) for _ in range(BUCKETS)] if capacity else []
                for number, one in enumerate(self._messages[:BUCKETS]):
                    buckets[number].receive(groups[one.owner], one)
                for number, one in enumerate(self._messages):
                    bucket = buckets[number % BUCKETS]
                    bucket.wait()
                    yield from self._pieces_of(one, bucket)
                    if number + BUCKETS < len(self._messages):
                        after = self._messages[number + BUCKETS]
                        bucket.receive(groups[after.owner], after)
                on_failure.pop_all()
                with suppress(OSError):  # the weights are all here, whether the trainer still is or not
                    send(self._connection, {"type": "complete"})
            except OSError as error:
                raise gone(str(error)) from error
            except CommError as error:
                reported = self._reported()
                self.refuse(error.message)
                if reported:
                    raise CommError(f"the trainer ended the weight transfer: {reported}"[:1000]) from error
                raise
            except PolyaccelError as error:
                self.refuse(error.message)
                raise

    def _pieces_of(self, one: GroupMessage, bucket: _Bucket) -> Generator[WeightPiece, None, None]:
        for index, piece in enumerate(one.pieces):
            info, at = self.tensors[piece.place], one.digest_at(index)
            end = piece.offset + piece.count * info.dtype.itemsize
            digest = int.from_bytes(bucket.view[at : at + DIGEST_NBYTES], "little")
            if crc32(bucket.view[piece.offset : end], 0) != digest:
                raise wrong_digest(info.name)
            yield WeightPiece(piece.place, piece.start, bucket.bytes[piece.offset : end].view(info.dtype))

    def _join(self, owner: int) -> Communicator:
        """Return the group of the sender `owner`."""
        host, port, identity = self._places[owner]
        meeting = Rendezvous(self._rank, self._world_size, 0, 1, host, port, "a weight transfer")
        backend = comm_backend(self._backend)()
        connect = partial(backend.connect_apart, meeting, host_accelerator(), timeout_s=self._timeout_s)
        return self._held.joined(identity, self._timeout_s, connect)

    def _reported(self) -> str:
        """Return what the trainer has said about the end of the transfer; "" if nothing."""
        self._connection.settimeout(_MOMENT_S)
        with suppress(OSError, EOFError, ProtocolError):
            found = receive(self._connection)
            if found is not None and found[0].get("type") == "abort":
                return str(found[0].get("problem"))
        return ""


class _Bucket:
    """Memory of one message, which is under way until `wait`."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8)
        self.view = self.bytes.numpy().data
        self._buffer = host_accelerator().wrap(self.bytes)
        self._work: Work = DONE

    def receive(self, group: Communicator, one: GroupMessage) -> None:
        """Begin to receive a message."""
        self._work = group.broadcast(self._buffer.view(0, one.nbytes), 0, async_op=True, label="weights")

    def wait(self) -> None:
        """Wait for the message."""
        self._work.wait()


def listen(address: str) -> socket.socket:
    """Return a socket that listens at "HOST:PORT". Raises CommError without a secret, OSError if it cannot."""
    if job_secret_from_env(os.environ) is None:
        raise no_secret(address)
    host, port = host_and_port(address)
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def greeted(connection: socket.socket) -> bool:
    """Whether who has connected proves the secret. It then knows that this process has it too."""
    secret = job_secret_from_env(os.environ)
    connection.settimeout(_GREETING_S)
    try:
        if secret is not None:
            check_secret(connection, secret, server=OF_RECEIVER, client=OF_TRAINER)
    except (ProtocolError, EOFError, OSError):
        return False
    return secret is not None


def begun(connection: socket.socket, timeout_s: float, held: ReceiverGroups) -> GroupUpdate:
    """Return the transfer that a trainer begins, to whom the groups that are `held` are reported."""
    try:
        send(connection, {"type": "held", "identities": held.identities})
    except OSError as error:
        raise gone(str(error)) from error
    head, note = message(connection, timeout_s)
    if head.get("type") != "manifest" or not isinstance(head.get("groups"), list):
        raise CommError(f"malformed weight transfer: it begins with {head.get('type')!r}"[:300])
    try:
        manifest = parse_manifest(head, json.loads(note))
        owners = [int(row[0]) for row in head["groups"]]
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise CommError(f"malformed manifest of a weight transfer: {error}"[:300]) from error
    then, schedule = message(connection, timeout_s)
    if then.get("type") != "schedule":
        raise CommError(f"malformed weight transfer: a message {then.get('type')!r}"[:300])
    return GroupUpdate(manifest, connection, head, decoded(schedule, manifest, owners), held)
