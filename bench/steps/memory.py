"""Peak memory a rank in training beside what the formula of `polyaccel.zero.plan.memory` says.

Expected is: the process before it had a model, the states by the formula, and the rest (activations, the framework's
own memory) as `local`, plain torch without communication, has it. Whether parameters are gathered is the backend's
affair: over shared memory they exist once a host, with POLYACCEL_SHM_SYMMETRIC=0 they are sharded as between hosts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.steps.sitting import Defaults, add_arguments, hold, read_arguments
from bench.steps.summary import by_case, compare_memory
from bench.table import make_console, memory_table

_DEFAULTS = Defaults(
    micro_batches="1", dtypes="fp32,bf16", variants="local,ddp,fsdp2,pa0,pa1,pa2,pa3", warmup=2, steps=3, rounds=1
)


def main(argv: Sequence[str]) -> int:
    """`python -m bench memory`. 1 if a variant failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, _DEFAULTS)
    args = parser.parse_args(argv)
    if "local" not in args.impl:
        parser.error("--impl needs local: what is not states is taken from it")
    console = make_console()
    runs, failed = hold(read_arguments(args, console), console, args.out)
    for case, own in by_case(runs).items():
        if any(run.job.variant == "local" for run in own):
            console.print(memory_table(case, compare_memory(own)))
    return 1 if failed else 0
