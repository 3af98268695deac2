"""How long training stands still for a checkpoint, how fast it is written and read, and what memory that takes.

Every way saves the same training: parameters and the two moments of AdamW, two ranks, into one folder. `raw` writes and
reads as many bytes as polyaccel does, in one file a rank with an fsync, and is what the rates are compared with. orbax
saves arrays of JAX with the values that polyaccel would save, each rank's into a folder of its own. The folder's pages
stay in the system's cache, so that reading is a matter of memory for all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from bench.machine import describe_machine
from bench.measure import read_memory, reset_peak
from bench.steps.cases import SHAPES, VARIANTS, Case, Job
from bench.steps.launch import figures_of, why_absent
from bench.steps.sitting import listed, one_of, positive
from bench.table import make_console, make_table

WAYS = {
    "polyaccel-async": "pa1",
    "polyaccel": "pa1",
    "dcp-async": "fsdp2",
    "dcp": "fsdp2",
    "deepspeed": "ds1",
    "orbax-async": "pa1",
    "orbax": "pa1",
    "raw": "pa1",
}
"""Ways to save, and the variant that trains."""
_RANKS = 2
_LIMIT_S = 900.0
_MIB = 1 << 20


def main(argv: Sequence[str]) -> int:
    """`python -m bench saves`."""
    parser = argparse.ArgumentParser(prog="python -m bench saves", description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="29m", help="model (default: %(default)s)")
    parser.add_argument("--micro-batch", type=positive, default=4, help="sequences a rank (default: %(default)s)")
    parser.add_argument("--stage", type=int, choices=(1, 3), default=1, help="polyaccel's own (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=5, help="saves (default: %(default)s)")
    parser.add_argument("--folder", default=None, help="where to save (default: a temporary folder)")
    parser.add_argument(
        "--ways",
        type=listed(one_of(WAYS)),
        default=",".join(WAYS),
        metavar="NAME,...",
        help="ways to save (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    console = make_console()
    console.print(str(describe_machine()), markup=False)
    table = make_table(
        f"Checkpoints, {args.size}, AdamW, fp32, {_RANKS} ranks, medians of {args.repeats}",
        ("way", "step s", "stands still s", "of a step", "durable s", "MiB", "write MiB/s", "read MiB/s", "more MiB"),
    )
    for way in args.ways:
        reason, variant = _why_absent(way), WAYS[way].replace("pa1", f"pa{args.stage}")
        if reason is not None:
            console.print(f"{way} skipped: {reason}")
            continue
        job = Job(variant, Case(args.size, args.micro_batch, "fp32", _RANKS), 3, args.repeats, 0)
        with TemporaryDirectory(prefix="polyaccel-bench-", dir=args.folder) as folder:
            table.add_row(way, *_cells(_measure(job, way, Path(folder))))
    console.print(table)
    return 0


def _why_absent(way: str) -> str | None:
    """Why this machine cannot save that `way`; None if it can."""
    if way.startswith("orbax") and find_spec("orbax") is None:
        return "orbax-checkpoint is not installed"
    return why_absent(VARIANTS[WAYS[way]])


def _cells(figures: dict[str, Any]) -> list[str]:
    step_s, saves = median(figures["step_s"]), figures["saves"]
    stall_s, durable_s, read_s = (median(save[key] for save in saves) for key in ("stall_s", "durable_s", "read_s"))
    mib = figures["nbytes"] / _MIB
    return [
        f"{step_s:.3f}",
        f"{stall_s:.3f}",
        f"{stall_s / step_s:.2f}",
        f"{durable_s:.2f}",
        f"{mib:.0f}",
        f"{mib / durable_s:.0f}",
        f"{mib / read_s:.0f}",
        f"{figures['more_nbytes'] / _MIB:.0f}",
    ]


def _measure(job: Job, way: str, folder: Path) -> dict[str, Any]:
    result, options = folder / "figures.json", ["--nproc", str(_RANKS)]
    figures: dict[str, Any] = figures_of(__spec__.name, [job.to_json(), way, str(result)], result, options, _LIMIT_S)
    return figures


def train(job: Job, way: str, result: Path) -> None:
    """What every rank does: steps, and saves between them."""
    import torch
    import torch.distributed as dist

    from bench.measure import PhaseClock
    from bench.steps.model import Gpt, draw_batch, load_corpus
    from bench.steps.trainers import build_trainer, load_library

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    variant = VARIANTS[job.variant]
    library = load_library(variant)
    trainer: Any = build_trainer(job, variant, Gpt(SHAPES[job.case.size]), library, job.case.world_size)
    corpus, clock, rank = load_corpus(), PhaseClock(), dist.get_rank()
    folder = result.parent / "saved"
    saving = _WAYS[way](trainer, folder, rank)
    step_s, saves, turn = list[float](), list[dict[str, float]](), 0

    def step() -> None:
        nonlocal turn
        began = perf_counter()
        trainer.step(*draw_batch(corpus, turn, rank, job.case.micro_batch), clock)
        step_s.append(perf_counter() - began)
        turn += 1

    for _ in range(job.warmup):
        step()
    step_s.clear()
    before = read_memory().rss_nbytes
    reset_peak()
    for number in range(job.steps + 1):
        step()
        if isinstance(saving, _Orbax):
            saving.take()
        dist.barrier()
        began = perf_counter()
        ended = saving.save(number)
        stall_s = perf_counter() - began
        ended()
        dist.barrier()
        durable_s = perf_counter() - began
        began = perf_counter()
        saving.read(number)
        dist.barrier()
        saves.append({"stall_s": stall_s, "durable_s": durable_s, "read_s": perf_counter() - began})
        nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        dist.barrier()
        if rank == 0:
            rmtree(folder)
        dist.barrier()
    more = read_memory().peak_nbytes - before
    if rank == 0:  # the first save makes what the others find
        figures = {"step_s": step_s, "saves": saves[1:], "nbytes": nbytes, "more_nbytes": more}
        result.write_text(json.dumps(figures))
    dist.barrier()


class _Polyaccel:
    def __init__(self, trainer: Any, folder: Path, rank: int, *, background: bool) -> None:
        from dataclasses import replace

        self._engine, self._folder = trainer._engine, folder
        self._engine._saver.policy = replace(self._engine._saver.policy, in_background=background)

    def save(self, number: int) -> Callable[[], Any]:
        self._engine.save_checkpoint(str(self._folder), tag=str(number))
        return lambda: self._engine.wait_for_checkpoint()

    def read(self, number: int) -> None:
        self._engine.load_checkpoint(str(self._folder), tag=str(number))


class _Dcp:
    """torch's own checkpoints of FSDP2's state."""

    def __init__(self, trainer: Any, folder: Path, rank: int, *, background: bool) -> None:
        self._model, self._optimizer, self._folder = trainer._model, trainer._optimizer, folder
        self._background = background

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, number: int) -> Callable[[], Any]:
        dcp: Any = import_module("torch.distributed.checkpoint")
        if not self._background:
            dcp.save(self._state(), checkpoint_id=self._folder)
            return lambda: None
        done: Callable[[], Any] = dcp.async_save(self._state(), checkpoint_id=self._folder).result
        return done

    def read(self, number: int) -> None:
        dcp: Any = import_module("torch.distributed.checkpoint")
        dcp.load(self._state(), checkpoint_id=self._folder)


class _DeepSpeed:
    """DeepSpeed's own checkpoints, one file of optimizer states a rank."""

    def __init__(self, trainer: Any, folder: Path, rank: int) -> None:
        self._engine, self._folder = trainer._engine, folder

    def save(self, number: int) -> Callable[[], Any]:
        self._engine.save_checkpoint(str(self._folder), tag=str(number))
        return lambda: None

    def read(self, number: int) -> None:
        self._engine.load_checkpoint(str(self._folder), tag=str(number))


class _Orbax:
    """Arrays of JAX with the values that polyaccel would save."""

    def __init__(self, trainer: Any, folder: Path, rank: int, *, background: bool) -> None:
        ocp: Any = import_module("orbax.checkpoint")
        self._zero = trainer._engine.zero
        self._tree: dict[str, Any] = {}
        kind = ocp.AsyncCheckpointer if background else ocp.Checkpointer
        self._saver, self._folder = kind(ocp.StandardCheckpointHandler()), folder / f"rank{rank}"
        self._arguments: Any = ocp.args.StandardSave

    def take(self) -> None:
        """Make arrays of JAX of what is to be saved, as a training in JAX has them already."""
        import jax
        import numpy as np

        self._tree = {
            f"{slot.param.fqn}:{kind}:{start}": jax.numpy.asarray(np.frombuffer(buffer.to_bytes(), np.float32))
            for slot, kind, start, buffer in self._zero.local_shards()
        }

    def save(self, number: int) -> Callable[[], Any]:
        self._folder.parent.mkdir(exist_ok=True)
        self._saver.save(self._folder / str(number), args=self._arguments(self._tree))
        return getattr(self._saver, "wait_until_finished", lambda: None)

    def read(self, number: int) -> None:
        self._saver.restore(self._folder / str(number))


class _Raw:
    """As many bytes as a rank of polyaccel writes, in one file."""

    def __init__(self, trainer: Any, folder: Path, rank: int) -> None:
        pieces = [buffer.nbytes for _, _, _, buffer in trainer._engine.zero.local_shards()]
        self._data = os.urandom(sum(pieces))
        self._path = folder / f"rank{rank}"

    def save(self, number: int) -> Callable[[], Any]:
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("wb") as file:
            file.write(self._data)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def read(self, number: int) -> None:
        target = bytearray(len(self._data))
        with self._path.open("rb", buffering=0) as file:
            view, at = memoryview(target), 0
            while at < len(target):
                at += file.readinto(view[at:]) or 0


_WAYS: dict[str, Callable[[Any, Path, int], Any]] = {
    "polyaccel-async": lambda *at: _Polyaccel(*at, background=True),
    "polyaccel": lambda *at: _Polyaccel(*at, background=False),
    "dcp-async": lambda *at: _Dcp(*at, background=True),
    "dcp": lambda *at: _Dcp(*at, background=False),
    "deepspeed": _DeepSpeed,
    "orbax-async": lambda *at: _Orbax(*at, background=True),
    "orbax": lambda *at: _Orbax(*at, background=False),
    "raw": _Raw,
}


if __name__ == "__main__":
    if os.environ.get("RANK") is None:
        sys.exit(main(sys.argv[1:]))
    train(Job.from_json(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
