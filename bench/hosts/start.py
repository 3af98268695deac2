"""How long two ranks take to start and to end, on one host and on two, under `polyaccel run` and under torchrun.

`print` is a script that prints a line, so that what is timed is the launcher; `join` joins torch's process group by
gloo and reduces a number, the same script under both. On two hosts torchrun is started on both at once by ssh, and
polyaccel run by one command. Interleaved; every round begins with another one.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from bench.hosts.network import BenchHosts, brought_up
from bench.machine import describe_machine
from bench.steps.launch import rank_environment
from bench.steps.sitting import positive
from bench.table import make_console, make_table

_LIMIT_S = 120.0
_SCRIPTS = {
    "print": "print('here')\n",
    "join": (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "one = torch.ones(1)\n"
        "dist.all_reduce(one)\n"
        "assert one.item() == 2\n"
        "dist.destroy_process_group()\n"
    ),
}
_POLYACCEL = [sys.executable, "-m", "polyaccel", "run"]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def main(argv: Sequence[str]) -> int:
    """`python -m bench start`. 1 if polyaccel run is slower than torchrun anywhere."""
    parser = argparse.ArgumentParser(prog="python -m bench start", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=9, help="starts of each (default: %(default)s)")
    args = parser.parse_args(argv)
    console = make_console()
    console.print(str(describe_machine()), markup=False)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="polyaccel-bench-")))
        hosts = stack.enter_context(brought_up(2))
        cases = _cases(folder, hosts)
        taken: dict[str, dict[str, list[float]]] = {case: {name: [] for name in ways} for case, ways in cases.items()}
        for number in range(args.rounds + 1):
            for case, ways in cases.items():
                names = list(ways) if number % 2 else list(ways)[::-1]
                for name in names:
                    began = perf_counter()
                    ways[name]()
                    if number:  # the first one compiles, and brings files into memory
                        taken[case][name].append(perf_counter() - began)
    table = make_table(
        f"Seconds from the command to its end, medians (best) of {args.rounds}",
        ("case", "polyaccel run", "torchrun", "ratio"),
    )
    is_slower = False
    for case, seconds in taken.items():
        ratio = median(seconds["polyaccel run"]) / median(seconds["torchrun"])
        is_slower |= ratio > 1
        shown = (f"{median(values):.2f} ({min(values):.2f})" for values in seconds.values())
        table.add_row(case, *shown, f"{ratio:.2f}")
    console.print(table)
    return int(is_slower)


def _cases(folder: Path, hosts: BenchHosts) -> dict[str, dict[str, Callable[[], None]]]:
    found: dict[str, dict[str, Callable[[], None]]] = {}
    far = hosts.options(1, {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"})
    for name, text in _SCRIPTS.items():
        script = str(folder / f"{name}.py")
        Path(script).write_text(text)
        by_ssh = [_by_ssh(hosts, host, script) for host in hosts.names]
        found[f"one host, {name}"] = {
            "polyaccel run": partial(_run, [*_POLYACCEL, "--nproc", "2", script]),
            "torchrun": partial(_run, [*_TORCHRUN, "--standalone", "--nproc-per-node", "2", script]),
        }
        found[f"two hosts, {name}"] = {
            "polyaccel run": partial(_run, [*_POLYACCEL, *far, script]),
            "torchrun": partial(_run, *by_ssh),
        }
    return found


def _by_ssh(hosts: BenchHosts, host: str, script: str) -> list[str]:
    """torchrun on one of the hosts."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.address}:29400", "--rdzv-id", "bench"]
    address = ["--local-addr", hosts.address] if host == hosts.names[0] else []
    command = [*_TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *meeting, *address, script]
    inner = f"GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 {shlex.join(command)}"
    return ["ssh", "-F", str(hosts.ssh_config), host, "--", inner]


def _run(*commands: Sequence[str]) -> None:
    """Run commands side by side until all have ended. Exits with what they said when one fails."""
    running = [
        subprocess.Popen(
            command,
            env=rank_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=_LIMIT_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    if any(process.returncode for process in running):
        raise SystemExit("\n".join(said))
