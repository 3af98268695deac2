"""Two hundred SIGKILLs of ranks, of the processes that write their saves, and of the keeper, at any moment of a
training that replicates each step and saves in the background every few.

    python tests/soak/replicas.py --kills 200

A launcher starts the ranks again each time. What counts: every loss that any start printed, of every step and rank, and
the parameters at the end have the bits of the run that nobody disturbs, and no start goes on from more than one step
before the last that was printed, unless the keeper was killed right before. Prints a table; the exit code is 1 where
anything differs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from select import select
from time import monotonic, perf_counter

RANKS = Path(__file__).with_name("replica_ranks.py")
LIMIT_S = 300.0
VICTIMS = {"rank 0": 3, "rank 1": 3, "both ranks": 1, "a writer": 4, "the keeper": 3, "the keeper, then a rank": 1}
WRITER, KEEPER = "checkpoint.save.async_process", "job.memory_server.process"


class Job:
    """The training under `polyaccel run`, and what it has said."""

    def __init__(self, folder: Path, script: Path = RANKS, ranks: int = 2, *arguments: str) -> None:
        command = [sys.executable, "-m", "polyaccel", "run", "--nproc", str(ranks), "--restarts", "100000"]
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [*command, str(script), str(folder), *arguments], stdin=subprocess.DEVNULL, stdout=write, stderr=write
        )
        os.close(write)
        self._out, self._data = read, b""
        self.log: list[str] = []
        self.losses: dict[tuple[int, int], str] = {}
        self.last_step, self.start = 0, -1
        self.pids: dict[int, int] = {}
        self.begun = list[tuple[int, int]]()
        """(step that a start began at, last step that was printed before)"""
        self.ends: set[str] = set()
        self.differs: list[str] = []

    def lines(self) -> Iterator[str]:
        """What it says, as it comes. Raises SystemExit where it says nothing any more."""
        while True:
            line, end, rest = self._data.partition(b"\n")
            if end:
                self._data = rest
                text = line.decode(errors="replace")
                self.log.append(text)
                self._note(text)
                yield text
                continue
            if not select([self._out], [], [], LIMIT_S)[0]:
                raise SystemExit("it hangs:\n" + "\n".join(self.log[-200:]))
            data = os.read(self._out, 1 << 16)
            if not data:
                return
            self._data += data

    def _note(self, text: str) -> None:
        if found := re.match(r"\[rank (\d)\] loss (\d+) (\S+)$", text):
            rank, step = int(found[1]), int(found[2])
            if self.losses.setdefault((step, rank), found[3]) != found[3]:
                self.differs.append(f"step {step}, rank {rank}: {self.losses[step, rank]}, later {found[3]}")
            self.last_step = max(self.last_step, step)
        elif found := re.match(r"\[rank (\d)\] begins (\d+) (\d+) (\d+)$", text):
            if int(found[2]) != self.start:
                self.start = int(found[2])
                self.begun.append((int(found[3]), self.last_step))
                self.pids.clear()
            self.pids[int(found[1])] = int(found[4])
        elif found := re.match(r"\[rank \d\] ends (.*)$", text):
            self.ends.add(found[1])


def children(pid: int) -> Iterator[tuple[int, str]]:
    """The processes that a process has started, with their command lines."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                with suppress(OSError):
                    yield child, Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def processes(pid: int, name: str) -> list[int]:
    return [child for child, command in children(pid) if name in command]


def kill(*pids: int) -> int:
    """SIGKILL for each that is there. Returns how many were."""
    killed = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def strike(job: Job, victim: str, draw: Random) -> int:
    """Kill; returns how many processes were. 0 where there is no such process now."""
    ranks = [job.pids[rank] for rank in sorted(job.pids)]
    match victim:
        case "rank 0" | "rank 1":
            return kill(job.pids[int(victim[-1])])
        case "both ranks":
            return kill(*ranks)
        case "a writer":
            return kill(*processes(draw.choice(ranks), WRITER)[:1])
        case "the keeper":
            return kill(*processes(job.process.pid, KEEPER)[:1])
    return kill(*processes(job.process.pid, KEEPER)[:1]) + kill(draw.choice(ranks))


def disturb(job: Job, kills: int, draw: Random, folder: Path) -> tuple[Counter[str], list[str]]:
    """Kill so many times, then let the training end. What was killed, and starts that lost more than they may."""
    done, lost = Counter[str](), list[str]()
    lines, without_keeper_until = job.lines(), 0
    while done.total() < kills:
        victim = draw.choices([*VICTIMS], [*VICTIMS.values()])[0]
        while len(job.pids) < 2:
            next(lines)
        target = job.last_step + draw.randint(1, 12)
        wanted = r"saves \d+" if draw.random() < 0.5 else rf"loss {target} "
        while len(job.pids) == 2 and not re.search(wanted, next(lines)) and job.last_step < target + 20:
            pass
        until_s = perf_counter() + draw.random() * 0.02
        while perf_counter() < until_s:  # anywhere within a step
            pass
        starts = len(job.begun)
        if len(job.pids) < 2 or not strike(job, victim, draw):
            continue
        done[victim] += 1
        if "keeper" in victim:
            without_keeper_until = job.last_step + 6  # until two steps were replicated anew
        if victim in ("the keeper", "a writer"):  # the ranks hear of a writer's end if it was writing
            continue
        while len(job.begun) == starts:
            next(lines)
        step, before = job.begun[-1]
        if before > without_keeper_until and step < before - 1:
            lost.append(f"{victim} killed: went on from step {step}, and {before} was done")
    (folder / "stop").touch()
    for _ in lines:
        pass
    return done, lost


def undisturbed(folder: Path, steps: int) -> tuple[dict[tuple[int, int], str], set[str]]:
    command = [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", str(RANKS), str(folder), str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = re.findall(r"^\[rank (\d)\] loss (\d+) (\S+)$", done.stdout, re.MULTILINE)
    ends = set(re.findall(r"^\[rank \d\] ends (.*)$", done.stdout, re.MULTILINE))
    return {(int(step), int(rank)): loss for rank, step, loss in found}, ends


def main() -> None:
    """See the head of this file."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    draw, began_s = Random(args.seed), monotonic()
    with tempfile.TemporaryDirectory(prefix="polyaccel-replicas-") as name:
        folder = Path(name)
        job = Job(folder)
        try:
            done, lost = disturb(job, args.kills, draw, folder)
            code = job.process.wait()
        finally:
            job.process.kill()
            job.process.wait()
        steps = max(step for step, _ in job.losses)
        losses, ends = undisturbed(folder, steps)
        last = max((int(end.split()[0]) for end in job.ends), default=steps)
        if last != steps:  # the start that ended had gone back, and was not to catch up
            _, ends = undisturbed(folder, last)
    own_ends = {end for end in job.ends if int(end.split()[0]) == last}  # a start that was killed has ended before
    differs = [
        *job.differs,
        *(f"{key}: {loss}, undisturbed {losses[key]}" for key, loss in job.losses.items() if losses[key] != loss),
    ]
    back = Counter(before - step for step, before in job.begun[1:])
    print("| killed | times |\n|---|---|")
    for victim in VICTIMS:
        print(f"| {victim} | {done[victim]} |")
    from_memory = sum(line.startswith("[rank 0] [polyaccel] continuing from the replica") for line in job.log)
    took_s = monotonic() - began_s
    print(f"\n{steps:,} steps in {took_s:.0f} s, {len(job.begun)} starts, {from_memory} of them from memory")
    print(f"steps printed and done again, by start: {dict(sorted(back.items()))}")
    print(
        f"losses that differ: {len(differs)} of {len(job.losses)}; parameters differ: {ends != own_ends}; code {code}"
    )
    for line in [*lost, *differs][:20]:
        print(line)
    is_well = not lost and not differs and code == 0 and ends == own_ends
    if not is_well:
        Path("replicas-soak.log").write_text("\n".join(job.log))
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
