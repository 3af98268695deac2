"""Saves on a small disk that runs full or can only be read: `full_disk_job.py FOLDER MODE`, as root of its own
namespaces (`unshare -rm`). Prints a line of JSON for each case: what it was, and what went otherwise than it should.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from one_value import left_behind, save, value_of

from polyaccel.checkpoint.storage.file import FileStorage
from polyaccel.errors import CheckpointError

DISK_NBYTES, PAGE_NBYTES, NUMEL = 1 << 20, 4096, 20_000
LEAVES = (0, 1, 2, 3, 10, 21, 22, 23, 24, 25)
"""Pages that are free when a save begins; all of it needs about 25."""
FULL, ROOM = "is full: free some space", "free some space or save elsewhere"


class FillingStorage(FileStorage):
    """A folder whose disk somebody else fills, to the last `leaves` pages, once its room has been looked at."""

    API_VERSION = (2, 0)
    name = "filling"

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> Any:
        return dict(options)

    def check_space(self, nbytes: int) -> None:
        super().check_space(nbytes)
        fill(Path(self.location).parent, self.options["leaves"])


def fill(disk: Path, leaves: int) -> None:
    """Take all pages of the disk but `leaves`."""
    with (disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(PAGE_NBYTES))
    size = (disk / "ballast").stat().st_size // PAGE_NBYTES * PAGE_NBYTES
    with (disk / "ballast").open("r+b") as file:
        file.truncate(max(0, size - leaves * PAGE_NBYTES))


def refused(place: Path, cures: tuple[str, ...], **arguments: Any) -> bool:
    """Whether a save fails, by an error that tells one of the cures."""
    try:
        save(place, 2.0, numel=NUMEL, **arguments)
    except CheckpointError as error:
        caught = error
    else:
        return False
    assert any(hint in caught.hint for hint in cures), f"the hint is {caught.hint!r}: {caught.message}"
    return True


def whole(place: Path, values: tuple[float, ...]) -> None:
    """The checkpoint before is there, or the new one, and nothing else."""
    assert value_of(place, "old") == 0.0
    assert value_of(place, "t") in values, f"the tag holds {value_of(place, 't')}"
    assert value_of(place) in (0.0, *values)
    assert not left_behind(place), f"left behind: {left_behind(place)}"


def main() -> None:
    disk, in_background = Path(sys.argv[1], "disk"), sys.argv[2] == "background"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_NBYTES}", "tmpfs", str(disk)], check=True)
    place = disk / "saves"
    failed = 0

    def tried(what: str, check: Any) -> None:
        problem = ""
        save(place, 0.0, tag="old", numel=NUMEL, in_background=in_background)
        save(place, 1.0, numel=NUMEL, in_background=in_background)
        try:
            check()
            (disk / "ballast").unlink(missing_ok=True)
            save(place, 3.0, numel=NUMEL, in_background=in_background)
            assert value_of(place) == 3.0
        except (AssertionError, CheckpointError) as error:
            problem = f"{type(error).__name__}: {error}"
        (disk / "ballast").unlink(missing_ok=True)
        print(json.dumps({"case": what, "problem": problem}), flush=True)

    def runs_full(leaves: int) -> None:
        nonlocal failed
        options = {"leaves": leaves}
        has_failed = refused(place, (FULL,), in_background=in_background, storage="filling", options=options)
        failed += has_failed
        whole(place, (1.0, 2.0) if has_failed else (2.0,))

    def has_no_room() -> None:
        fill(disk, 2)
        assert refused(place, (ROOM, FULL), in_background=in_background)
        whole(place, (1.0,))

    def is_read_only() -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        try:
            assert refused(place, ("that you may use it",), in_background=in_background)
            whole(place, (1.0,))
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)

    for leaves in LEAVES:
        tried("a disk that runs full during a save", lambda leaves=leaves: runs_full(leaves))
    assert failed >= len(LEAVES) - 3, f"only {failed} saves ran out of room"
    tried("a disk that is full before a save", has_no_room)
    tried("a folder that can only be read", is_read_only)


if __name__ == "__main__":
    main()
