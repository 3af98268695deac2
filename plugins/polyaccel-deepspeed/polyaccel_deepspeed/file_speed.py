"""`ds_io` and `ds_nvme_tune`: how fast tensors are written to the files of a folder, and read."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from polyaccel_deepspeed.files import aio_handle

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_THREADS = (1, 2, 4, 8)
"""What `ds_nvme_tune` tries."""


def nbytes_of(text: str) -> int:
    """Return the bytes that `400M` stands for. Raises ValueError."""
    unit = _UNITS.get(text[-1:].upper())
    return int(text) if unit is None else int(text[:-1]) * unit


def measure(folder: Path, nbytes: int, threads: int, loops: int, warmups: int, *, reads: bool) -> float:
    """Return the bytes a second of `loops` operations, after `warmups` that are not counted."""
    handle = aio_handle(intra_op_parallelism=threads)
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    name = str(folder / "io.bin")
    handle.sync_pwrite(tensor, name)
    spent = 0.0
    for loop in range(warmups + loops):
        began = perf_counter()
        if reads:
            handle.sync_pread(tensor, name)
        else:
            handle.sync_pwrite(tensor, name)
            _flush(name)
        spent += (perf_counter() - began) * (loop >= warmups)
    return nbytes * loops / spent


def _flush(name: str) -> None:
    """Wait until a file is on its disk."""
    file = os.open(name, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def io_parser() -> argparse.ArgumentParser:
    """Return the options of `ds_io` that have an effect here; others of DeepSpeed's are left over."""
    parser = argparse.ArgumentParser(prog="ds_io", description=io.__doc__, allow_abbrev=False)
    parser.add_argument("--folder", required=True, help="a folder on the disk to measure")
    parser.add_argument("--io_size", required=True, type=nbytes_of, help="bytes of a file, as 400M")
    parser.add_argument("--read", action="store_true", help="read; the default is to write")
    parser.add_argument("--io_parallel", type=int, default=1, help="threads of an operation (default: %(default)s)")
    parser.add_argument("--loops", type=int, default=3, help="timed (default: %(default)s)")
    parser.add_argument("--warmup_loops", type=int, default=1, help="before that (default: %(default)s)")
    return parser


def tune_parser() -> argparse.ArgumentParser:
    """Return the options of `ds_nvme_tune` that have an effect here."""
    parser = argparse.ArgumentParser(prog="ds_nvme_tune", description=tune.__doc__, allow_abbrev=False)
    parser.add_argument("--nvme_dir", required=True, help="a folder on the disk to measure")
    parser.add_argument("--io_size", default=nbytes_of("400M"), type=nbytes_of, help="bytes of a file, as 400M")
    parser.add_argument("--no_read", action="store_true", help="do not read")
    parser.add_argument("--no_write", action="store_true", help="do not write")
    parser.add_argument("--loops", type=int, default=1, help="timed (default: %(default)s)")
    return parser


def io(argv: Sequence[str] | None = None) -> int:
    """Measure how fast a file is written, until it is on the disk, or read, which the system may do from memory."""
    given, left = io_parser().parse_known_args(argv)
    if left:
        print(f"without effect: {' '.join(left)}")
    with TemporaryDirectory(dir=given.folder) as folder:
        speed = measure(
            Path(folder), given.io_size, given.io_parallel, given.loops, given.warmup_loops, reads=given.read
        )
    print(f"{'read' if given.read else 'write'} speed: {speed / 2**30:.3f} GB/s")
    return 0


def tune(argv: Sequence[str] | None = None) -> int:
    """Measure a folder's files with 1 to 8 threads an operation, and print the fastest number as a section `aio`."""
    given, left = tune_parser().parse_known_args(argv)
    if left:
        print(f"without effect: {' '.join(left)}")
    ways = [reads for reads, is_out in ((True, given.no_read), (False, given.no_write)) if not is_out]
    best = max(_sums(Path(given.nvme_dir), given.io_size, given.loops, ways), default=(0.0, 1))
    print(json.dumps({"aio": {"intra_op_parallelism": best[1]}}))
    return 0


def _sums(folder: Path, nbytes: int, loops: int, ways: Sequence[bool]) -> Iterator[tuple[float, int]]:
    """The summed speeds by number of threads, each of which is printed."""
    for threads in _THREADS if ways else ():
        speeds = []
        with TemporaryDirectory(dir=folder) as inside:
            for reads in ways:
                speeds.append(measure(Path(inside), nbytes, threads, loops, 1, reads=reads))
                print(f"{'read' if reads else 'write'} {threads} threads: {speeds[-1] / 2**30:.3f} GB/s")
        yield sum(speeds), threads
