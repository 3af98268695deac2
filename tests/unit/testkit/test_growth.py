"""What `keeps_nothing` takes for a leak."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, chain, repeat

import pytest

from polyaccel.testkit.growth import host_nbytes, keeps_nothing

MIB = 1 << 20


def checked(growths: Iterable[int]) -> None:
    """Check rounds that move 16 MiB each, of which the n-th leaves `growths[n]` MiB behind."""
    grown = accumulate(chain(growths, repeat(0)))
    in_use = {"now": 0}

    def act() -> None:
        in_use["now"] = next(grown) * MIB

    keeps_nothing(act, 16 * MIB, "memory", held=lambda: in_use["now"])


def test_what_is_set_aside_in_the_first_rounds_is_no_leak() -> None:
    checked([64, 16, 16, 9, 0, 0])


@pytest.mark.parametrize("hidden", [1, 2, 5, 11])
def test_a_leak_is_seen_though_one_round_hides_it(hidden: int) -> None:
    """Something else in the process lets go of its memory meanwhile."""
    growths = [16] * 13
    growths[hidden] = -40
    with pytest.raises(AssertionError) as caught:
        checked(growths)
    assert "MiB" in str(caught.value)


def test_the_hosts_memory_is_what_was_allocated() -> None:
    before = host_nbytes()
    kept = bytearray(b"x") * (48 * MIB)
    assert 47 * MIB < host_nbytes() - before < 64 * MIB
    del kept
    assert host_nbytes() - before < 16 * MIB
