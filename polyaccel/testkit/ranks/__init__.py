"""Ranks for tests: as threads (`threads`), as processes (`procs`), as those that mpirun starts (`mpi`)."""

from __future__ import annotations

DEFAULT_TIMEOUT_S = 110.0  # for ranks that hang; one that compiles programs on a busy machine takes a minute


def blame(error: BaseException, rank: int) -> BaseException:
    """`error` with the rank that raised it, as attribute `rank` and as a note under its traceback."""
    notes = [*getattr(error, "__notes__", ()), f"raised on rank {rank}"]
    error.__dict__.update(rank=rank, __notes__=notes)  # add_note is younger than Python 3.10
    return error
