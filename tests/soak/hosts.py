"""A soak of two hosts: jobs of which something random is killed, stopped or cut off, again and again.

    python tests/soak/hosts.py --count 200 --seed 1

Each ends everywhere within LIMIT_S seconds with the exit code that its end should have, and leaves no process, no
listening socket and no shared memory behind, here or on a host. Prints a table by kind; the exit code is 1 where one
was late, and at the first that ends otherwise.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic, sleep

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from host_jobs import Hosts
from ssh_hosts import SshHosts, why_absent
from waiting_job import reset_signals

from polyaccel.launch.base import JOB_ID

LIMIT_S = 15.0
_HARD_LIMIT_S = 60.0
"""A round that takes longer than LIMIT_S is late; one that takes longer than this ends the soak."""
_START_S = 120.0
_STOP_TIMEOUT_S = 2
RANKS = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
name = os.path.join(sys.argv[1], "rank" + os.environ["RANK"])
with open(name + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(name + ".new", name)
signal.pause()
"""
"""Each rank has a worker that has left its session."""


@dataclass
class Round:
    """A job that runs on both hosts."""

    hosts: Hosts
    folder: Path
    launcher: str
    random: Random
    process: subprocess.Popen[bytes]

    def on_host(self, pattern: str, number: int) -> int:
        """A process of a host, as the host numbers it."""
        found = self.hosts.up.hosts[number].run("pgrep", "-f", pattern).stdout.split()
        return int(found[0])

    def kill_on_host(self, number: int, pattern: str, how: signal.Signals) -> None:
        self.hosts.up.hosts[number].run("kill", f"-{int(how)}", str(self.on_host(pattern, number)))

    def ways(self) -> list[int]:
        """The processes of ssh; pdsh's are children of its shells."""
        parents = [self.process.pid]
        if self.launcher == "pdsh":
            (pdsh,) = _children(self.process.pid, "pdsh")
            parents = _children(pdsh, "sh")
        return [pid for parent in parents for pid in _children(parent, "ssh")]


def _children(pid: int, name: str) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", f"^{name} "], capture_output=True, text=True).stdout
    return [int(word) for word in found.split()]


# What is done, and the exit codes that may follow; a launcher that is killed has -9.
def rank_is_killed(job: Round) -> set[int]:
    job.kill_on_host(*job.random.choice([(0, "train.py"), (1, "train.py")]), signal.SIGKILL)
    return {137}


def rank_is_stopped(job: Round) -> set[int]:
    job.kill_on_host(*job.random.choice([(0, "train.py"), (1, "train.py")]), signal.SIGSTOP)
    return {128 + signal.SIGSTOP}


def rank_fails(job: Round) -> set[int]:
    job.kill_on_host(job.random.randrange(2), "train.py", signal.SIGUSR2)
    return {128 + signal.SIGUSR2}


def launcher_is_killed(job: Round) -> set[int]:
    job.process.kill()
    return {-signal.SIGKILL}


def launcher_is_stopped(job: Round) -> set[int]:
    """The hosts give it up; told to go on, it finds that they have."""
    job.process.send_signal(signal.SIGSTOP)
    until_s = monotonic() + _HARD_LIMIT_S
    while job.hosts.left() and monotonic() < until_s:
        sleep(0.1)
    left = job.hosts.left()
    job.process.send_signal(signal.SIGCONT)
    return set() if left else {128 + signal.SIGTERM, 255}


def launcher_is_asked(job: Round) -> set[int]:
    number = job.random.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    job.process.send_signal(number)
    return {128 + number}


def way_is_killed(job: Round) -> set[int]:
    os.kill(job.random.choice(job.ways()), signal.SIGKILL)
    return {137, 255}


def way_is_stopped(job: Round) -> set[int]:
    os.kill(job.random.choice(job.ways()), signal.SIGSTOP)
    return {128 + signal.SIGSTOP, 255}


def agent_is_killed(job: Round) -> set[int]:
    job.kill_on_host(job.random.randrange(2), "remote.agent", signal.SIGKILL)
    return {137, 255}


def host_is_gone(job: Round) -> set[int]:
    host = job.hosts.up.hosts[job.random.randrange(2)]
    os.kill(host._inner_pid(), signal.SIGKILL)
    host.cut()
    return {255}


def network_is_cut(job: Round) -> set[int]:
    job.hosts.up.hosts[job.random.randrange(2)].cut()
    return {255}


def network_is_cut_and_heals(job: Round) -> set[int]:
    """Soon enough that nobody gives anybody up."""
    host = job.hosts.up.hosts[job.random.randrange(2)]
    host.cut()
    sleep(job.random.uniform(0.5, 3.0))
    host.heal()
    sleep(3.0)
    if job.process.poll() is not None:
        return set()
    job.process.send_signal(signal.SIGTERM)
    return {128 + signal.SIGTERM}


KINDS: tuple[Callable[[Round], set[int]], ...] = (
    rank_is_killed,
    rank_is_stopped,
    rank_fails,
    launcher_is_killed,
    launcher_is_stopped,
    launcher_is_asked,
    way_is_killed,
    way_is_stopped,
    agent_is_killed,
    host_is_gone,
    network_is_cut,
    network_is_cut_and_heals,
)
CLOCK_BEGINS_LATER = ("launcher_is_stopped", "network_is_cut_and_heals")
"""What takes its time itself."""


def one_round(hosts: Hosts, folder: Path, kind: Callable[[Round], set[int]], launcher: str, random: Random) -> float:
    """Start a job, do this to it, and wait for its end everywhere. Returns how long that took. Raises SystemExit."""
    folder.mkdir()
    (folder / "train.py").write_text(RANKS)
    options = ("--grace-period", "2", "--stop-timeout", str(_STOP_TIMEOUT_S))
    command = hosts.command(folder / "train.py", *options, arguments=(str(folder),), launcher=launcher)
    log = folder / "log"
    environment = {**hosts.environment, "POLYACCEL_SOAK": str(os.getpid())}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=reset_signals,
        )
    try:
        _await(lambda: all((folder / f"rank{rank}").exists() for rank in range(3)), _START_S, "did not start", log)
        sleep(random.uniform(0.0, 0.5))
        began_s = monotonic()
        codes = kind(Round(hosts, folder, launcher, random, process))
        if kind.__name__ in CLOCK_BEGINS_LATER:
            began_s = monotonic()
        _await(lambda: process.poll() is not None, _HARD_LIMIT_S, "the launcher did not end", log)
        if process.returncode not in codes:
            raise SystemExit(f"exit code {process.returncode}, not one of {codes}\n{log.read_text()}")
        _await(lambda: not _left(hosts), _HARD_LIMIT_S, "something was left", log, hosts)
        return monotonic() - began_s
    finally:
        process.kill()
        process.wait()


def _left(hosts: Hosts) -> list[str]:
    """What is there of a job that should not be: processes, listening sockets, shared memory."""
    found = [f"here: {line}" for line in _own_processes()]
    found += [f"/dev/shm: {name}" for name in os.listdir("/dev/shm") if "polyaccel" in name and name not in _AT_START]
    for host in hosts.up.hosts:
        with suppress(IndexError, FileNotFoundError):  # a host that is gone has nothing
            found += [f"{host.name}: {line}" for line in host.processes()]
            listening = host.run("ss", "-tlnH").stdout.splitlines()
            found += [f"{host.name} listens: {line}" for line in listening if ":2222" not in line]
            found += [f"{host.name} /dev/shm: {name}" for name in host.run("ls", "/dev/shm").stdout.split()]
    return found


def _own_processes() -> Iterator[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if MARK in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                if stat[0] not in "ZX":
                    yield f"{folder.name} {(folder / 'cmdline').read_bytes()!r}"


def _await(is_so: Callable[[], bool], limit_s: float, what: str, log: Path, hosts: Hosts | None = None) -> None:
    until_s = monotonic() + limit_s
    while not is_so():
        if monotonic() > until_s:
            left = _left(hosts) if hosts is not None else ""
            raise SystemExit(f"{what} within {limit_s:.1f} s: {left}\n{log.read_text()}")
        sleep(0.02)


MARK = f"POLYACCEL_SOAK={os.getpid()}".encode()
_AT_START = frozenset(os.listdir("/dev/shm"))


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if reason := why_absent():
        raise SystemExit(reason)
    os.environ.pop(JOB_ID, None)
    random, took = Random(args.seed), defaultdict[str, list[float]](list)
    up: SshHosts | None = None
    with tempfile.TemporaryDirectory(prefix="polyaccel-soak-") as name:
        try:
            for number in range(args.count):
                if up is None:
                    (folder := Path(name, f"hosts{number}")).mkdir()
                    up = SshHosts(folder, 2).__enter__()
                    hosts = Hosts(up, folder)
                kind, launcher = random.choice(KINDS), random.choice(["ssh", "pdsh"])
                print(number + 1, kind.__name__, launcher, end=" ", file=sys.stderr, flush=True)
                seconds = one_round(hosts, Path(name, str(number)), kind, launcher, random)
                took[f"{kind.__name__.replace('_', ' ')}, {launcher}"].append(seconds)
                print(f"{seconds:.1f} s", file=sys.stderr, flush=True)
                for host in up.hosts:
                    host.heal()
                if kind is host_is_gone:
                    up.__exit__()
                    up = None
        finally:
            if up is not None:
                up.__exit__()
    print("| what | times | ended within, median | at most |\n|---|---|---|---|")
    for what, seconds_of in sorted(took.items()):
        middle = sorted(seconds_of)[len(seconds_of) // 2]
        print(f"| {what} | {len(seconds_of)} | {middle:.1f} s | {max(seconds_of):.1f} s |")
    late = sum(seconds > LIMIT_S for seconds_of in took.values() for seconds in seconds_of)
    print(f"\n{late} of {sum(map(len, took.values()))} took longer than {LIMIT_S:g} s")
    sys.exit(late > 0)


if __name__ == "__main__":
    main()
