"""Pause of training for a checkpoint, rates of writing and reading, and memory, of polyaccel, DCP, DeepSpeed and orbax.

Every way saves the same training: parameters and the two moments of AdamW, two ranks, into one folder. `raw` writes and
reads as many bytes as polyaccel does, in one file a rank with an fsync. orbax saves arrays of JAX with the values that
polyaccel would save, each rank's into a separate folder. The folder's pages stay in the system's cache.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from bench.measure import read_memory, reset_peak
from bench.runner import MIB, Case, Column, Option, Runs, Settings, Start
from bench.sizes import SHAPES

_WARMUP = 3
_WAYS = ("polyaccel-async", "polyaccel", "dcp-async", "dcp", "deepspeed", "orbax-async", "orbax", "raw")


def variants(args: argparse.Namespace) -> Mapping[str, Start | str]:
    """Return the launch of each way to save."""
    needs = {way: way.partition("-")[0] for way in _WAYS if way.startswith(("orbax", "deepspeed"))}
    return {
        way: f"{needs[way]} is not installed" if way in needs and find_spec(needs[way]) is None else Start()
        for way in _WAYS
    }


def columns(s: Settings) -> Mapping[str, Column]:
    """Return the columns."""

    def of(name: str) -> Callable[[Runs], float]:
        return lambda own: float(median(own.every(name)))

    step, pause, durable, read = map(of, ("seconds", "pause_s", "durable_s", "read_s"))

    def size(own: Runs) -> float:
        return float(own.values("nbytes")[0]) / MIB

    return {
        "step s": lambda own, found: f"{step(own):.3f}",
        "pause s": lambda own, found: f"{pause(own):.3f}",
        "of a step": lambda own, found: f"{pause(own) / step(own):.2f}",
        "durable s": lambda own, found: f"{durable(own):.2f}",
        "MiB": lambda own, found: f"{size(own):.0f}",
        "write MiB/s": lambda own, found: f"{size(own) / durable(own):.0f}",
        "read MiB/s": lambda own, found: f"{size(own) / read(own):.0f}",
        "more MiB": lambda own, found: f"{own.values('more_nbytes')[0] / MIB:.0f}",
    }


def work(variant: str, s: Settings) -> dict[str, Any]:
    """Train, with saves between steps."""
    import torch.distributed as dist

    from bench.cases.steps import build_trainer, load_library
    from bench.training import Gpt, draw_batch, load_corpus

    dist.init_process_group("gloo")
    trained_by = {"dcp": "fsdp2", "deepspeed": "ds1"}.get(variant.partition("-")[0], f"pa{s['stage']}")
    trainer = build_trainer(trained_by, {**s, "ranks": 2}, Gpt(s["size"]), load_library(trained_by))
    corpus, rank = load_corpus(), dist.get_rank()
    names: list[Any] = [TemporaryDirectory(prefix="polyaccel-bench-", dir=s["folder"] or None) if not rank else None]
    shared: list[Any] = [names[0].name if not rank else ""]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0], "saved")
    saving = _SAVERS[variant.partition("-")[0]](trainer.subject, folder, rank, variant.endswith("-async"))
    took: dict[str, list[float]] = {name: [] for name in ("seconds", "pause_s", "durable_s", "read_s")}

    def step(number: int) -> None:
        began = perf_counter()
        trainer.step(*draw_batch(corpus, number, rank, s["micro_batch"]))
        took["seconds"].append(perf_counter() - began)

    for number in range(_WARMUP):
        step(number)
    before, nbytes = read_memory()["VmRSS"], 0
    reset_peak()
    for number in range(s["repeats"] + 1):
        step(_WARMUP + number)
        saving.take()
        dist.barrier()
        began = perf_counter()
        wait = saving.save(number)
        took["pause_s"].append(perf_counter() - began)
        wait()
        dist.barrier()
        took["durable_s"].append(perf_counter() - began)
        began = perf_counter()
        saving.read(number)
        dist.barrier()
        took["read_s"].append(perf_counter() - began)
        nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        dist.barrier()
        if rank == 0:
            rmtree(folder)
        dist.barrier()
    more = read_memory()["VmHWM"] - before
    figures = {name: times[-s["repeats"] :] for name, times in took.items()}  # the first save compiles and allocates
    return {**figures, "nbytes": nbytes, "more_nbytes": more}


class _Saver:
    """Way to save and read the state of a trainer's subject."""

    def __init__(self, subject: Any, folder: Path, rank: int, background: bool) -> None:
        self.subject, self.folder, self.rank, self.background = subject, folder, rank, background

    def take(self) -> None:
        """Prepare what a training in the library has already."""

    def save(self, number: int) -> Callable[[], Any]:
        """Save; return the wait for the end."""
        self.subject.save_checkpoint(str(self.folder), tag=str(number))
        return lambda: None

    def read(self, number: int) -> None:
        """Read what was saved."""
        self.subject.load_checkpoint(str(self.folder), tag=str(number))


class _Polyaccel(_Saver):
    """Our checkpoints."""

    def save(self, number: int) -> Callable[[], Any]:
        saver = self.subject._saver
        saver.policy = replace(saver.policy, in_background=self.background)
        super().save(number)
        wait: Callable[[], Any] = self.subject.wait_for_checkpoint
        return wait


class _Dcp(_Saver):
    """torch's distributed checkpoints of FSDP2's state."""

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(*self.subject)
        return {"model": model, "optimizer": optimizer}

    def save(self, number: int) -> Callable[[], Any]:
        dcp: Any = import_module("torch.distributed.checkpoint")
        if not self.background:
            dcp.save(self._state(), checkpoint_id=self.folder)
            return lambda: None
        done: Callable[[], Any] = dcp.async_save(self._state(), checkpoint_id=self.folder).result
        return done

    def read(self, number: int) -> None:
        dcp: Any = import_module("torch.distributed.checkpoint")
        dcp.load(self._state(), checkpoint_id=self.folder)


class _Orbax(_Saver):
    """Arrays of JAX with the values that polyaccel would save."""

    def take(self) -> None:
        import jax
        import numpy as np

        if not hasattr(self, "saver"):
            ocp: Any = import_module("orbax.checkpoint")
            kind = ocp.AsyncCheckpointer if self.background else ocp.Checkpointer
            self.saver, self.arguments = kind(ocp.StandardCheckpointHandler()), ocp.args.StandardSave
        self.tree = {
            f"{slot.param.fqn}:{kind}:{start}": jax.numpy.asarray(np.frombuffer(buffer.to_bytes(), np.float32))
            for slot, kind, start, buffer in self.subject.zero.local_shards()
        }

    def save(self, number: int) -> Callable[[], Any]:
        self.folder.mkdir(exist_ok=True)
        self.saver.save(self.folder / f"rank{self.rank}" / str(number), args=self.arguments(self.tree))
        return getattr(self.saver, "wait_until_finished", lambda: None)

    def read(self, number: int) -> None:
        self.saver.restore(self.folder / f"rank{self.rank}" / str(number))


class _Raw(_Saver):
    """As many bytes as a rank of polyaccel writes, in one file."""

    def take(self) -> None:
        if not hasattr(self, "data"):
            self.data = os.urandom(sum(buffer.nbytes for *_, buffer in self.subject.zero.local_shards()))
            self.path = self.folder / f"rank{self.rank}"

    def save(self, number: int) -> Callable[[], Any]:
        self.folder.mkdir(exist_ok=True)
        with self.path.open("wb") as file:
            file.write(self.data)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def read(self, number: int) -> None:
        target = bytearray(len(self.data))
        with self.path.open("rb", buffering=0) as file:
            view, at = memoryview(target), 0
            while at < len(target):
                at += file.readinto(view[at:]) or 0


_SAVERS = {"polyaccel": _Polyaccel, "dcp": _Dcp, "deepspeed": _Saver, "orbax": _Orbax, "raw": _Raw}
_OPTIONS = {
    "size": Option("29m", "model", SHAPES),
    "micro_batch": Option(4, "sequences a rank"),
    "dtype": Option("fp32", "type", ("fp32",)),
    "stage": Option(1, "polyaccel's ZeRO stage", (1, 3)),
    "repeats": Option(5, "saves"),
    "folder": Option("", "where to save; a temporary folder if left out"),
}
CASES = {
    "saves": Case(
        "saves", __doc__ or "", _OPTIONS, variants, columns, "Checkpoints, {size}, AdamW, {dtype}, 2 ranks", rounds=1
    )
}
