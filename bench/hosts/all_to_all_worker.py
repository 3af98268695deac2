"""One rank of `python -m bench all-to-all`: times both ways of an all-to-all in turns.

Rank 0 writes a JSON list of (KiB, kind of parts, direct, passed on), both of them the median, least and CPU seconds of
a call, to the file that is its first argument.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch

from polyaccel import comm
from polyaccel.comm.wrappers import hierarchical
from polyaccel.core.types import DType

_CALLS = 10
_WAYS = {"direct": 0, "passed on": sys.maxsize}
"""The longest part that is passed on, in bytes."""


def main(result: str, turns: str, *sizes: str) -> None:
    torch.set_num_threads(1)
    comm.init_distributed(timeout=60)
    communicator = comm.default_communicator()
    rank, world = communicator.rank, communicator.world_size
    rows: list[tuple[int, str, Any, Any]] = []
    for kib in map(int, sizes):
        for kind in ("equal", "uneven"):
            table = [[_numel(kib, kind, sender, to) for to in range(world)] for sender in range(world)]
            sent, received = table[rank], [line[rank] for line in table]
            source = communicator.allocate(sum(sent), DType.FLOAT32)
            out = communicator.allocate(sum(received), DType.FLOAT32)
            counts: dict[str, Any] = {}
            if kind == "uneven":
                counts = {"counts": received, "source_counts": sent, "max_send_numel": max(map(max, table))}
            walls: dict[str, list[float]] = {way: [] for way in _WAYS}
            cpus: dict[str, list[float]] = {way: [] for way in _WAYS}
            for turn in range(int(turns) + 1):
                for way, short_nbytes in list(_WAYS.items())[:: 1 if turn % 2 else -1]:
                    hierarchical._short_nbytes = partial(_always, short_nbytes)
                    communicator.barrier()
                    began, cpu = perf_counter(), process_time()
                    for _ in range(_CALLS):
                        communicator.all_to_all(out, source, **counts)
                    if turn:
                        walls[way].append((perf_counter() - began) / _CALLS)
                        cpus[way].append((process_time() - cpu) / _CALLS)
            slowest = {way: [max(ranks) for ranks in zip(*_of_all_ranks(walls[way]), strict=True)] for way in _WAYS}
            mean_cpu = {way: sum(map(median, _of_all_ranks(cpus[way]))) / world for way in _WAYS}
            direct, passed_on = (
                {"median": median(slowest[way]), "least": min(slowest[way]), "cpu": mean_cpu[way]} for way in _WAYS
            )
            rows.append((kib, kind, direct, passed_on))
    if rank == 0:
        Path(result).write_text(json.dumps(rows))
    comm.destroy_process_group()


def _always(nbytes: int, ranks: int, *, is_uneven: bool) -> int:
    return nbytes


def _of_all_ranks(values: list[float]) -> list[list[float]]:
    """Every rank's `values`."""
    gathered: list[list[float]] = comm.default_communicator().all_gather_object(values)
    return gathered


def _numel(kib: int, kind: str, sender: int, to: int) -> int:
    whole = kib * 1024 // 4
    return whole if kind == "equal" else whole * (2 + (sender + 2 * to) % 3) // 3


if __name__ == "__main__":
    main(*sys.argv[1:])
