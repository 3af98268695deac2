"""A rank's folder on a disk that jobs share: deleted when the rank is done, and by a later job where the rank died.

[Note: Offload folder locks]
Folder `polyaccel-<run id>/rank<r>` belongs to the process that holds the lock of the file `rank<r>.lock` next to it.
The system gives a lock back when its process dies, however it dies, so a lock that can be taken marks a folder whose
owner is dead; a process id would not, for ids are used again and mean nothing on another host. A lock file may be
removed between being opened and being locked; hence a process that has locked one checks that the name still stands for
that file. An owner writes its name into the file once it has locked it: a file without a name is about to be locked,
and no dead owner's.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from contextlib import suppress
from logging import getLogger
from pathlib import Path

from polyaccel.errors import OffloadError

_log = getLogger(__name__)
_RUN = "polyaccel-"
_RUN_ID = re.compile(r"[\w-]+")
_LOCK = re.compile(r"(rank\d+)\.lock")


class RankFolder:
    """The folder of `rank` of run `run_id` below `root`, made again, locked until `remove`.

    Removes what dead jobs left below `root` first. Raises OffloadError when it cannot be made, or when another process
    has it.
    """

    def __init__(self, root: Path, run_id: str, rank: int) -> None:
        if not _RUN_ID.fullmatch(run_id):
            raise OffloadError(f"{run_id!r} cannot be part of a folder's name", hint="use letters, digits, - and _")
        remove_stale(root)
        run = root / f"{_RUN}{run_id}"
        self.path = run / f"rank{rank}"
        self._lock_path = run / f"rank{rank}.lock"
        self._pid = os.getpid()
        try:
            self._lock = self._acquire()
            if self._lock is not None:
                os.write(self._lock, f"{socket.gethostname()} {self._pid}\n".encode())
                self.path.mkdir()
        except OSError as error:
            raise OffloadError(
                f"no folder for offloaded states can be made below {root}: {error}",
                hint="let nvme_path name a directory that this process may write to",
                value=str(root),
            ) from error
        if self._lock is None:
            raise OffloadError(
                f"{self.path} is in use by another process ({_owner(self._lock_path)})",
                hint="give every job its own run id, and every process of a job its own rank",
                value=str(self.path),
            )

    def _acquire(self) -> int | None:
        """The locked lock file, open; None when another process has locked it."""
        while True:
            self._lock_path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the run's folder was cleared away in between: once more
                return _lock(self._lock_path, os.O_CREAT)

    def remove(self) -> None:
        """Delete the folder and all in it, and unlock. Does nothing the second time, or in a forked child."""
        if self._lock is None or self._pid != os.getpid():
            return
        _clear(self.path, self._lock_path)
        os.close(self._lock)
        self._lock = None


def remove_stale(root: Path) -> None:
    """Delete the folders below `root` whose owners are dead. Other people's, and other files, are left alone."""
    for lock_path in _lock_paths(root):
        if not _LOCK.fullmatch(lock_path.name) or not _owner(lock_path):
            continue
        try:
            lock = _lock(lock_path, 0)
        except OSError:  # removed by its owner just now, or not ours to open
            continue
        if lock is not None:
            _log.info("removing states that a dead process (%s) left in %s", _owner(lock_path), lock_path.parent)
            _clear(lock_path.with_suffix(""), lock_path)
            os.close(lock)


def _lock_paths(root: Path) -> list[Path]:
    """Return all runs' lock files below `root`; folders may vanish meanwhile, unlike in pathlib 3.11."""
    found: list[Path] = []
    for run in sorted(root.glob(f"{_RUN}*")):
        with suppress(OSError):
            found += sorted(run.glob("rank*.lock"))
    return found


def _lock(path: Path, flags: int) -> int | None:
    """Open and lock `path`; None when locked. Raises FileNotFoundError if it is gone."""
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(path)):
            return lock
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    raise FileNotFoundError(path)


def _clear(folder: Path, lock_path: Path) -> None:
    """Delete a folder, then its lock file, which the caller holds, then the run's folder if that was the last rank."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        _log.warning("%s could not be removed; it is no longer needed", folder)
        return
    with suppress(OSError):
        lock_path.unlink()
    with suppress(OSError):
        lock_path.parent.rmdir()


def _owner(lock_path: Path) -> str:
    """Host and process id of the owner, dead or alive; empty while the file is not locked."""
    try:
        return lock_path.read_text().partition("\n")[0]
    except OSError:
        return ""
