"""The memory that exports, imports and resharding take beside files that are mapped: `exchange_memory_job.py FOLDER`
and formats. Prints a line of JSON for each: its peak in bytes above where it began, and the bytes that progress told.

Each runs once before on tensors of a few bytes, so that what libraries need once does not count.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np

from polyaccel.checkpoint import open_checkpoint
from polyaccel.checkpoint.convert.exporting import chosen
from polyaccel.checkpoint.convert.importing import ImportTensor, Incoming, imported
from polyaccel.checkpoint.convert.resharding import resharded
from polyaccel.core.types import DType

COUNT, NUMEL = 12, 1 << 20
"""Parameters, and their elements; each has a moment of the optimizer of the same size."""
_SAMPLE_S = 0.001
_LIBC = ctypes.CDLL(None)


def anonymous_nbytes() -> int:
    """The memory of this process that is no file's."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def peak_of(work: Callable[[], None]) -> int:
    """The most memory above where it began, looked at every millisecond."""
    gc.collect()
    _LIBC.malloc_trim(0)
    begin, done, peak = anonymous_nbytes(), Event(), 0

    def watch() -> None:
        nonlocal peak
        while not done.wait(_SAMPLE_S):
            peak = max(peak, anonymous_nbytes() - begin)

    watcher = Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(peak, anonymous_nbytes() - begin)


def begin(place: Path, numel: int) -> None:
    """A checkpoint to begin with, of tensors that are made when they are read."""

    def reading(value: float) -> Callable[[int, int], bytes]:
        return lambda start, count: np.full(count, value, np.float32).tobytes()

    tensors = [
        ImportTensor(f"w{number:02d}", kind, (numel,), DType.FLOAT32, reading(float(number)))
        for number in range(COUNT)
        for kind in ("param", "exp_avg")
    ]
    steps = {tensor.fqn: 3 for tensor in tensors}
    imported(Incoming(tensors, steps=steps, groups=[{"lr": 0.1}]), str(place), "t", "a test", lambda nbytes: None)


def module_of(name: str) -> Any:
    known = {"bin": "torch_bin", "dcp": "torch_dcp"}
    where = "polyaccel_deepspeed.exchange" if name.startswith("deepspeed") else "polyaccel.checkpoint.convert.formats"
    return import_module(f"{where}.{known.get(name, name)}")


def go(name: str, folder: Path, told: Callable[[int], None]) -> list[Callable[[], None]]:
    """The export to a format and the import of it, or the resharding, below `folder`."""
    reader = open_checkpoint(folder / "c")
    if name == "reshard":
        return [lambda: void(resharded(reader, str(folder / "resharded"), "t", 2, told))]
    out = folder / name
    states = ("param",) if name in ("safetensors", "bin") else ("param", "exp_avg")
    tensors = tuple(tensor for kind in states for tensor in chosen(reader, [kind], None))

    def export() -> None:
        if name == "deepspeed":
            out.mkdir()
            import_module("polyaccel_deepspeed.exchange.exporting").write(out, reader, tensors, told)
        elif name in ("safetensors", "bin"):
            module_of(name).write(out, tensors, 8 * NUMEL, told)
        elif name == "dcp":
            module_of(name).write(out, reader, tensors, told)
        else:
            module_of(name).write(out, tensors, told)

    def take_in() -> None:
        if name == "deepspeed":
            found = import_module("polyaccel_deepspeed.exchange.importing").read(out)
        else:
            found = module_of(name).read(out)
        incoming = found if isinstance(found, Incoming) else Incoming(found)
        imported(incoming, str(folder / f"{name}-back"), "t", name, told)

    return [export, take_in]


def void(_: object) -> None:
    """Nothing of it."""


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for part, numel in (("small", 8), ("large", NUMEL)):
        (folder / part).mkdir()
        begin(folder / part / "c", numel)
    for name in names:
        for work in go(name, folder / "small", lambda nbytes: None):
            work()
        told: list[int] = []
        for what, work in zip(("export", "import"), go(name, folder / "large", told.append), strict=False):
            told.clear()
            peak = peak_of(work)
            print(json.dumps({"format": name, "what": what, "peak": peak, "told": sum(told)}), flush=True)


if __name__ == "__main__":
    main()
