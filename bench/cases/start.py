"""Start and end of two ranks, on one host and on two, by `polyaccel run` and by torchrun.

`print` is a script that prints a line, so it times the launcher; `join` joins torch's process group by gloo and reduces
a number, the same script under both. On two hosts torchrun is started on both at once by ssh, and polyaccel run by one
command.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.measure import interleave, seconds_of
from bench.runner import Option, begin, end, parse, rank_environment, table

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
    """Return 1 if polyaccel run is slower than torchrun anywhere."""
    args = parse("start", __doc__ or "", {"rounds": Option(9, "starts of each")}, argv)
    begin()
    from bench.network import brought_up

    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="polyaccel-bench-")))
        starts = _starts(folder, stack.enter_context(brought_up(2)))
        taken = interleave({name: partial(seconds_of, start) for name, start in starts.items()}, args.rounds)
    rows, is_slower = [], False
    for case in dict.fromkeys(name.partition(": ")[2] for name in taken):
        ours, theirs = (taken[f"{launcher}: {case}"] for launcher in ("polyaccel run", "torchrun"))
        ratio = median(ours) / median(theirs)
        is_slower |= ratio > 1
        rows.append((case, *(f"{median(each):.2f} ({min(each):.2f})" for each in (ours, theirs)), f"{ratio:.2f}"))
    title = f"Seconds from the command to its end, medians (best) of {args.rounds}"
    table(title, ("case", "polyaccel run", "torchrun", "ratio"), rows)
    return int(is_slower)


def _starts(folder: Path, hosts: Any) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    far = hosts.options(1, {"GLOO_SOCKET_IFNAME": "eth0"})
    for name, text in _SCRIPTS.items():
        script = str(folder / f"{name}.py")
        Path(script).write_text(text)
        local = [*_TORCHRUN, "--standalone", "--nproc-per-node", "2", script]
        found[f"polyaccel run: one host, {name}"] = partial(_run, [*_POLYACCEL, "--nproc", "2", script])
        found[f"torchrun: one host, {name}"] = partial(_run, local)
        found[f"polyaccel run: two hosts, {name}"] = partial(_run, [*_POLYACCEL, *far, script])
        by_ssh = [_by_ssh(hosts, host, script) for host in hosts.names]
        found[f"torchrun: two hosts, {name}"] = partial(_run, *by_ssh)
    return found


def _by_ssh(hosts: Any, host: str, script: str) -> list[str]:
    """Return the command that starts torchrun on one of the hosts."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.address}:29400", "--rdzv-id", "bench"]
    address = ["--local-addr", hosts.address] if host == hosts.names[0] else []
    command = [*_TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *rendezvous, *address, script]
    inner = f"GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 {shlex.join(command)}"
    return ["ssh", "-F", str(hosts.ssh_config), host, "--", inner]


def _run(*commands: Sequence[str]) -> None:
    """Run commands at the same time until all have ended. Exits with their output when one fails."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    running = [subprocess.Popen(command, env=rank_environment(), text=True, **pipes) for command in commands]
    try:
        output = [process.communicate(timeout=_LIMIT_S)[0] for process in running]
    finally:
        for process in running:
            end(process)
    if any(process.returncode for process in running):
        raise SystemExit("\n".join(output))
