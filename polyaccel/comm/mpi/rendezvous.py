"""Agreement through MPI on the rendezvous: rank 0 gathers, decides and answers.

Messages are point to point and looked for until a deadline, so that missing ranks have a name.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from importlib.util import find_spec
from typing import Any

from polyaccel.comm import host_address
from polyaccel.comm.base import Rendezvous
from polyaccel.comm.launchers.request import LOOPBACK, MEETING_VARIABLES, LaunchedRank, Request, meeting_port
from polyaccel.core import tagged_json
from polyaccel.errors import CommError, CommTimeout, PolyaccelError
from polyaccel.job.ports import free_port

_TAG = 29500
_LOOK_EVERY_S = 0.001


@dataclass(frozen=True, slots=True)
class Note:
    """A rank's message to rank 0: its host's name and addresses, and the address that its user has set (None: none)."""

    host: str
    addresses: tuple[str, ...]
    master_addr: str | None
    master_port: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The rendezvous of all, and this rank's place among those on its host; or why they cannot."""

    address: str = ""
    port: int = 0
    local_rank: int = 0
    local_world_size: int = 0
    problem: str = ""


def why_not() -> str:
    """Why MPI cannot be asked here; empty if it can, as far as can be found without starting it."""
    return "" if find_spec("mpi4py") else "mpi4py is not installed"


def mpi_rendezvous(here: LaunchedRank, request: Request) -> Rendezvous:
    """Start MPI, verify `here` against MPI.COMM_WORLD and agree on the meeting place. Collective."""
    mpi, library = _start(here)
    world = mpi.COMM_WORLD
    if world.rank != here.rank or here.world_size not in (None, world.size):
        raise CommError(
            f"{here.launcher} has {here.shown}, but MPI.COMM_WORLD of {library.name()} has "
            f"rank {world.rank} of {world.size}",
            hint="install an mpi4py for the MPI whose mpirun starts the ranks (pip install --no-binary=mpi4py mpi4py), "
            "or set MASTER_ADDR and MASTER_PORT and pass auto_mpi_discovery=False",
            value=(world.rank, world.size),
        )
    deadline = time.monotonic() + request.timeout_s
    env = request.environ
    note = Note(mpi.Get_processor_name(), host_address.own_addresses(), *(env.get(name) for name in MEETING_VARIABLES))
    if world.rank == 0:
        received = _receive(mpi, set(range(1, world.size)), deadline, request.timeout_s)
        notes = [note, *(Note(*received[rank]) for rank in range(1, world.size))]
        answers = assign_ranks(notes, env, request.port)
        for rank in range(1, world.size):
            _send(mpi, answers[rank], rank)
        answer = answers[0]
    else:
        _send(mpi, note, 0)
        answer = Answer(*_receive(mpi, {0}, deadline, request.timeout_s)[0])
    if answer.problem:
        raise CommError(answer.problem, hint="set MASTER_ADDR and MASTER_PORT for all ranks, to rank 0's host")
    local_rank = answer.local_rank if here.local_rank is None else here.local_rank
    local_world_size = answer.local_world_size if here.local_world_size is None else here.local_world_size
    launched = replace(here, world_size=world.size, local_rank=local_rank, local_world_size=local_world_size)
    return launched.meeting(answer.address, answer.port, request.init_method)


def assign_ranks(notes: Sequence[Note], environ: Mapping[str, str], port: int | None) -> list[Answer]:
    """Rank 0's answers to the notes of all ranks, by rank."""
    try:
        address, port = notes[0].master_addr or _address(notes), _port(notes, environ, port)
        for rank, note in enumerate(notes):
            for name, theirs, ours in zip(
                MEETING_VARIABLES, (note.master_addr, note.master_port), (address, str(port)), strict=True
            ):
                if theirs not in (None, ours):
                    raise CommError(f"{name}={theirs} is set on rank {rank}, but rank 0 has {ours}")
    except PolyaccelError as error:
        return [Answer(problem=error.message) for _ in notes]
    hosts = [(note.host, note.addresses) for note in notes]
    return [Answer(address, port, hosts[:rank].count(host), hosts.count(host)) for rank, host in enumerate(hosts)]


def _port(notes: Sequence[Note], environ: Mapping[str, str], port: int | None) -> int:
    return meeting_port(environ, 1) if notes[0].master_port is not None else port or free_port()


def _address(notes: Sequence[Note]) -> str:
    """The address of rank 0's host, by which the other hosts reach it."""
    ours = notes[0]
    elsewhere = [note for note in notes if (note.host, note.addresses) != (ours.host, ours.addresses)]
    if not elsewhere:
        return LOOPBACK
    # A bridge for containers has the same address on every host; the way to it leads nowhere.
    theirs = Counter(address for note in set(elsewhere) for address in note.addresses)
    for address in theirs:
        way = host_address.address_facing(address)
        if address not in ours.addresses and theirs[address] == 1 and way in ours.addresses:
            return str(way)
    raise CommError(
        f"rank 0 on {ours.host} ({', '.join(ours.addresses) or 'no address'}) finds no way to the other hosts: "
        + "; ".join(sorted({f"{note.host} ({', '.join(note.addresses) or 'no address'})" for note in elsewhere}))
    )


def _send(mpi: Any, message: Note | Answer, rank: int) -> None:
    """Send the fields of `message` as plain values. mpi4py's own objects are pickles, which the receiver would run."""
    mpi.COMM_WORLD.Send([tagged_json.to_bytes(astuple(message), "the note"), mpi.BYTE], dest=rank, tag=_TAG)


def _receive(mpi: Any, sources: set[int], deadline: float, timeout_s: float) -> dict[int, Any]:
    """The fields of one message of each of `sources`."""
    received: dict[int, Any] = {}
    world, status = mpi.COMM_WORLD, mpi.Status()
    while waiting := sources - received.keys():
        message = world.Improbe(source=mpi.ANY_SOURCE, tag=_TAG, status=status)
        if message is not None:
            data = bytearray(status.Get_count(mpi.BYTE))
            message.Recv([data, mpi.BYTE])
            received[status.Get_source()] = tagged_json.from_bytes(bytes(data))
        elif time.monotonic() > deadline:
            raise CommTimeout(
                f"rank {world.rank} received nothing from ranks {sorted(waiting)} over MPI within {timeout_s:g} s",
                missing_ranks=sorted(waiting),
                hint="look for the first error among them: all ranks must get as far as init_distributed",
            )
        else:
            time.sleep(_LOOK_EVERY_S)
    return received


def _start(here: LaunchedRank) -> tuple[Any, Any]:
    """`mpi4py.MPI`, with MPI started and this rank's failure the whole job's end; and `library`."""
    try:
        # These start MPI.
        from mpi4py import MPI

        from polyaccel.comm.mpi import library
        from polyaccel.comm.mpi.abort import abort_on_failure
    except (ImportError, RuntimeError) as error:
        raise CommError(
            f"{here.launcher} started this process ({here.shown}), but mpi4py cannot be used: {error}",
            hint="install an mpi4py for the MPI whose mpirun starts the ranks, or set MASTER_ADDR and MASTER_PORT and "
            "pass auto_mpi_discovery=False",
            value=str(error),
        ) from error
    if library.world().size > 1:
        abort_on_failure()
    return MPI, library
