"""Text that every machine has: the source of Python's own standard library, as two memory-mapped files of bytes.

Files are split by name, not by position, so no function is half in training and half in validation.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polyaccel import PolyaccelError

SEPARATOR = b"\0"
"""Stands after each file; no source text has it."""
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_VALIDATION_SHARE = 20
_FORMAT = "1"


@dataclass(frozen=True)
class Corpus:
    """The two parts on disk. `digest` identifies their content."""

    training: Path
    validation: Path
    digest: str
    files: dict[str, list[str]]
    """Names below the library's root, under `training` and `validation`."""


def open_corpus(root: Path | None = None, cache: Path | None = None) -> Corpus:
    """The corpus made of the library in `root`, from `cache` if it was made before.

    Any number of processes may call this at once. Raises PolyaccelError when `root` has too little source.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyaccel"
    files = find_sources(root)
    parts = {part: [file for file in files if part_of(file, root) == part] for part in ("training", "validation")}
    if not all(parts.values()):
        raise PolyaccelError(
            f"{root} has {len(files)} source files, too few to train and validate on",
            hint="use a Python that has its library as source files",
            value=str(root),
        )
    folder = cache / f"stdlib-{_fingerprint(files, root)}"
    if not (folder / "corpus.json").exists():
        _write(folder, parts, root)
    described = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    for part, nbytes in described["nbytes"].items():
        if (folder / f"{part}.bin").stat().st_size != nbytes:
            raise PolyaccelError(f"{folder / part}.bin is not what was written", hint=f"remove {folder}", value=nbytes)
    return Corpus(folder / "training.bin", folder / "validation.bin", described["digest"], described["files"])


def find_sources(root: Path) -> list[Path]:
    """The library's own Python files under `root`, in a fixed order."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def part_of(file: Path, root: Path) -> str:
    """`training` or `validation`, by the file's name alone, so the same on every machine."""
    name = file.relative_to(root).as_posix()
    chosen = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _VALIDATION_SHARE == 0
    return "validation" if chosen else "training"


def _fingerprint(files: Sequence[Path], root: Path) -> str:
    stats = ((file.relative_to(root).as_posix(), file.stat()) for file in files)
    listed = [_FORMAT, str(root), *(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)]
    return hashlib.sha256("\n".join(listed).encode()).hexdigest()[:16]


def _write(folder: Path, parts: dict[str, list[Path]], root: Path) -> None:
    """Make `folder` appear at once and whole. Whoever is second finds it there and leaves its own copy."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".corpus-", ignore_cleanup_errors=True) as made:
        draft = Path(made) / "draft"
        draft.mkdir()
        digest, nbytes = hashlib.sha256(), {}
        for part, files in parts.items():
            text = b"".join(file.read_bytes() + SEPARATOR for file in files)
            (draft / f"{part}.bin").write_bytes(text)
            digest.update(text)
            nbytes[part] = len(text)
        names = {part: [file.relative_to(root).as_posix() for file in files] for part, files in parts.items()}
        described = {"digest": digest.hexdigest(), "nbytes": nbytes, "files": names}
        (draft / "corpus.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
        try:
            draft.rename(folder)
        except OSError:
            if not (folder / "corpus.json").exists():
                raise


def validation_share(windows: Sized, *, count: int, rank: int, world_size: int) -> list[int]:
    """Which windows this rank evaluates: about `count` in all, spread evenly over the file, equally many a rank."""
    each = max(1, min(count, len(windows)) // world_size)
    spread: list[int] = np.linspace(0, len(windows) - 1, each * world_size).astype(int).tolist()
    return spread[rank::world_size]
