"""Which of several ranks' failures a pool of ranks raises."""

from __future__ import annotations

import pytest

from polyaccel.comm.init.threads import blame
from polyaccel.errors import CommError, CommTimeout, LaunchError
from polyaccel.testkit.ranks.procs import _first

GONE = CommError("#1 all_gather on rank 1 failed", missing_ranks=[0])
LATE = CommTimeout("#1 all_reduce on rank 0 timed out", missing_ranks=[1])
DEAD = LaunchError("worker rank 2 died")


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ({1: GONE, 0: LATE}, LATE),
        ({0: LATE, 1: GONE}, LATE),
        ({1: GONE, 0: KeyError("batch")}, KeyError),
        ({1: GONE}, GONE),
        ({1: GONE, 0: LATE, 2: DEAD}, DEAD),
    ],
    ids=["news first", "words first", "another error", "nobody else", "a death"],
)
def test_a_rank_that_others_miss_speaks_before_them(
    failures: dict[int, BaseException], first: BaseException | type
) -> None:
    chosen = _first({rank: blame(error, rank) for rank, error in failures.items()}, [])
    assert chosen is first or type(chosen) is first
    assert len(chosen.__dict__["__notes__"]) >= len(failures)
