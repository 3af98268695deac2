"""One rank of `python -m bench backends`: times collectives of the backend that the environment names.

Rank 0 writes a JSON object, seconds by `4 KiB all-reduce` and its like, to the file that is its argument.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

from bench.collectives.peer import time_case
from polyaccel import comm
from polyaccel.core.types import DType

SIZES = {"4 KiB": 4 << 10, "64 MiB": 64 << 20}
_SMALL_NBYTES = 1 << 20
_ROUNDS = 9


def main(result: str) -> None:
    torch.set_num_threads(1)
    comm.init_distributed(timeout=60)
    communicator = comm.default_communicator()
    seconds: dict[str, float] = {}
    for name, nbytes in SIZES.items():
        whole = communicator.allocate(nbytes // 4, DType.FLOAT32)
        numel = whole.numel // communicator.world_size
        own = whole.view(communicator.rank * numel, numel)
        source, target = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
        cases: dict[str, Callable[[], object]] = {
            "all-reduce": partial(communicator.all_reduce, whole),
            "reduce-scatter": partial(communicator.reduce_scatter, own, whole),
            "all-gather": partial(communicator.all_gather, whole, own),
            "copy": partial(target.copy_, source),
        }
        repeats = 30 if nbytes < _SMALL_NBYTES else 1
        taken: dict[str, list[float]] = {case: [] for case in cases}
        for number in range(_ROUNDS + 1):
            for case, run in cases.items():
                time = time_case(run, repeats, communicator.barrier)
                if number:
                    taken[case].append(time)
        seconds |= {f"{name} {case}": median(times) for case, times in taken.items()}
    if communicator.rank == 0:
        Path(result).write_text(json.dumps(seconds))
    comm.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
