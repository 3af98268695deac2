"""Checkpoints of one rank in which every part holds one value, so that a mixture of two saves would show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.numpy import NumpyBuffer, allocate_numpy
from polyaccel.checkpoint import TensorPiece, open_checkpoint
from polyaccel.checkpoint.save.protocol import SaveContents
from polyaccel.checkpoint.saver import SavePolicy, Saver
from polyaccel.comm.backends.local.backend import LocalWorld
from polyaccel.core.types import DType


def save(
    place: Path,
    value: float,
    *,
    tag: str = "t",
    numel: int = 1000,
    in_background: bool = False,
    storage: str = "file",
    options: Mapping[str, Any] | None = None,
    **policy: Any,
) -> None:
    """Save a tensor of `numel` elements and other things that all hold `value`, and wait until that is done."""
    (communicator,) = LocalWorld(1, CpuAccelerator("numpy")).communicators
    chosen = SavePolicy(in_background=in_background, storage=storage, options=options or {}, **policy)
    saver = Saver(communicator, chosen, {"value": value})
    data = NumpyBuffer(np.full(numel, value, np.float32))
    try:
        saver.save(
            str(place),
            tag,
            SaveContents(
                lambda: [TensorPiece("w", "param", (numel,), DType.FLOAT32, 0, data)],
                {"value": value},
                {"rng": str(value).encode()},
            ),
            save_latest=True,
        )
        saver.wait()
    finally:
        saver.close()


def value_of(place: Path, tag: str | None = None, *, fallback: bool = False) -> float:
    """The one value that every part of a checkpoint holds."""
    reader = open_checkpoint(place, tag, fallback=fallback)
    numel = reader.tensor("w", "param").numel
    buffer = allocate_numpy(numel, DType.FLOAT32)
    reader.read_into("w", "param", 0, numel, buffer)
    blob = float(reader.rank_blobs(0)["rng"])
    (value,) = {*buffer.raw.tolist(), reader.scalars["value"], reader.about["value"], blob}
    return float(value)


def left_behind(place: Path) -> list[str]:
    """What a save that ended badly should not leave: unfinished files, and folders beside the one that counts."""
    hidden = [path for path in place.rglob("*") if path.name.startswith(".")]
    folders = {tag: sorted(tag.glob("save-*")) for tag in place.iterdir() if tag.is_dir()}
    more = [folder for tag, found in folders.items() for folder in found[1 if (tag / "commit.json").exists() else 0 :]]
    return sorted(path.relative_to(place).as_posix() for path in (*hidden, *more))


def installed_in(folder: Path, name: str, target: str) -> None:
    """Make a package in `folder`, which then has to be on the path of processes, of the storage `name` at `target`."""
    info = folder / f"{name}_storage_of_tests-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}_storage_of_tests\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[polyaccel.storage]\n{name} = {target}\n")
