"""Collectives of ranks on this host: shared memory, gloo, our exchange over gloo, MPI, DeepSpeed's shared memory, and
what copying allows.

All of a size are measured in turn. `shm` moves buffers that the communicator allocated, which peers read where they
are; `private` moves any other memory. MPI (mpi4py) and DeepSpeed run in environments of their own. The limit is the
time of the copies that cannot be avoided, from a copy of the whole buffer by all ranks at once: a reduce-scatter reads
the whole and writes a part, an all-gather (in place) reads and writes all but a part, an all-reduce reads and writes
the whole.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from bench.collectives.peer import time_case
from bench.collectives.teams import Peers, Team
from bench.machine import describe_machine
from bench.steps.sitting import positive
from bench.table import make_console, make_table
from polyaccel.comm.backends.torch.communicator import new_group, tensor_of
from polyaccel.comm.backends.torch.exchange import ExchangeCommunicator
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.testkit.ranks.procs import RankPool

_KIB = 1024
_SIZES = tuple(nbytes * _KIB for nbytes in (4, 64, 1024, 16 * 1024, 64 * 1024, 256 * 1024))
_OPS = ("all-reduce", "reduce-scatter", "all-gather")
_WAYS = ("shm", "private", "gloo", "exchange", "mpi", "deepspeed")
_SMALL_NBYTES = 64 * _KIB  # measured by many, for one alone is shorter than the ranks are apart
_MANY = 30
_MOST_S = 12.0  # of one size's rounds
Seconds = dict[str, float]
"""Median seconds by "way op", and of "memcpy"."""


def main(argv: Sequence[str]) -> int:
    """`python -m bench comm`."""
    parser = argparse.ArgumentParser(prog="python -m bench comm", description=__doc__)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=15, help="at most, of each size (default: %(default)s)")
    parser.add_argument(
        "--most", type=positive, default=256, metavar="MIB", help="largest buffer (default: %(default)s)"
    )
    for kind, name in (("deepspeed", "DeepSpeed"), ("mpi", "mpi4py and mpirun")):
        parser.add_argument(f"--{kind}", type=Path, metavar="PYTHON", help=f"of an environment that has {name}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the figures as a JSON line")
    args = parser.parse_args(argv)
    console, machine = make_console(), describe_machine()
    console.print(str(machine))
    sizes = [nbytes for nbytes in _SIZES if nbytes <= args.most * _KIB**2]
    others = {kind: python for kind in ("mpi", "deepspeed") if (python := getattr(args, kind)) is not None}
    with ExitStack() as stack:
        teams: list[Team] = [Ours(stack.enter_context(RankPool(args.ranks, comm_timeout_s=120.0, backend="shm")))]
        teams += [stack.enter_context(Peers(kind, python, args.ranks)) for kind, python in others.items()]
        figures = [measure(teams, nbytes, args.rounds) for nbytes in sizes]
    title = f"{args.ranks} ranks, float32, us, median of up to {args.rounds} rounds"
    table = make_table(title, ("bytes", "collective", *_WAYS, "limit", "of limit", "x gloo", "x deepspeed"))
    for nbytes, seconds in zip(sizes, figures, strict=True):
        for op in _OPS:
            limit = seconds["memcpy"] * _share(op, args.ranks)
            own = seconds[f"shm {op}"]
            found = {way: seconds.get(f"{way} {op}") for way in _WAYS}
            times = [f"{1e6 * time:.1f}" if time else "-" for time in found.values()]
            ratios = [f"{time / own:.1f}" if (time := found[way]) else "-" for way in ("gloo", "deepspeed")]
            table.add_row(_named(nbytes), op, *times, f"{1e6 * limit:.1f}", f"{limit / own:.2f}", *ratios)
    console.print(table)
    if args.out is not None:
        record = {"comm_s": dict(zip(sizes, figures, strict=True)), "ranks": args.ranks, "machine": str(machine)}
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
    return 0


def measure(teams: Sequence[Team], nbytes: int, rounds: int) -> Seconds:
    """All cases of one size, in turn."""
    cases = [(team, case) for team in teams for case in team.prepare(nbytes)]
    seconds: dict[str, list[float]] = {case: [] for _, case in cases}
    repeats = _MANY if nbytes <= _SMALL_NBYTES else 1
    began = perf_counter()
    for number in range(rounds + 1):
        for team, case in cases:
            taken = team.measure(case, repeats)
            if number:
                seconds[case].append(taken)
        if perf_counter() - began > _MOST_S and number > 2:
            break
    return {case: median(taken) for case, taken in seconds.items()}


class Ours:
    """The cases that need nothing else: ours, torch's, and the copy."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool

    def prepare(self, nbytes: int) -> Sequence[str]:
        names: Sequence[str] = self._pool.run(_prepare, nbytes)[0]
        return names

    def measure(self, case: str, repeats: int) -> float:
        seconds: float = self._pool.run(_measure, case, repeats, timeout_s=120.0)[0]
        return seconds


_prepared: dict[str, Callable[[], object]] = {}  # in a worker: the cases of the present size


def _prepare(comm: Communicator, nbytes: int) -> Sequence[str]:
    torch.set_num_threads(1)
    _prepared.clear()
    numel = nbytes // 4
    group = new_group(comm.ranks, "gloo", 120.0)
    assert group is not None  # of all ranks
    exchange = ExchangeCommunicator(group, comm.ranks, comm.accelerator, "gloo", 120.0)
    source, target = torch.ones(numel), torch.zeros(numel)
    _prepared.update(
        {
            "memcpy": lambda: target.copy_(source),
            **_cases("shm", comm, comm.allocate(numel, DType.FLOAT32)),
            **_cases("private", comm, comm.accelerator.allocate(numel, DType.FLOAT32)),
            **_torch_cases(comm, comm.accelerator.allocate(numel, DType.FLOAT32)),
            **_cases("exchange", exchange, comm.accelerator.allocate(numel, DType.FLOAT32)),
        }
    )
    return list(_prepared)


def _measure(comm: Communicator, case: str, repeats: int) -> float:
    return time_case(_prepared[case], repeats, comm.barrier)


def _cases(way: str, comm: Communicator, whole: Buffer) -> dict[str, Callable[[], object]]:
    numel = whole.numel // comm.world_size
    own = whole.view(comm.rank * numel, numel)
    whole.fill(0.0)
    return {
        f"{way} all-reduce": lambda: comm.all_reduce(whole),
        f"{way} reduce-scatter": lambda: comm.reduce_scatter(own, whole),
        f"{way} all-gather": lambda: comm.all_gather(whole, own),
    }


def _torch_cases(comm: Communicator, whole: Buffer) -> dict[str, Callable[[], object]]:
    """torch's own collectives of its default group, which is gloo's."""
    tensor = tensor_of(whole)
    own = tensor.chunk(comm.world_size)[comm.rank].clone()
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return {
        "gloo all-reduce": lambda: dist.all_reduce(tensor),
        "gloo reduce-scatter": lambda: scatter(own, tensor),
        "gloo all-gather": lambda: gather(tensor, own),
    }


def _share(op: str, ranks: int) -> float:
    """Bytes that must move, read or written, over those of a copy of the whole."""
    return {"all-reduce": 1.0, "reduce-scatter": (1 + 1 / ranks) / 2, "all-gather": 1 - 1 / ranks}[op]


def _named(nbytes: int) -> str:
    return f"{nbytes // _KIB} KiB" if nbytes < _KIB**2 else f"{nbytes // _KIB**2} MiB"
