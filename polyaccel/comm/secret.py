"""The secret that this process has in common with the other ranks of its job.

[Note: Per-user job secret]
A launcher other than `polyaccel run` gives ranks no secret. Where all of them can read a file that belongs to this user
alone, which is so on one host, rank 0 writes one there, sends the others its name, and removes it when all have read
it. An attacker may learn the name, or send another one. But they can neither read the file nor put their own in a
folder that is verified to be this user's.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyaccel.comm.base import Communicator
from polyaccel.core.user_dirs import atomic_write_private, ensure_private_dir, runtime_folder
from polyaccel.job import auth

_agreed: bytes | None = None
_alone = secrets.token_bytes(auth.MAC_NBYTES)


def job_secret(communicator: Communicator) -> bytes | None:
    """Return the job secret of POLYACCEL_JOB_SECRET or rendezvous, or None; a single rank has its own."""
    if communicator.world_size == 1:
        return _alone
    return auth.job_secret_from_env(os.environ) or _agreed


def negotiate_job_secret(communicator: Communicator) -> None:
    """Negotiate a secret among one user's processes without one. Collective. See [Note: Per-user job secret]."""
    global _agreed
    _agreed = None
    if communicator.world_size == 1 or any(communicator.all_gather_object(bool(auth.job_secret_from_env(os.environ)))):
        return
    _agreed = shared_secret(communicator.rank, communicator.all_gather_object)


def shared_secret(rank: int, gather: Callable[[Any], Sequence[Any]]) -> bytes | None:
    """Make a secret for one user's processes, else None. Collective. See [Note: Per-user job secret]."""
    name = gather(_leave() if rank == 0 else None)[0]
    if not isinstance(name, str):
        return None
    found = _read(name)
    have_all = all(gather(found is not None))
    if rank == 0:
        with suppress(OSError):
            _file(name).unlink()
    return found if have_all else None


def _leave() -> str | None:
    """Write a new secret where only this user's processes can read it. Returns its name; None if that cannot be."""
    name = f"secret-{secrets.token_hex(16)}"
    try:
        atomic_write_private(_file(name), secrets.token_bytes(auth.MAC_NBYTES))
    except OSError:
        return None
    return name


def _read(name: str) -> bytes | None:
    """The secret that a process of this user left under `name`; None if there is none here."""
    try:
        file = os.open(_file(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(file, "rb") as opened:
            secret = opened.read(auth.MAC_NBYTES + 1)
    except OSError:
        return None
    return secret if len(secret) == auth.MAC_NBYTES else None


def _file(name: str) -> Path:
    """Raises PermissionError for a folder that is not this user's alone."""
    return ensure_private_dir(runtime_folder(os.environ)) / Path(name).name
