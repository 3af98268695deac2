"""TCP connections between every two members, on the job's own network: `connect_mesh`.

[Note: Authenticated mesh]
Every process that reaches a port can connect to it. So a rank listens only where the others reach it: on the loopback
where all are on one host, else on the interface that faces the rendezvous host. Both ends prove that they have the
members' token before anything else is read: the caller sends its rank and a seal over both ends' marks, which were
drawn for this mesh, and the answer is another one. A connection that sends anything else is closed, and one that sends
nothing delays no rank.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from typing import NamedTuple

from polyaccel.comm.host_address import address_facing, means_this_host, own_addresses
from polyaccel.comm.launchers.request import LOOPBACK
from polyaccel.comm.rendezvous.ranks import RendezvousGroup
from polyaccel.errors import CommError, CommTimeout
from polyaccel.job import auth
from polyaccel.job.host_topology import network_id

_RANK_NBYTES = 4
_HELLO_NBYTES = auth.MAC_NBYTES + _RANK_NBYTES


class _Endpoint(NamedTuple):
    """Where a member listens, and its mark in this meeting."""

    address: str
    port: int
    mark: str


def connect_mesh(members: RendezvousGroup) -> dict[int, socket.socket]:
    """Open a TCP connection to every other rank. Collective; blocks.

    Args:
        members: The ranks, which exchange their addresses and a token.

    Returns:
        By rank a connected socket, blocking and without a time limit. The caller closes it.

    Raises:
        CommTimeout: Ranks did not connect in time; `missing_ranks` names them.
        CommError: A rank has ended.
    """
    token = members.agree_on_token()
    networks = members.exchange(_network())
    address = LOOPBACK if len(set(networks)) == 1 else _outward_address(members.meeting_host)
    connected: dict[int, socket.socket] = {}
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=members.world_size) as listener:
            own = _Endpoint(address, listener.getsockname()[1], secrets.token_hex(16))
            doors = [_Endpoint(*said) for said in members.exchange(list(own))]
            for peer in range(members.rank):
                connected[peer] = _call(members, token, doors, peer)
            _answer_callers(members, token, doors, listener, connected)
    except BaseException:
        for connection in connected.values():
            connection.close()
        raise
    for connection in connected.values():
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def _network() -> str:
    """Return a name shared by processes that reach each other by loopback (not `HostTopology`: containers)."""
    try:
        return network_id()
    except OSError:  # no Linux
        return socket.gethostname()


def _outward_address(meeting_host: str) -> str:
    """This host's address on the way to where the members met; its first other one where that leads to the loopback."""
    facing = address_facing(meeting_host)
    if facing is not None and not means_this_host(facing):
        return facing
    return next(iter(own_addresses()), socket.gethostname())


def _call(members: RendezvousGroup, token: bytes, doors: Sequence[_Endpoint], peer: int) -> socket.socket:
    """A connection to `peer`, which has shown that it is one of us."""
    door = doors[peer]
    caller = None
    try:
        caller = socket.create_connection((door.address, door.port), timeout=members.deadline.remaining_s())
        caller.sendall(_hello(token, doors, members.rank, peer))
        answer = b""
        while len(answer) < _HELLO_NBYTES:
            caller.settimeout(members.deadline.remaining_s())
            received = caller.recv(_HELLO_NBYTES - len(answer))
            if not received:
                raise ConnectionResetError("the other end has closed the connection")
            answer += received
        if _rank_in(token, answer, doors, {peer}, members.rank) != peer:
            raise ConnectionError("what answers there does not know the token of this job")
    except OSError as error:
        if caller is not None:
            caller.close()
        kind = CommTimeout if isinstance(error, TimeoutError) else CommError
        raise kind(
            f"rank {members.rank} cannot connect to rank {peer} at {door.address}:{door.port}: {error}",
            missing_ranks=[peer],
            hint="look for the first error of that rank, and for a firewall between the hosts",
        ) from error
    return caller


def _answer_callers(
    members: RendezvousGroup,
    token: bytes,
    doors: Sequence[_Endpoint],
    listener: socket.socket,
    connected: dict[int, socket.socket],
) -> None:
    """Take the calls of all ranks above this one into `connected`."""
    awaited = set(range(members.rank + 1, members.world_size))
    heard: dict[socket.socket, bytes] = {}
    try:
        with DefaultSelector() as ready:
            listener.setblocking(False)
            ready.register(listener, EVENT_READ)
            while awaited:
                found = ready.select(members.deadline.remaining_s())
                if not found and members.deadline.is_over:
                    raise CommTimeout(
                        f"ranks {sorted(awaited)} did not connect to rank {members.rank} at "
                        f"{doors[members.rank].address} within {members.deadline.timeout_s:g} s",
                        missing_ranks=sorted(awaited),
                        hint="look for the first error of those ranks, and for a firewall between the hosts",
                    )
                for key, _ in found:
                    if key.fileobj is listener:
                        with suppress(BlockingIOError, ConnectionAbortedError):  # who called has gone again
                            caller, _ = listener.accept()
                            heard[caller] = b""
                            ready.register(caller, EVENT_READ, caller)
                        continue
                    caller = key.data
                    received = _received(caller, _HELLO_NBYTES - len(heard[caller]))
                    heard[caller] += received
                    if received and len(heard[caller]) < _HELLO_NBYTES:
                        continue
                    ready.unregister(caller)
                    rank = _rank_in(token, heard.pop(caller), doors, awaited, members.rank)
                    if rank is None:
                        caller.close()
                        continue
                    caller.settimeout(members.deadline.remaining_s())
                    with suppress(OSError):  # it has ended since, which its first message will tell
                        caller.sendall(_hello(token, doors, members.rank, rank))
                    connected[rank] = caller
                    awaited.remove(rank)
    finally:
        for stranger in heard:
            stranger.close()


def _received(caller: socket.socket, most: int) -> bytes:
    """What has come; nothing where the caller has ended or broke off."""
    try:
        return caller.recv(most)
    except OSError:
        return b""


def _hello(token: bytes, doors: Sequence[_Endpoint], rank: int, peer: int) -> bytes:
    """`rank`'s first bytes to `peer`."""
    return auth.sign(token, _context(doors, rank, peer), rank.to_bytes(_RANK_NBYTES, "little"))


def _rank_in(token: bytes, hello: bytes, doors: Sequence[_Endpoint], awaited: set[int], peer: int) -> int | None:
    """Which of the `awaited` ranks has sent this to `peer`; None for anybody else."""
    rank = int.from_bytes(hello[auth.MAC_NBYTES :], "little")
    if len(hello) != _HELLO_NBYTES or rank not in awaited:
        return None
    return rank if auth.verify(token, _context(doors, rank, peer), hello) is not None else None


def _context(doors: Sequence[_Endpoint], rank: int, peer: int) -> str:
    return f"hello {rank} {doors[rank].mark} to {peer} {doors[peer].mark}"
