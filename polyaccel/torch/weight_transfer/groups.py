"""The sender of weights over groups: ranks broadcast what they own to receivers on any host.

[Note: Groups of a weight transfer]
Each rank that owns values forms a group with all receivers: it is rank 0 there, and the receivers follow in the order
of their addresses. So no rank receives what another one sends. Groups are held for the next transfer to the same
receivers ([Note: Held groups]). Rank 0 also has a connection to each receiver during a transfer, over which
both prove the job's secret. It carries the identities of held groups, the manifest, the schedule, the places of the
groups, and the answers of receivers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from polyaccel.accelerators.detect import host_accelerator
from polyaccel.comm.base import Communicator, Rendezvous
from polyaccel.comm.host_address import address_facing
from polyaccel.comm.init.backends import comm_backend
from polyaccel.comm.work import DONE, Work
from polyaccel.errors import CommError, CommTimeout, PolyaccelError
from polyaccel.job.auth import SECRET_VARIABLE, job_secret_from_env
from polyaccel.job.memory_server.protocol import ProtocolError, prove_secret
from polyaccel.job.ports import free_port
from polyaccel.ops.native import crc32
from polyaccel.torch.weight_transfer.failures import packed, unpacked
from polyaccel.torch.weight_transfer.held_groups import HeldGroup, SenderGroups
from polyaccel.torch.weight_transfer.manifest import Manifest
from polyaccel.torch.weight_transfer.peers import Peers, late, lost
from polyaccel.torch.weight_transfer.schedule import DIGEST_NBYTES, GroupMessage, encoded, plan_messages
from polyaccel.torch.weight_transfer.source import Run, WeightSource

BACKEND = "gloo"
BUCKETS = 2
OF_RECEIVER, OF_TRAINER = "polyaccel receiver of weights", "polyaccel trainer of weights"
_CHUNK_NBYTES = 1 << 20
"""Copied at once, then summed while it is in the processor's cache."""


class GroupTransfer:
    """A transfer over groups, on every rank of `communicator`. A failure is kept until all ranks raise it.

    Args:
        communicator: The engine's ranks.
        manifest: What is sent.
        addresses: Receivers, as "HOST:PORT".
        timeout_s: Longest wait for a receiver.
        held: This rank's groups of earlier transfers.
    """

    def __init__(
        self,
        communicator: Communicator,
        manifest: Manifest,
        addresses: Sequence[str],
        timeout_s: float,
        held: SenderGroups,
    ) -> None:
        self._communicator, self._manifest = communicator, manifest
        self._addresses, self._timeout_s = addresses, timeout_s
        self._hosts = [host_and_port(address)[0] for address in addresses]  # a wrong one is an error on every rank
        self._peers = Peers(timeout_s)
        self._held = held
        self._group: HeldGroup | None = None
        self._rows: list[list[Any]] = []
        self._failure: Exception | None = None

    def send(self, source: WeightSource, bucket_nbytes: int) -> int:
        """Send all values of `source`, and return the number of messages. Collective."""
        runs = source.runs()
        messages = plan_messages(runs, self._manifest, bucket_nbytes)
        rank, owners = self._communicator.rank, sorted({message.owner for message in messages})
        known = self._held.identity(self._addresses, self._timeout_s)
        own = [address_facing(self._hosts[0]), free_port(), known] if rank in owners else None
        places = self._communicator.all_gather_object(own)
        if rank == 0:
            self._attempt(lambda: self._open([[one, *places[one]] for one in owners], messages))
        self._agree()  # before a rank waits for receivers that are not there
        self._rows = self._communicator.broadcast_object(self._rows)
        for _, host, port, identity in (row for row in self._rows if row[0] == rank):
            self._attempt(partial(self._join, host, port, identity))
        self._send(messages, _values_of_pieces(source, runs, messages))
        if rank == 0:
            self._attempt(lambda: self._peers.expect("complete"))
        self._agree()
        if self._group is not None:
            self._held.hold(self._addresses, self._group)
            self._group = None
        return len(messages)

    def close(self) -> None:
        """Leave the receivers; a group too, unless the transfer has ended well."""
        self._leave_group()
        self._peers.close()

    def _open(self, rows: list[list[Any]], messages: Sequence[GroupMessage]) -> None:
        """Reach the receivers, and give each of `rows` the identity of its group."""
        secret = job_secret_from_env(os.environ)
        if secret is None:
            raise no_secret(self._addresses[0])
        for address in self._addresses:
            peer = self._peers.connect(address, partial(_tcp_connection, address))
            try:
                prove_secret(peer, secret, server=OF_RECEIVER, client=OF_TRAINER)
            except TimeoutError:
                raise late(self._timeout_s, address, "prove the job's secret") from None
            except (ProtocolError, EOFError, OSError) as error:
                raise CommError(
                    f"the receiver of weights at {address} does not prove the job's secret: {error}",
                    hint=f"start both with the same {SECRET_VARIABLE}",
                    value=address,
                ) from error
        answers = [set(found.get("identities") or ()) for found in self._peers.expect("held")]
        for row in rows:
            is_held = row[-1] and all(row[-1] in one for one in answers)
            row[-1] = row[-1] if is_held else token_hex(8)
        self._rows = rows
        head = {"type": "manifest", **self._manifest.head(), "backend": BACKEND, "groups": rows}
        tensors, schedule = self._manifest.encoded_tensors(), encoded(messages)
        for number, address in enumerate(self._addresses, 1):
            place = {"rank": number, "world_size": 1 + len(self._addresses), "timeout_s": self._timeout_s}
            self._peers.send(address, {**head, **place}, tensors)
            self._peers.send(address, {"type": "schedule"}, schedule)
        self._peers.expect("ready")

    def _join(self, host: str | None, port: int, identity: str) -> None:
        held = self._held.take(self._addresses)
        if held is not None and held.identity == identity:
            self._group = held
            return
        if held is not None:
            held.leave()
        world = 1 + len(self._addresses)
        meeting = Rendezvous(0, world, 0, world, host or "", port, "a weight transfer")
        backend = comm_backend(BACKEND)()
        group = backend.connect_apart(meeting, host_accelerator(), timeout_s=self._timeout_s)
        self._group = HeldGroup(identity, group, self._timeout_s)

    def _send(
        self, messages: Sequence[GroupMessage], values: Iterator[tuple[GroupMessage, int, Tensor | None]]
    ) -> None:
        """Broadcast this rank's messages. All ranks take `values` to the end, in which they may communicate."""
        rank = self._communicator.rank
        capacity = max((one.nbytes for one in messages if one.owner == rank), default=0)
        buckets = [_Bucket(capacity) for _ in range(BUCKETS)] if capacity else []
        sent = 0
        for message, number, flat in values:
            if message.owner != rank or self._failure is not None or self._group is None:
                continue
            assert flat is not None  # its owner has it
            bucket = buckets[sent % BUCKETS]
            if number == 0:
                self._attempt(bucket.wait)
            bucket.write(message, number, flat, self._manifest.tensors[message.pieces[number].place].dtype)
            if number == len(message.pieces) - 1 and self._failure is None:
                self._attempt(partial(bucket.broadcast, self._group.group, message))
                sent += 1
        for bucket in buckets:
            if self._failure is None:
                self._attempt(bucket.wait)

    def _attempt(self, action: Callable[[], object]) -> None:
        """Run `action` unless the transfer has failed here, and keep what fails. The receivers then do not wait."""
        if self._failure is not None:
            return
        try:
            action()
        except Exception as error:  # every rank raises it, after the collectives of the others
            self._failure = self._of_receivers(error)
            self._leave_group()
            self._peers.abort(str(self._failure))

    def _of_receivers(self, error: Exception) -> Exception:
        """Return the error of a group in the words of its receivers: what they report, or the address of one."""
        if not isinstance(error, CommError) or str(error.value) in self._addresses:
            return error
        try:
            self._peers.refusals()
        except PolyaccelError as reported:
            return reported
        members = [one for one in error.missing_ranks if 1 <= one <= len(self._addresses)]
        address = self._addresses[members[0] - 1 if members else 0]
        if isinstance(error, CommTimeout):
            return late(self._timeout_s, address, "take a message")
        return lost(address, error.message)

    def _agree(self) -> None:
        """Raise what failed on any rank, on every rank. Collective."""
        own = None if self._failure is None else packed(self._failure)
        found = next((one for one in self._communicator.all_gather_object(own) if one is not None), None)
        if found is not None:
            if self._failure is None:
                self._leave_group()
                self._peers.abort(found[1])
            raise unpacked(found) from self._failure

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()


class _Bucket:
    """Memory of one message, which is under way until `wait`."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        self._buffer = host_accelerator().wrap(self._bytes)
        self._view = self._bytes.numpy().data
        self._work: Work = DONE

    def wait(self) -> None:
        """Wait until the last message is away."""
        self._work.wait()

    def write(self, message: GroupMessage, number: int, flat: Tensor, dtype: torch.dtype) -> None:
        """Copy a piece as `dtype`, and its digest."""
        size, crc, piece = dtype.itemsize, 0, message.pieces[number]
        target = self._bytes[piece.offset : piece.offset + piece.count * size].view(dtype)
        chunk = _CHUNK_NBYTES // size
        for first in range(0, piece.count, chunk):
            end = min(first + chunk, piece.count)
            target[first:end].copy_(flat[first:end])
            crc = crc32(self._view[piece.offset + first * size : piece.offset + end * size], crc)
        at = message.digest_at(number)
        self._view[at : at + DIGEST_NBYTES] = crc.to_bytes(DIGEST_NBYTES, "little")

    def broadcast(self, group: Communicator, message: GroupMessage) -> None:
        """Send the message to all receivers."""
        part = self._buffer.view(0, message.nbytes)
        self._work = group.broadcast(part, 0, async_op=True, label="weights")


def _values_of_pieces(
    source: WeightSource, runs: Sequence[Run], messages: Sequence[GroupMessage]
) -> Iterator[tuple[GroupMessage, int, Tensor | None]]:
    """Yield each piece with its values, where this rank has them."""
    pairs = zip(runs, source.run_values(), strict=True)
    run, flat, left = runs[0], None, 0
    for message in messages:
        for number, piece in enumerate(message.pieces):
            if left == 0:
                run, flat = next(pairs)
                left = run.count
            start = piece.start - run.start
            yield message, number, None if flat is None else flat[start : start + piece.count]
            left -= piece.count
    for _ in pairs:
        raise AssertionError("a run without a message")


def host_and_port(address: str) -> tuple[str, int]:
    """Return both parts of "HOST:PORT". Raises PolyaccelError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise PolyaccelError(f"no address of a receiver: {address!r}", hint="name tcp://HOST:PORT", value=address)
    return host.strip("[]"), int(port)


def no_secret(address: str) -> CommError:
    """Return the error for weights over a network without a secret."""
    return CommError(
        f"no secret for a transfer of weights at {address}",
        hint=f"export {SECRET_VARIABLE}=$(openssl rand -hex 32), the same for trainer and receivers",
        value=address,
    )


def _tcp_connection(address: str, timeout_s: float) -> socket.socket:
    connection = socket.create_connection(host_and_port(address), timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
