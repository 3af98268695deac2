"""Whose unfinished work a file or folder is: a process, named so that others can find out whether it still lives.

A process id alone does not do: ids are used again, and mean nothing in another container or on another host. What
belongs to a process that cannot be looked up from here counts as abandoned after a day, which no write takes.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from polyaccel.checkpoint.parsing import Count, Crc32
from polyaccel.job.host_topology import host_id

ABANDONED_AFTER_S = 24 * 3600.0
_TOKEN = re.compile(r"([0-9a-f]{8})-(\d{1,12})-(\d{1,20})")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process. `machine` stands for a boot of a kernel and a space of process ids; `started` is when the process
    began, in the system's own ticks (0 if unknown)."""

    machine: int
    pid: int
    started: int

    @classmethod
    def me(cls) -> ProcessIdentity:
        """This process."""
        return cls.from_pid(os.getpid())

    @classmethod
    def from_pid(cls, pid: int) -> ProcessIdentity:
        """Identify the living process of that id on this machine."""
        return cls(_machine(), pid, _started(pid) or 0)

    @property
    def token(self) -> str:
        """The owner as part of a file's name."""
        return f"{self.machine:08x}-{self.pid}-{self.started}"

    @classmethod
    def in_name(cls, name: str) -> ProcessIdentity | None:
        """The owner whose token is in a file's name; None if there is none."""
        found = _TOKEN.search(name)
        return None if found is None else cls(int(found[1], 16), int(found[2]), int(found[3]))

    def is_alive(self, age_s: float) -> bool:
        """Return whether the process still runs; `age_s` decides where that cannot be found out."""
        if self.machine != _machine():
            return age_s < ABANDONED_AFTER_S
        return _started(self.pid) == self.started


class OwnerNote(BaseModel):
    """The file that names the owner of a folder. `host` is for people; `since_s` is seconds since 1970."""

    model_config = ConfigDict(frozen=True)

    host: Annotated[str, Field(strict=True)]
    machine: Crc32
    pid: Count
    started: Count
    since_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]

    @classmethod
    def by(cls, owner: ProcessIdentity, now_s: float) -> OwnerNote:
        """The note of a process of this machine."""
        return cls(host=socket.gethostname(), since_s=now_s, **asdict(owner))

    @property
    def owner(self) -> ProcessIdentity:
        return ProcessIdentity(self.machine, self.pid, self.started)


@cache
def _machine() -> int:
    try:
        system = host_id()
    except OSError:  # no Linux
        system = ""
    return zlib.crc32(f"{system} {socket.gethostname()}".encode())


def _started(pid: int) -> int | None:
    """Return when a process started; 0 where the system does not report it, None if it does not exist."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) > 19:  # from the state on, which is the third of all
        return None if fields[0] == "Z" else int(fields[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:  # another user's
        return 0
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
