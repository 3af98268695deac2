"""Universal checkpoints of DeepSpeed, loaded by an engine: one is imported into its folder first, and then read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from polyaccel.checkpoint.collective_call import on_rank_0
from polyaccel.checkpoint.convert.importing import imported
from polyaccel.comm.base import Communicator
from polyaccel_deepspeed.exchange.importing import read

_LATEST = "latest_universal"
_TAG = "imported"


@contextmanager
def universal_as_ours(communicator: Communicator, load_dir: str, tag: str | None) -> Iterator[tuple[str, str | None]]:
    """Give folder and tag of what to load: as they are, unless they name a universal checkpoint. Collective.

    Of that there is a copy in polyaccel's format inside of the context, on rank 0's file system. Raises CheckpointError
    on all ranks for one that cannot be read.
    """
    step = "the universal checkpoint is read"
    found = on_rank_0(communicator, step, lambda: _imported(Path(load_dir), tag))
    if found is None:
        yield load_dir, tag
        return
    try:
        yield found, _TAG
        communicator.barrier()  # others may still read
    finally:
        if communicator.rank == 0:
            rmtree(Path(found).parent)


def _imported(folder: Path, tag: str | None) -> str | None:
    latest = folder / _LATEST
    if tag is None and latest.is_file():
        tag = latest.read_text(encoding="utf-8").strip()
    if tag is None or not (folder / tag / "zero").is_dir():
        return None
    source = folder / tag
    room = Path(mkdtemp(prefix=f".{tag}-", dir=folder))
    try:
        imported(read(source), str(room / "ours"), _TAG, f"deepspeed: {source}", _unseen)
    except BaseException:
        rmtree(room)
        raise
    return str(room / "ours")


def _unseen(nbytes: int) -> None:
    """Show no progress."""
