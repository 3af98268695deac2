"""The default process group of torch.distributed: whether there is one, joining it, and notes through its store. Light
to import; torch is loaded when a group is made.

[Note: Default group of torch]
Scripts use `torch.distributed` directly too (a DistributedSampler asks it for the rank), so its default group always
exists afterwards: the one that the script made is adopted, else we make it. Our collectives run on a second group of
all ranks, which has our time limit and in which no call of the script can stand between ours.

[Note: Listen address of rank 0]
The store by which torch's groups connect accepts every client, and torch itself listens on every interface. So rank
0 binds the socket: to the ranks' rendezvous address, which on one host is the loopback, and to every
interface only where that address is none of this host's own (a service, a translated address). A store that the script
or torchrun's agent has opened is as they opened it.

[Note: Store across restarts]
torchrun's agent keeps one store for all starts of its ranks (`--max-restarts`, hosts that come and go), and no variable
numbers the starts in the same way on all hosts. What ranks of an earlier start have written there, addresses above all,
would be taken for their successors'. So rank 0 draws a name for its start, under which all keys of the start stand, and
gives it to each rank that asks by a random text, which no rank of an earlier start has.

[Note: Gloo thread shutdown]
A thread of gloo reports that a collective is done, and only then releases its tensors. Where it holds the last
reference to Python's objects, it needs the interpreter's lock for that; Python ends a thread that asks for it while the
interpreter ends, and C++ aborts the process for it: "terminate called without an active exception", one time in many on
a busy machine, after all work was done. So before the interpreter ends, every such thread has come to rest: it sleeps
where it waits for the next collective, or for a rank that will not come.
"""

from __future__ import annotations

import atexit
import os
import resource
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any
from urllib.parse import urlsplit

from polyaccel.comm.base import Rendezvous
from polyaccel.comm.host_address import listening_socket
from polyaccel.core.deadline import Deadline
from polyaccel.errors import CommError, CommTimeout
from polyaccel.job import auth

_meetings = count()
_ASKING_S = 1.0  # for who is there, once the time is over
_START = "polyaccel/start"
_POLL_S = 0.01
_POSTING_S = 1.0
"""Rank 0 posts its own note so long before the end."""
_DESCRIPTORS = 65536  # a process at its limit of descriptors is ended by gloo when the next stranger connects
_THREADS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"
_RESTING = "S"  # of proc_pid_stat(5): it waits, and for nothing that ends by itself
_LIMIT_S = 5.0
_LOOK_AGAIN_S = 0.001
_LOOKS = 3


def has_torch() -> bool:
    """Whether torch is installed."""
    spec = find_spec("torch")
    return spec is not None and spec.origin is not None


def initialized_world() -> tuple[int, int] | None:
    """(rank, world size) of torch's default group if the script made one; imports nothing."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def join_default_group(backend: str, rendezvous: Rendezvous, deadline: Deadline, enter: Callable[[], object]) -> None:
    """Make torch's default group over `backend`, or adopt the script's; `enter` runs in that thread."""
    adopted = initialized_world()
    if rendezvous.world_size == 1 and adopted is None:
        return
    join_gloo_threads_at_exit()
    if adopted is None:
        _make_default_group(backend, rendezvous, deadline, enter)
    elif adopted != (rendezvous.rank, rendezvous.world_size):
        raise CommError(
            f"torch.distributed is initialised as rank {adopted[0]} of {adopted[1]}, "
            f"but {rendezvous.source} has rank {rendezvous.rank} of {rendezvous.world_size}",
            hint="let both come from the same launcher, or drop your own init_process_group",
            value=adopted,
        )


def store_all_gather(topic: str, rank: int, world_size: int, text: str, deadline: Deadline) -> list[str]:
    """Return every rank's `text` for `topic` in rank order. Raises CommTimeout, CommError if the store ends."""
    from torch.distributed import distributed_c10d

    return _exchange(distributed_c10d._get_default_store(), topic, rank, world_size, text, deadline)


def _make_default_group(name: str, rendezvous: Rendezvous, deadline: Deadline, enter: Callable[[], object]) -> None:
    import torch.distributed as dist

    rank, world_size = rendezvous.rank, rendezvous.world_size
    where = rendezvous.init_method or f"tcp://{rendezvous.address}:{rendezvous.port}"
    _allow_many_descriptors()

    def make(store: Any) -> None:
        enter()
        limit = timedelta(seconds=deadline.timeout_s)
        dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=limit)

    try:
        store = deadline.run(f"the store of rank 0 at {where}", lambda: open_store(rendezvous, deadline))
        if _is_agents(rendezvous):
            opened = store
            store = deadline.run("rank 0 of this start", lambda: own_part(opened, rank, world_size, deadline))
        here = f"process {os.getpid()} on {socket.gethostname()}"
        _exchange(store, f"here/{next(_meetings)}", rank, world_size, here, deadline)
        deadline.run(f"the connections of {name}", lambda: make(store))
    except (RuntimeError, ValueError, OSError) as error:
        reason = error.message if isinstance(error, CommError) else str(error).strip().partition("\n")[0]
        raise _kind_of(error)(
            f"rank {rank} could not reach the other {world_size - 1} ranks "
            f"at {where} ({rendezvous.source}) within {deadline.timeout_s:g} s: {reason}",
            hint="check that all ranks were started, with the same address and port, and that the port is free",
            missing_ranks=error.missing_ranks if isinstance(error, CommError) else (),
            value=where,
        ) from error


def open_store(rendezvous: Rendezvous, deadline: Deadline) -> Any:
    """The store where the ranks meet; rank 0 serves it unless a file or torchrun's agent does. See
    [Note: Listen address of rank 0]."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.rendezvous import rendezvous as torch_rendezvous

    rank, world_size, url = rendezvous.rank, rendezvous.world_size, urlsplit(rendezvous.init_method or "")
    address, port = rendezvous.address, rendezvous.port
    if url.scheme == "tcp" and not url.query:
        address, port = url.hostname, url.port
    elif rendezvous.init_method is not None:
        if url.scheme == "file":
            _own_file(url.path)
        return next(torch_rendezvous(rendezvous.init_method, rank, world_size, timeout=deadline.remaining()))[0]
    if address is None or port is None:
        raise ValueError("no address and port are set")
    file = listening_socket(address, port).detach() if rank == 0 else None
    return TCPStore(
        address,
        port,
        world_size,
        rank == 0,
        timeout=deadline.remaining(),
        wait_for_workers=False,
        master_listen_fd=file,
    )


def _is_agents(rendezvous: Rendezvous) -> bool:
    return rendezvous.init_method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def own_part(store: Any, rank: int, world_size: int, deadline: Deadline) -> Any:
    """The part of a store that the ranks of this start alone use. See [Note: Store across restarts]."""
    from torch._C._distributed_c10d import PrefixStore

    if rank:
        asked = secrets.token_hex(8)
        store.set(f"{_START}/ask/{rank}", asked)
        store.wait([f"{_START}/answer/{asked}"], deadline.remaining())
        name = store.get(f"{_START}/answer/{asked}").decode()
        store.set(f"{_START}/{name}/{rank}", "")
        return PrefixStore(f"{_START}/{name}", store)
    name, absent, answered = secrets.token_hex(8), set(range(1, world_size)), set[bytes]()
    posting_s = min(_POSTING_S, deadline.timeout_s / 10)
    while absent and deadline.remaining_s() > posting_s:  # the notes of all ranks list who is absent in the end
        for peer in sorted(absent):
            if store.check([f"{_START}/{name}/{peer}"]):
                absent.discard(peer)
            elif store.check([f"{_START}/ask/{peer}"]):
                asked_by = bytes(store.get(f"{_START}/ask/{peer}"))
                if asked_by not in answered:
                    answered.add(asked_by)
                    store.set(f"{_START}/answer/{asked_by.decode()}", name)
        if absent:
            sleep(_POLL_S)
    return PrefixStore(f"{_START}/{name}", store)


def _exchange(store: Any, topic: str, rank: int, world_size: int, text: str, deadline: Deadline) -> list[str]:
    keys = [f"polyaccel/{topic}/{peer}" for peer in range(world_size)]
    secret = auth.job_secret_from_env(os.environ)

    def exchange() -> list[bytes]:
        note = text.encode()
        store.set(keys[rank], note if secret is None else auth.sign(secret, keys[rank], note))
        store.wait(keys, deadline.remaining())
        return [bytes(store.get(key)) for key in keys]

    try:
        notes = deadline.run(f"the notes of all ranks ({topic})", exchange)
    except RuntimeError as error:
        absent, said = _who_is_there(store, keys, secret)
        if absent:
            reason = f"ranks {absent} have not come within {deadline.timeout_s:g} s; {said}"
        elif absent is None:
            reason = "the store of rank 0 does not answer"
        else:
            reason = f"the store of rank 0 failed: {str(error).strip().splitlines()[0]}"
        raise _kind_of(error)(
            f"{reason} ({topic})",
            missing_ranks=absent or (),
            hint="all ranks must use the same backend; look for the first error among them",
        ) from error
    if secret is None:
        return [note.decode(errors="replace") for note in notes]
    opened = [auth.verify(secret, key, note) for key, note in zip(keys, notes, strict=True)]
    strange = [peer for peer, note in enumerate(opened) if note is None]
    if strange:
        raise CommError(
            f"the notes of ranks {strange} do not have the seal of this job ({topic})",
            hint=f"set {auth.SECRET_VARIABLE} to the same text on every rank, or unset it everywhere",
            missing_ranks=strange,
        )
    return [(note or b"").decode(errors="replace") for note in opened]


def _kind_of(error: Exception) -> type[CommError]:
    """CommTimeout for an error about a time limit; torch has no common exception for that."""
    text = str(error).lower()
    is_late = isinstance(error, CommTimeout) or "timed out" in text or "timeout" in text
    return CommTimeout if is_late else CommError


def _who_is_there(store: Any, keys: list[str], secret: bytes | None) -> tuple[list[int] | None, str]:
    """The ranks without a note, and the notes of the others; None where the store does not answer."""

    def ask() -> dict[int, bytes]:
        return {peer: bytes(store.get(key)) for peer, key in enumerate(keys) if store.check([key])}

    try:
        notes = Deadline(_ASKING_S).run("who is there", ask)
    except RuntimeError:
        return None, ""
    cut = 0 if secret is None else auth.MAC_NBYTES
    present = [f"rank {peer} ({note[cut:].decode(errors='replace')[:80]})" for peer, note in notes.items()]
    return [peer for peer in range(len(keys)) if peer not in notes], f"here is {', '.join(present) or 'no rank'}"


def _own_file(path: str) -> None:
    """Make the file of a store this user's, writable by no other user. Raises CommError for any other one."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        status = os.fstat(opened)
    finally:
        os.close(opened)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise CommError(
            f"the store's file {path} belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}",
            hint="name a file in a folder of your own, which does not exist yet",
            value=path,
        )


def _allow_many_descriptors() -> None:
    """Raise the soft limit of descriptors, which costs nothing until they are used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # some systems allow less than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@cache
def join_gloo_threads_at_exit() -> None:
    """Let this process, when it ends, wait until gloo's threads have released what they were given."""
    atexit.register(wait_for_rest)


def wait_for_rest(limit_s: float = _LIMIT_S) -> bool:
    """Wait until every thread of gloo rests, at most so long. Returns whether all do.

    The interpreter's lock is free between looks: one that waits for it sleeps as well, and has moved on at the next.
    Where the system does not report threads, a moment is all there is.
    """
    ends_s = time.monotonic() + limit_s
    at_rest = 0
    while at_rest < _LOOKS:
        time.sleep(_LOOK_AGAIN_S)
        at_rest = at_rest + 1 if all(state == _RESTING for state in _states()) else 0
        if time.monotonic() > ends_s:
            return False
    return True


def _states() -> list[str]:
    """The state of each thread of gloo, as the system calls it."""
    states = []
    with suppress(OSError):
        for thread in os.listdir(_THREADS):
            with suppress(OSError):  # it has ended just now
                name, _, rest = (_THREADS / thread / "stat").read_text(errors="replace").rpartition(")")
                if name.endswith(f"({_NAME}"):
                    states.append(rest.split()[0])
    return states
