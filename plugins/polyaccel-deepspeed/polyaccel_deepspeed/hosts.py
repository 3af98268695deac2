"""The command `ds_ssh`: a command on every host of a hostfile, by ssh, all hosts at once."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Lock, Thread
from typing import IO

from polyaccel.errors import LaunchError
from polyaccel.launch.hosts import is_here, read_hostfile

DEFAULT_HOSTFILE = Path("/job/hostfile")
"""Where DeepSpeed looks for hosts by default."""
_OPTIONS = ("-oBatchMode=yes", "-oConnectTimeout=10")


def ssh_parser() -> argparse.ArgumentParser:
    """The options of `ds_ssh`."""
    parser = argparse.ArgumentParser(prog="ds_ssh", description=__doc__, allow_abbrev=False)
    parser.add_argument("-f", "--hostfile", type=Path, default=DEFAULT_HOSTFILE, help="(default: %(default)s)")
    parser.add_argument("--ssh_args", "--ssh-args", default="", metavar="TEXT", help="more options of ssh")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="...", help="for the shell of each host")
    return parser


def run_on_hosts(hostfile: Path, command: Sequence[str], options: Sequence[str] = ()) -> int:
    """Run a command, in words for the hosts' shells, on all hosts of a file, and show its output with `host: ` before
    each line. Returns the largest exit code. Raises LaunchError."""
    if not command:
        raise LaunchError("no command is given", hint="ds_ssh -f hostfile COMMAND")
    hosts = read_hostfile(hostfile)
    lock, processes, readers = Lock(), [], []
    for host in hosts:
        words = ["sh", "-c", " ".join(command)]
        if not is_here(host):
            words = ["ssh", *_OPTIONS, *options, host, "--", " ".join(command)]
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as error:
            raise LaunchError(f"{words[0]} cannot be started: {error}", hint="install openssh-client") from error
        processes.append(process)
        for pipe, shown in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert pipe is not None  # it was started with both
            readers.append(Thread(target=_show, args=(host, pipe, shown, lock)))
            readers[-1].start()
    try:
        for reader in readers:
            reader.join()
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    return max(code if code >= 0 else 128 - code for code in (process.wait() for process in processes))


def _show(host: str, pipe: IO[bytes], shown: IO[str], lock: Lock) -> None:
    with pipe:
        for line in pipe:
            with lock:
                shown.write(f"{host}: {line.decode(errors='replace').rstrip()}\n")
                shown.flush()
