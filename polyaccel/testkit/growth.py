"""Memory that something keeps: measured round by round, because what is allocated once is not a leak."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress

from polyaccel.accelerators.memory.host import own_nbytes
from polyaccel.testkit.progress import doing

_ROUNDS = 12  # a leak leaks in each; what threads set aside comes to an end
_IN_A_ROW = 2  # one round alone may hide a leak: something else releases as much meanwhile
_MIB = 1 << 20


def keeps_nothing(
    act: Callable[[], object],
    moved_nbytes: int,
    what: str,
    *,
    held: Callable[[], int] | None = None,
    agree: Callable[[int], int] = int,
) -> None:
    """Check that `act`, which moves `moved_nbytes`, leaves no more than half of them behind, two rounds in a row.

    `held` returns the bytes in use, by default those of `host_nbytes`. `agree` gives the ranks of a group one answer if
    they take the rounds together. Raises AssertionError with the growth of each round.
    """
    held = held or host_nbytes
    act()  # what is allocated once
    growths: list[int] = []
    for number in range(_ROUNDS):
        doing(f"{what}, round {number + 1}")
        gc.collect()
        before = held()
        act()
        gc.collect()
        growths.append(agree(held() - before))
        if len(growths) >= _IN_A_ROW and max(growths[-_IN_A_ROW:]) <= moved_nbytes // 2:
            return
    more = ", ".join(f"{growth / _MIB:.0f}" for growth in growths)
    raise AssertionError(
        f"{what}: expected less than {moved_nbytes / 2 / _MIB:.0f} MiB more after rounds that move "
        f"{moved_nbytes / _MIB:.0f} MiB, got {more} MiB more after each"
    )


def host_nbytes() -> int:
    """Bytes of host memory that this process has in use.

    What malloc keeps for later is given back to the system first: it would make room for what a plugin keeps, or
    be taken for it.
    """
    with suppress(AttributeError, OSError):  # other systems' malloc does not have this call
        ctypes.CDLL(None).malloc_trim(0)
    return own_nbytes()
