"""One rank before the others: for downloads and caches that the others then find."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from polyaccel.comm.api.functions import barrier, get_local_rank, get_rank
from polyaccel.comm.default import is_initialized


@contextmanager
def main_process_first(*, local: bool = False) -> Iterator[None]:
    """Return a context whose block runs on rank 0, and then on the other ranks, which wait until it has ended there.

    Before `init_distributed` every rank runs it at once. An error in the block of rank 0 does not keep the others.

    Args:
        local: Let the first rank of each host begin, for files that hosts do not share.

    Returns:
        Context manager, to be entered by every rank.
    """
    has_others = is_initialized()
    is_first = not has_others or (get_local_rank() if local else get_rank()) == 0
    if not is_first:
        barrier()
    try:
        yield
    finally:
        if has_others and is_first:
            barrier()
