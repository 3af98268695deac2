"""All-to-alls between two hosts, directly and passed on by a rank of each host, in turns on the same ranks.

The hosts are network namespaces of this machine; `--link` limits what each may send. Parts are of one size, and of two
thirds to four thirds of it (*uneven*), of which ranks first tell their host how long they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.hosts.network import BenchHosts, brought_up
from bench.machine import describe_machine
from bench.steps.sitting import listed, positive
from bench.table import make_console, make_table

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 300.0


def main(argv: Sequence[str]) -> int:
    """`python -m bench all-to-all`."""
    parser = argparse.ArgumentParser(prog="python -m bench all-to-all", description=__doc__)
    parser.add_argument("--hosts", type=positive, default=2, help="(default: %(default)s)")
    parser.add_argument("--slots", type=listed(positive), default="2,3", metavar="N,...", help="ranks on each host")
    parser.add_argument("--kib", type=listed(positive), default="1,32,64,128,512", metavar="N,...", help="of a part")
    parser.add_argument("--turns", type=positive, default=16, help="of ten calls each (default: %(default)s)")
    parser.add_argument("--link", metavar="RATE", help="what a host may send, as tc writes it (default: no limit)")
    args = parser.parse_args(argv)
    console = make_console()
    console.print(str(describe_machine()), markup=False)
    with brought_up(args.hosts) as hosts:
        if args.link:
            hosts.limit(args.link)
        for slots in args.slots:
            table = make_table(
                f"{args.hosts} hosts of {slots}: ms a call, median (least), and CPU ms a rank",
                ("KiB a part", "parts", "direct", "passed on", "ratio", "CPU, direct", "CPU, passed on"),
            )
            for kib, parts, direct, passed_on in _measured(hosts, slots, args.kib, args.turns):
                cells = [f"{1e3 * way['median']:.2f} ({1e3 * way['least']:.2f})" for way in (direct, passed_on)]
                cpu = [f"{1e3 * way['cpu']:.2f}" for way in (direct, passed_on)]
                table.add_row(str(kib), parts, *cells, f"{passed_on['median'] / direct['median']:.2f}", *cpu)
            console.print(table)
    return 0


def _measured(
    hosts: BenchHosts, slots: int, sizes: Sequence[int], turns: int
) -> list[tuple[int, str, dict[str, float], dict[str, float]]]:
    """KiB, kind of parts, and the seconds of both ways."""
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        result = Path(folder, "result.json")
        variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "eth0"}
        options = hosts.options(slots, variables | {"PYTHONPATH": str(_ROOT)})
        worker = ["--module", "bench.hosts.all_to_all_worker", str(result), str(turns), *map(str, sizes)]
        start = [sys.executable, "-m", "polyaccel", "run", *options, *worker]
        job = subprocess.run(start, cwd=_ROOT, env=os.environ, capture_output=True, text=True, timeout=_LIMIT_S)
        if not result.exists():
            raise SystemExit(f"{slots} ranks on each host gave no figures:\n{job.stdout}{job.stderr}")
        return [tuple(row) for row in json.loads(result.read_text())]
