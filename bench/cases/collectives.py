"""Collectives of two ranks: `comm` by size with MPI and DeepSpeed, `backends` by backend.

`shm` moves buffers that the communicator allocated, which peers read where they are; `private` moves other memory;
`exchange` sums direct messages of gloo in rank order. MPI (mpi4py) and DeepSpeed run in environments of their own. The
limit is the time of the copies that cannot be avoided, from a copy of the whole buffer by all ranks at once: a
reduce-scatter reads the whole and writes a part, an all-gather (in place) reads and writes all but a part, an
all-reduce reads and writes the whole.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from bench.measure import interleave, seconds_of
from bench.runner import DEEPSPEED, Case, Column, Found, Option, Settings, Start, deepspeed_start, table

_KIB = 1024
_OPS = ("all-reduce", "reduce-scatter", "all-gather")
_WAYS = ("shm", "private", "gloo", "exchange", "mpi", "deepspeed")
_SMALL_NBYTES = 64 * _KIB  # timed by many calls, because one is shorter than the ranks are apart
_MANY = 30
Calls = dict[str, Callable[[], object]]


def variants(args: argparse.Namespace) -> Mapping[str, Start | str]:
    """Return the launches of `comm`: polyaccel with torch, and the peers."""
    mpi = "needs --mpi PYTHON" if args.mpi is None else Start(args.ranks, "mpirun", args.mpi)
    deepspeed = deepspeed_start(args)
    if isinstance(deepspeed, Start):  # its shared memory reads a variable that torchrun does not set
        deepspeed = replace(deepspeed, ranks=args.ranks, environ={"LOCAL_SIZE": str(args.ranks)})
    return {"polyaccel": _ours("shm", sys.executable), "mpi": mpi, "deepspeed": deepspeed}


def backends(args: argparse.Namespace) -> Mapping[str, Start | str]:
    """Return the launches of `backends`: one of each backend."""
    found = {name: _ours(name, sys.executable) for name in ("shm", "gloo")}
    for also in filter(None, args.also):
        label, _, python = also.partition("=")
        name, _, backend = label.rpartition(":")
        found[name or backend] = _ours(backend, python)
    return found


def _ours(backend: str, python: str) -> Start:
    return Start(2, "mpirun" if backend == "mpi" else "polyaccel", Path(python), {"POLYACCEL_COMM": backend})


def work(variant: str, s: Settings) -> dict[str, Any]:
    """Return the median seconds of each collective by its name and size."""
    library = {"mpi": _mpi, "deepspeed": _deepspeed}.get(variant) if "most" in s else None
    calls_of, barrier = (library or _polyaccel)(s)
    found: dict[str, Any] = {}
    for kib in (4, 64, 1024, 16384, 65536, 262144) if "most" in s else (4, 65536):
        if kib <= s.get("most", 64) * _KIB:
            calls = calls_of(kib * _KIB // 4)
            repeats = _MANY if kib * _KIB <= _SMALL_NBYTES else 1
            timed = {name: _timed(run, repeats, barrier) for name, run in calls.items()}
            found |= {f"{kib} {name}": median(times) for name, times in interleave(timed, s["turns"]).items()}
    return found


def _timed(run: Callable[[], object], repeats: int, barrier: Callable[[], object]) -> Callable[[], float]:
    return lambda: seconds_of(run, repeats, barrier)


def _polyaccel(s: Settings) -> tuple[Callable[[int], Calls], Callable[[], object]]:
    import torch
    import torch.distributed as dist

    from polyaccel import comm
    from polyaccel.core.types import DType

    comm.init_distributed(timeout=60)
    ours = comm.default_communicator()
    exchange = _exchange(ours) if "most" in s else None

    def three(way: str, communicator: Any, whole: Any) -> Calls:
        numel = whole.numel // communicator.world_size
        own = whole.view(communicator.rank * numel, numel)
        whole.fill(0.0)
        return {
            f"{way} all-reduce": lambda: communicator.all_reduce(whole),
            f"{way} reduce-scatter": lambda: communicator.reduce_scatter(own, whole),
            f"{way} all-gather": lambda: communicator.all_gather(whole, own),
        }

    def calls(numel: int) -> Calls:
        source, target = torch.ones(numel), torch.zeros(numel)
        found: Calls = {"copy": lambda: target.copy_(source)}
        found |= three("shm", ours, ours.allocate(numel, DType.FLOAT32))
        if exchange is None:
            return found
        own = torch.zeros(numel // ours.world_size)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        found |= {
            "gloo all-reduce": lambda: dist.all_reduce(target),
            "gloo reduce-scatter": lambda: scatter(own, target),
            "gloo all-gather": lambda: gather(target, own),
        }
        for way, communicator in (("private", ours), ("exchange", exchange)):
            found |= three(way, communicator, ours.accelerator.allocate(numel, DType.FLOAT32))
        return found

    return calls, ours.barrier


def _exchange(ours: Any) -> Any:
    """Return our sums in rank order over a group of gloo, next to torch's default group."""
    import torch.distributed as dist

    from polyaccel.comm.backends.torch.communicator import new_group
    from polyaccel.comm.backends.torch.exchange import ExchangeCommunicator

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group = new_group(ours.ranks, "gloo", 120.0)
    assert group is not None  # of all ranks
    return ExchangeCommunicator(group, ours.ranks, ours.accelerator, "gloo", 120.0)


def _deepspeed(s: Settings) -> tuple[Callable[[int], Calls], Callable[[], object]]:
    import torch
    import torch.distributed as dist

    deepspeed: Any = import_module("deepspeed")
    deepspeed.init_distributed("gloo", verbose=False)
    if not hasattr(torch.ops.deepspeed, "inference_all_reduce_"):
        raise SystemExit("DeepSpeed has no shared-memory all-reduce here")

    def calls(numel: int) -> Calls:
        tensor = torch.zeros(numel)
        return {"deepspeed all-reduce": lambda: deepspeed.comm.inference_all_reduce(tensor)}

    return calls, dist.barrier


def _mpi(s: Settings) -> tuple[Callable[[int], Calls], Callable[[], object]]:
    import numpy as np
    from mpi4py import MPI

    world: Any = MPI.COMM_WORLD

    def calls(numel: int) -> Calls:
        whole, own = np.zeros(numel, np.float32), np.zeros(numel // world.size, np.float32)
        return {
            "mpi all-reduce": lambda: world.Allreduce(MPI.IN_PLACE, whole),
            "mpi reduce-scatter": lambda: world.Reduce_scatter_block(whole, own),
            "mpi all-gather": lambda: world.Allgather(MPI.IN_PLACE, whole),
        }

    return calls, world.Barrier


def by_size(found: Found) -> tuple[str, bool]:
    """Print the table of `comm`, a row for each size and collective."""
    seconds: dict[str, float] = {}
    for runs in found.values():
        for name in next(iter(runs.rounds.values()))[0]:
            seconds[name] = median(ranks[0][name] for ranks in runs.rounds.values())
    ranks, rows = next(iter(found.values())).settings["ranks"], []
    for kib in dict.fromkeys(int(name.split()[0]) for name in seconds):
        for op in _OPS:
            limit, own = seconds.get(f"{kib} copy", 0.0) * _share(op, ranks), seconds.get(f"{kib} shm {op}", 0.0)
            times = {way: seconds.get(f"{kib} {way} {op}") for way in _WAYS}
            cells = [f"{1e6 * time:.1f}" if time else "-" for time in times.values()]
            ratios = [f"{time / own:.1f}" if (time := times[way]) and own else "-" for way in ("gloo", "deepspeed")]
            name = f"{kib} KiB" if kib < _KIB else f"{kib // _KIB} MiB"
            rows.append((name, op, *cells, f"{1e6 * limit:.1f}", f"{limit / own:.2f}" if own else "-", *ratios))
    columns = ("bytes", "collective", *_WAYS, "limit", "of limit", "x gloo", "x deepspeed")
    table(f"{ranks} ranks, float32, us, medians", columns, rows)
    return "", False


def _share(op: str, ranks: int) -> float:
    """Return bytes that must move, read or written, over those of a copy of the whole."""
    return {"all-reduce": 1.0, "reduce-scatter": (1 + 1 / ranks) / 2, "all-gather": 1 - 1 / ranks}[op]


def backend_columns(s: Settings) -> Mapping[str, Column]:
    """Return the columns of `backends`."""

    def cell(kib: int, op: str, scale: Callable[[float], float]) -> Column:
        return lambda own, found: f"{scale(median(ranks[0][f'{kib} {op}'] for ranks in own.rounds.values())):.1f}"

    return {
        **{f"4 KiB {op}, us": cell(4, f"shm {op}", lambda seconds: 1e6 * seconds) for op in _OPS},
        **{f"64 MiB {op}, GB/s": cell(65536, f"shm {op}", lambda seconds: (64 << 20) / seconds / 1e9) for op in _OPS},
        "copy, GB/s": cell(65536, "copy", lambda seconds: (64 << 20) / seconds / 1e9),
    }


_TURNS = Option(5, "calls in a launch")
_PYTHONS = {"deepspeed": DEEPSPEED, "mpi": Option(Path, "Python of an environment with mpi4py and mpirun")}
_SIZES = {"ranks": Option(2, "ranks", (2,)), "most": Option(256, "largest buffer in MiB"), "turns": _TURNS}
_ALSO = {"also": Option(("",), "backends in other environments: mpi=PYTHON, or with a name: MPICH:mpi=PYTHON")}
CASES = {
    "comm": Case(
        "comm", __doc__ or "", {**_SIZES, **_PYTHONS}, variants, lambda s: {}, "{ranks} ranks",
        work="collectives", verdict=by_size,
    ),
    "backends": Case(
        "backends", __doc__ or "", {**_ALSO, "turns": Option(9, "calls in a launch")}, backends, backend_columns,
        "2 ranks, fp32", work="collectives",
    ),
}  # fmt: skip
