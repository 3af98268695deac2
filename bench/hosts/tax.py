"""What a step costs between two hosts: polyaccel beside DDP and FSDP2, over links of 10 and of 1 Gbit/s.

The hosts are network namespaces of this machine with a limited link (tc), one or two ranks on each: the ranks share
this machine's cores, whichever their host. *tax* is the step over `local`'s of the same round, minus one, where `local`
is the same compute in all ranks at once without communication. `pa2-flat` and its like talk by gloo alone, where `pa2`
and its like use shared memory inside a host; `pa3q` gathers in 8 and reduces in 4 bits (ZeRO++).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from bench.hosts.network import brought_up
from bench.machine import describe_machine
from bench.steps.cases import VARIANTS, Case, Job, Run
from bench.steps.launch import Failure, run_job
from bench.steps.sitting import listed, one_of, positive
from bench.steps.summary import summarise
from bench.table import make_console, step_table

_LINKS = ("10gbit", "1gbit")
_PLAIN = ("local", "ddp", "fsdp2", "pa1", "pa2", "pa3", "pa3q")
_LEVELS = ("pa1-flat", "pa2-flat", "pa3-flat", "pa3q-flat")
"""Variants that make a difference only where a host has several ranks."""


def main(argv: Sequence[str]) -> int:
    """`python -m bench hosts`. 1 if a variant failed."""
    parser = argparse.ArgumentParser(prog="python -m bench hosts", description=__doc__)
    parser.add_argument("--size", default="29m", help="model (default: %(default)s)")
    parser.add_argument("--micro-batch", type=positive, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--slots", type=listed(positive), default="1,2", metavar="N,...", help="ranks on each host")
    parser.add_argument("--links", type=listed(one_of(_LINKS)), default=",".join(_LINKS), metavar="RATE,...")
    parser.add_argument(
        "--impl", type=listed(one_of(VARIANTS)), metavar="NAME,...", help=f"of {', '.join((*_PLAIN, *_LEVELS))}"
    )
    parser.add_argument("--steps", type=positive, default=4, help="measured (default: %(default)s)")
    parser.add_argument("--warmup", type=positive, default=2, help="steps before that (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=2, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append runs as JSON lines")
    args = parser.parse_args(argv)
    console = make_console()
    console.print(str(describe_machine()), markup=False)
    failed = False
    with brought_up(2) as hosts:
        for slots in args.slots:
            for link in args.links:
                hosts.limit(link)
                names = args.impl or (_PLAIN if slots == 1 else (*_PLAIN, *_LEVELS))
                case = Case(args.size, args.micro_batch, "fp32", len(hosts.names) * slots)
                runs = list[Run]()
                for number in range(args.rounds):
                    for name in (*names[number % len(names) :], *names[: number % len(names)]):
                        began = perf_counter()
                        job = Job(name, case, args.warmup, args.steps, number)
                        variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "eth0"}
                        if VARIANTS[name].is_flat:
                            variables["POLYACCEL_COMM"] = "gloo"
                        outcome = run_job(job, hosts.options(slots, variables))
                        took = f"{perf_counter() - began:.0f} s"
                        if isinstance(outcome, Failure):
                            failed = True
                            console.print(f"{link}, {case}, {name}: {outcome.reason} ({took})\n{outcome.output}")
                            continue
                        console.print(f"{link}, {case}, {name}: {min(outcome.step_s):.3f} s a step ({took})")
                        runs.append(outcome)
                        if args.out is not None:
                            with args.out.open("a") as file:
                                file.write(json.dumps({"link": link, "slots": slots, "run": asdict(outcome)}) + "\n")
                if runs:
                    console.print(f"\nTwo hosts of {slots}, a link of {link}:")
                    console.print(step_table(case, summarise(runs)))
    return int(failed)
