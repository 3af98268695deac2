"""A rank's word to the launcher that started it: that it waits for the others, and that it has met them.

So the launcher knows that a rank which has ended with code 0 will be waited for in vain, and need not let the others
find that out by their time limit. The words go through a pipe of the launcher's, whose number and identity stand in
POLYACCEL_ARRIVALS; a process that has inherited the variable without the pipe says nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

ARRIVAL_VARIABLE = "POLYACCEL_ARRIVALS"
WAITS, HAS_MET = "waits", "met"
_MOST_NBYTES = 1 << 16


class ArrivalPipe:
    """The launcher's end. Ranks inherit `write_fd`, and find `name` in the variable."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.name = f"{self.write_fd}:{os.fstat(self.write_fd).st_ino}"

    def words(self) -> dict[int, str]:
        """The last word of each rank that has said something since the last call. Never blocks."""
        try:
            lines = os.read(self.read_fd, _MOST_NBYTES).decode(errors="replace").splitlines()
        except BlockingIOError:
            return {}
        said = (line.partition(" ") for line in lines)
        return {int(rank): word for rank, _, word in said if rank.isdecimal()}

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)


def tell_launcher(environ: Mapping[str, str], rank: int, word: str) -> None:
    """Say `word` of this rank, if a launcher of ours listens."""
    number, _, identity = environ.get(ARRIVAL_VARIABLE, "").partition(":")
    if number.isdecimal() and identity.isdecimal():
        with suppress(OSError):  # this process has no such pipe, or nobody reads it any more
            if os.fstat(int(number)).st_ino == int(identity):
                os.write(int(number), f"{rank} {word}\n".encode())
