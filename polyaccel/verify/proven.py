"""Digests of trainings that were proven on this machine, in the user's cache folder."""

from __future__ import annotations

from pathlib import Path

from polyaccel.core.user_dirs import atomic_write_private, cache_folder


def is_proven(digest: str) -> bool:
    """Return whether a training with this digest was proven before."""
    return _file(digest).is_file()


def keep_proven(digest: str, summary: str) -> None:
    """Keep that a training was proven. Where the cache cannot be written, the next run proves it again."""
    file = _file(digest)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_private(file, f"{summary}\n".encode())
    except OSError:
        return


def _file(digest: str) -> Path:
    return cache_folder() / "proven" / digest[:32]
