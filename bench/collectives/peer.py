"""One rank of somebody else's collectives: `PYTHON -m bench.collectives.peer KIND ADDRESS`, run by `teams` beside it.

PYTHON is the interpreter of an environment that has DeepSpeed or mpi4py; nothing of ours is imported. Commands come
over a socket: a number of elements makes buffers and is answered by the names of the cases, a case and how often to run
it by the mean seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Client
from time import perf_counter
from typing import Any

Cases = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Library:
    """What a library offers: the cases for a number of float32 elements, and a way to begin together."""

    rank: int
    cases: Callable[[int], Cases]
    barrier: Callable[[], object]


def main(kind: str, address: str) -> None:
    library = {"deepspeed": _deepspeed, "mpi": _mpi}[kind]()
    cases: Cases = {}
    with Client(address) as driver:
        driver.send(library.rank)
        while (command := driver.recv()) is not None:
            if isinstance(command, int):
                cases = {}  # gives back what the last size took
                cases = library.cases(command)
                driver.send(list(cases))
            else:
                name, repeats = command
                driver.send(time_case(cases[name], repeats, library.barrier))


def time_case(run: Callable[[], object], repeats: int, barrier: Callable[[], object]) -> float:
    """Mean seconds of a call; before several, as many that do not count, for the ranks come from their sleep."""
    for _ in range(repeats - 1):
        run()
    barrier()
    began = perf_counter()
    for _ in range(repeats):
        run()
    return (perf_counter() - began) / repeats


def _deepspeed() -> Library:
    import torch
    import torch.distributed as dist

    deepspeed: Any = import_module("deepspeed")
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    if not hasattr(torch.ops.deepspeed, "inference_all_reduce_"):
        raise SystemExit("DeepSpeed has no shared-memory all-reduce here")

    def cases(numel: int) -> Cases:
        tensor = torch.zeros(numel)
        return {"deepspeed all-reduce": lambda: deepspeed.comm.inference_all_reduce(tensor)}

    return Library(dist.get_rank(), cases, dist.barrier)


def _mpi() -> Library:
    import numpy as np
    from mpi4py import MPI

    world: Any = MPI.COMM_WORLD

    def cases(numel: int) -> Cases:
        whole = np.zeros(numel, np.float32)
        own = np.zeros(numel // world.size, np.float32)
        return {
            "mpi all-reduce": lambda: world.Allreduce(MPI.IN_PLACE, whole),
            "mpi reduce-scatter": lambda: world.Reduce_scatter_block(whole, own),
            "mpi all-gather": lambda: world.Allgather(MPI.IN_PLACE, whole),
        }

    return Library(world.rank, cases, world.Barrier)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # libraries that were told nothing of the end would wait for one another
