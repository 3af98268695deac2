"""What `ds_bench` runs on every rank: the measurement of `polyaccel comm bench`, with the options and units of
DeepSpeed's."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from polyaccel import comm
from polyaccel.comm.benchmark import SpeedMeter, bus_factor
from polyaccel.core.types import DType
from polyaccel_deepspeed.commands import OPS, bench_parser
from polyaccel_deepspeed.initialize import init_distributed

_SMALLEST_POWER = 12


def main(argv: Sequence[str]) -> int:
    given = bench_parser().parse_args(argv)
    init_distributed(verbose=False)
    communicator = comm.default_communicator()
    meter = SpeedMeter(communicator, 2**given.maxsize, DType.parse(given.dtype))
    powers = range(min(_SMALLEST_POWER, given.maxsize), given.maxsize + 1) if given.scan else (given.maxsize,)
    unit = 8 if given.bw_unit == "Gbps" else 1
    columns = ("bytes", "time us", f"algbw {given.bw_unit}", f"busbw {given.bw_unit}")
    for op in [op for op in OPS if getattr(given, op)] or OPS:
        _say(f"---- {op}, {communicator.world_size} ranks", " ".join(f"{name:>12}" for name in columns))
        operation = "send_recv" if op == "pt2pt" else op
        for power in powers:
            row = meter.row(operation, 2**power, rounds=given.trials, budget_s=float("inf"), warmups=given.warmups)
            speed = row.nbytes * unit / row.seconds / 1e9
            bus = speed * bus_factor(operation, communicator.world_size)
            _say(f"{row.nbytes:12} {1e6 * row.seconds:12.1f} {speed:12.2f} {bus:12.2f}")
    comm.destroy_process_group()
    return 0


def _say(*lines: str) -> None:
    if comm.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
