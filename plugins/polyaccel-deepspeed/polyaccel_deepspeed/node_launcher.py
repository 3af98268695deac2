"""`deepspeed.launcher.launch`: the ranks of one host, as DeepSpeed's runner starts them there."""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from polyaccel.errors import LaunchError

_FLAGS = ("module", "no_python", "no_local_rank", "bind_cores_to_rank", "quiet")
_PROC = Path("/proc")
_EVERY_S = 0.05
_PATIENCE_S = 30
"""Seconds between the request and the end at once."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options that DeepSpeed's runner gives, and the script with its arguments."""
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.launch", description=__doc__, allow_abbrev=False)
    parser.add_argument("--node_rank", type=int, default=0, help="the place of this host")
    parser.add_argument("--master_addr", default="127.0.0.1", help="the first host")
    parser.add_argument("--master_port", type=int, default=29500, help="its port (default: %(default)s)")
    parser.add_argument("--world_info", default="None", help="the devices of every host: JSON in base64")
    for flag in _FLAGS:
        parser.add_argument(f"--{flag}", action="store_true", help="as `deepspeed` has it")
    parser.add_argument("--save_pid", type=int, default=0, help="the process whose number names the file")
    parser.add_argument("--enable_each_rank_log", default="None", help="a folder for the output of every rank")
    parser.add_argument("--bind_core_list", default=None, help="the cores to share")
    parser.add_argument("--log_level", default="info", help="accepted")
    parser.add_argument("training_script", help="the script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Start this host's ranks and wait for them. Return the job's exit code. Raises LaunchError without hosts."""
    from polyaccel_deepspeed.commands import launch

    given = parse_args(argv)
    hosts = hosts_of(given.world_info)
    words = ["--log_level", given.log_level, *(f"--{flag}" for flag in _FLAGS if getattr(given, flag))]
    if given.enable_each_rank_log != "None":
        words += ["--enable_each_rank_log", given.enable_each_rank_log]
    if given.bind_core_list is not None:
        words += ["--bind_core_list", given.bind_core_list]
    if given.save_pid:
        words.append("--save_pid")
    script = [given.training_script, *given.training_script_args]
    if len(hosts) == 1:
        ((_, devices),) = hosts.items()
        place = ["--include", f"localhost:{','.join(map(str, devices))}"]
        return launch([*place, "--master_port", str(given.master_port), *words, *script])
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as file:
        file.writelines(f"{host} slots={max(devices) + 1}\n" for host, devices in hosts.items())
        file.flush()
        chosen = "@".join(f"{host}:{','.join(map(str, devices))}" for host, devices in hosts.items())
        place = ["--hostfile", file.name, "--include", chosen, "--no_ssh", "--node_rank", str(given.node_rank)]
        place += ["--master_addr", given.master_addr, "--master_port", str(given.master_port)]
        return launch([*place, *words, *script])


def hosts_of(world_info: str) -> dict[str, list[int]]:
    """Return the devices of each host. Raises LaunchError for anything but base64 of such JSON."""
    try:
        found = json.loads(base64.urlsafe_b64decode(world_info))
        return {str(host): [int(one) for one in devices] for host, devices in found.items()}
    except (ValueError, AttributeError, TypeError) as error:
        hint = "deepspeed's runner gives it; use the command `deepspeed`"
        raise LaunchError(f"--world_info {world_info[:40]} names no hosts", hint=hint, value=world_info) from error


def terminate_process_tree(pid: int) -> None:
    """End a process and those that it started: first by a request, then at once."""
    family = [pid, *_descendants(pid)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for one in family:
            with suppress(ProcessLookupError):
                os.kill(one, number)
        deadline = monotonic() + _PATIENCE_S
        while any(map(_is_alive, family)) and monotonic() < deadline:
            sleep(_EVERY_S)


def _descendants(pid: int) -> list[int]:
    """The processes below `pid`, which Linux lists; none elsewhere."""
    parents = {int(entry.name): _parent_and_state(entry)[0] for entry in _PROC.glob("[0-9]*")}
    found, level = list[int](), [pid]
    while level:
        level = [one for one, parent in parents.items() if parent in level]
        found += level
    return found


def _is_alive(pid: int) -> bool:
    if _PROC.is_dir():
        return _parent_and_state(_PROC / str(pid))[1] not in ("", "Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _parent_and_state(entry: Path) -> tuple[int, str]:
    """What Linux has of a process; nothing of one that has ended."""
    try:
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return -1, ""
    return int(parent), state
