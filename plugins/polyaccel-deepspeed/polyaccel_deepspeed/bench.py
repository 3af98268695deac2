"""What `ds_bench` runs on every rank: polyaccel's collectives, timed size by size.

`busbw` is what crosses the links of a rank in a second: of an all-reduce 2 (n - 1) / n of its bytes, of the others
(n - 1) / n, of a broadcast all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from polyaccel import comm
from polyaccel_deepspeed.accelerator import get_accelerator
from polyaccel_deepspeed.commands import OPS, bench_parser
from polyaccel_deepspeed.initialize import init_distributed

_SMALLEST_POWER = 12


def main(argv: Sequence[str]) -> int:
    given = bench_parser().parse_args(argv)
    init_distributed(verbose=False)
    ops = [op for op in OPS if getattr(given, op)] or list(OPS)
    powers = range(min(_SMALLEST_POWER, given.maxsize), given.maxsize + 1) if given.scan else (given.maxsize,)
    for op in ops:
        _say(
            f"---- {op}, {comm.get_world_size()} ranks", f"{'bytes':>12} {'time us':>12} {'busbw ' + given.bw_unit:>12}"
        )
        for power in powers:
            seconds, share = time_op(op, 2**power, given)
            unit = 8 if given.bw_unit == "Gbps" else 1
            _say(f"{2**power:12} {seconds * 1e6:12.1f} {2**power * share * unit / seconds / 1e9:12.2f}")
    comm.destroy_process_group()
    return 0


def time_op(op: str, nbytes: int, given: argparse.Namespace) -> tuple[float, float]:
    """Median seconds of a collective of `nbytes` in all on the slowest rank, and the share of them that crosses."""
    ranks, dtype = comm.get_world_size(), getattr(torch, given.dtype)
    numel = max(1, nbytes // dtype.itemsize // ranks) * ranks
    device = get_accelerator().torch_device()
    whole, other = (torch.ones(numel, dtype=dtype, device=device) for _ in range(2))
    part = torch.ones(numel // ranks, dtype=dtype, device=device)
    crossing = (ranks - 1) / ranks
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "all_reduce": (lambda: comm.all_reduce(whole), 2 * crossing),
        "all_gather": (lambda: comm.all_gather_into_tensor(whole, part), crossing),
        "all_to_all": (lambda: comm.all_to_all_single(other, whole), crossing),
        "broadcast": (lambda: comm.broadcast(whole, 0), 1.0),
        "reduce_scatter": (lambda: comm.reduce_scatter_tensor(part, whole), crossing),
    }
    call, share = calls[op]
    for _ in range(given.warmups):
        call()
    seconds = []
    for _ in range(given.trials):
        comm.barrier()
        get_accelerator().synchronize()
        began = perf_counter()
        call()
        get_accelerator().synchronize()
        seconds.append(perf_counter() - began)
    slowest: Tensor = torch.tensor([median(seconds)], device=device)
    comm.all_reduce(slowest, op=comm.ReduceOp.MAX)
    return slowest.item(), share


def _say(*lines: str) -> None:
    if comm.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
