"""Step time, memory and correctness of polyaccel beside DDP, FSDP2 and DeepSpeed, and the distributed tax of each:
the step over the same compute without any communication, minus one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.steps.sitting import Defaults, add_arguments, hold, read_arguments
from bench.steps.summary import by_case, summarise
from bench.table import make_console, step_table

_DEFAULTS = Defaults(
    micro_batches="1,4",
    dtypes="fp32,bf16",
    variants="local,ddp,fsdp2,pa0,pa1,pa2,pa3,ds0,ds1,ds2,ds3",
    warmup=4,
    steps=12,
    rounds=2,
)


def main(argv: Sequence[str]) -> int:
    """`python -m bench`. 1 if a variant failed or trained wrongly."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog="Also: python -m bench imports, python -m bench memory.",
    )
    add_arguments(parser, _DEFAULTS)
    args = parser.parse_args(argv)
    console = make_console()
    runs, failed = hold(read_arguments(args, console), console, args.out)
    is_wrong = False
    for case, own in by_case(runs).items():
        rows = summarise(own)
        is_wrong |= any(row.is_wrong for row in rows)
        console.print(step_table(case, rows))
    return 1 if failed or is_wrong else 0
