"""Two soaks: what three ranks hold after many thousand steps, and what is left behind by jobs that are killed.

    python tests/soak steady --seconds 900
    python tests/soak kills --seconds 600

Both train at stage 3 with parameters in host memory and optimizer states in files, and print a table. The exit code is
1 where something grew: descriptors or threads after the first hundred steps, memory by more than GROWTH_KB, or what
killed jobs leave: saves and offloaded states past what the first kills left, flight records past those that are kept.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from polyaccel.comm.flight_recorder.dump import MOST_OLD_JOBS

RANKS = Path(__file__).with_name("ranks.py")
GROWTH_KB = 4096
LIMIT_S = 300.0
"""For a job to begin, to reach the place where it is killed, and to end."""
LAUNCHERS = {
    "polyaccel run": ("-m", "polyaccel", "run", "--nproc"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
}
VICTIMS = ("rank 0", "rank 1", "all ranks", "launcher", "everything")
KINDS = [(launcher, victim) for launcher in LAUNCHERS for victim in VICTIMS]
KINDS.remove(("torchrun", "launcher"))  # its ranks go on by themselves


# What ranks hold.


def steady(seconds: float) -> bool:
    """Train on three ranks for so long; print what each held. Whether nothing grew."""
    with tempfile.TemporaryDirectory(prefix="polyaccel-soak-") as folder:
        command = [sys.executable, *LAUNCHERS["polyaccel run"], "3", str(RANKS), folder, "--seconds", str(seconds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[int, list[dict[str, int]]] = {}
    for rank, report in re.findall(r"^\[rank (\d+)\] holds (.*)$", done.stdout, re.MULTILINE):
        found.setdefault(int(rank), []).append(json.loads(report))
    print("| rank | step | memory of its own | shared | descriptors | threads |\n|---|---|---|---|---|---|")
    is_flat = len(found) == 3
    for rank, reports in sorted(found.items()):
        for at in dict.fromkeys((0, len(reports) // 4, len(reports) // 2, 3 * len(reports) // 4, len(reports) - 1)):
            one = reports[at]
            memory = f"{one['own'] / 1024:.1f} MiB | {one['shared'] / 1024:.1f} MiB"
            print(f"| {rank} | {one['step']:,} | {memory} | {one['descriptors']} | {one['threads']} |")
        first, last = reports[len(reports) // 4], reports[-1]  # by then saves have opened what they keep open
        grown = {key: last[key] - first[key] for key in first if key != "step"}
        thousands = (last["step"] - first["step"]) / 1000
        print(f"rank {rank}: {grown['own'] / max(thousands, 1):.1f} kB more a thousand steps", file=sys.stderr)
        is_flat &= grown["descriptors"] <= 0 and grown["threads"] <= 0
        is_flat &= grown["own"] <= GROWTH_KB and grown["shared"] <= GROWTH_KB
    return is_flat


# What killed jobs leave.


@dataclass(frozen=True)
class Left:
    """Files and bytes after a kill."""

    files: int
    nbytes: int

    @classmethod
    def under(cls, folder: Path) -> Left:
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        return cls(len(sizes), sum(sizes))


def kills(seconds: float, seed: int) -> bool:
    """Start, kill and start again for so long. Whether what is left stays within what the first kills left."""
    random, ends_s = Random(seed), monotonic() + seconds
    tried: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="polyaccel-soak-") as name:
        folder = Path(name)
        places = {each: folder / each for each in ("saves", "offload", "temp")}
        places["temp"].mkdir()
        at_start, lefts, reached = set(os.listdir("/dev/shm")), [], []
        while monotonic() < ends_s:
            launcher, victim = random.choice(KINDS)
            reached.append(one_kill(folder, launcher, victim, random))
            tried[f"{victim} of {launcher}"] += 1
            lefts.append({each: Left.under(place) for each, place in places.items()})
            print(len(lefts), launcher, victim, reached[-1], lefts[-1], file=sys.stderr, flush=True)
        new = [each for each in set(os.listdir("/dev/shm")) - at_start if "polyaccel" in each]
    print(f"{len(lefts)} kills: {', '.join(f'{count} of {what}' for what, count in sorted(tried.items()))}")
    print(f"steps went from {reached[0]} to {reached[-1]}; in /dev/shm: {new or 'nothing'}\n")
    print("| place | after 10 kills | the most | at the end |\n|---|---|---|---|")
    is_bounded = not new
    for each in places:
        rows = [left[each] for left in lefts]
        most_early = max(rows[: max(10, len(rows) // 3)], key=lambda left: left.nbytes)
        most = max(rows, key=lambda left: left.nbytes)
        shown = (
            f"{one.files} files, {one.nbytes / 1e6:.2f} MB" for one in (rows[min(9, len(rows) - 1)], most, rows[-1])
        )
        print(f"| {each} | {' | '.join(shown)} |")
        is_bounded &= most.files <= MOST_OLD_JOBS + 2 if each == "temp" else most.nbytes <= 1.5 * most_early.nbytes
    return is_bounded and reached == sorted(reached)


def one_kill(folder: Path, launcher: str, victim: str, random: Random) -> int:
    """Start a job that resumes, kill `victim` at a random one of its lines, and wait until nothing of it runs. Returns
    the step at which it began."""
    mark = uuid4().hex
    environment = {key: value for key, value in os.environ.items() if key != "XDG_RUNTIME_DIR"}
    environment |= {"SOAK_MARK": mark, "TMPDIR": str(folder / "temp"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *LAUNCHERS[launcher], "2", str(RANKS), str(folder)]
    log = folder / "log"
    with log.open("wb") as output:
        job = subprocess.Popen(
            [*command, "--save-every", "2", "--report-every", "1000"],
            env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        until_s = monotonic() + LIMIT_S
        lines = random.randint(2, 14)
        while len(re.findall(r"begins|saves|saved", text := log.read_text())) < lines:
            if job.poll() is not None or monotonic() > until_s:
                raise SystemExit(f"the job did not come to line {lines}:\n{text}")
            sleep(0.002)
        ranks = dict(processes_of(mark, RANKS.name))
        wanted = {"rank 0": [0], "rank 1": [1]}.get(victim, [0, 1])
        targets = [pid for pid, rank in ranks.items() if rank in wanted and victim != "launcher"]
        for pid in [*targets, *([job.pid] if victim in ("launcher", "everything") else [])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait(LIMIT_S)
        while (still := [*processes_of(mark)]) and monotonic() < until_s:
            sleep(0.01)
    for pid, _ in still:
        os.kill(pid, signal.SIGKILL)
    if still:
        raise SystemExit(f"{launcher}, {victim} killed: these went on: {still}\n{log.read_text()}")
    begins = re.findall(r"begins (\d+)", log.read_text())
    if len(set(begins)) != 1:
        raise SystemExit(f"the ranks began apart: {begins}\n{log.read_text()}")
    return int(begins[0])


def processes_of(mark: str, script: str = "") -> Iterator[tuple[int, int]]:
    """The processes that have inherited `mark` and run `script`, with their rank (-1: no rank)."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environment = environment_of(folder)
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            is_script = not script or any(one.endswith(script.encode()) for one in arguments[1:2] + arguments[2:3])
            if environment.get("SOAK_MARK") == mark and is_script:
                yield int(folder.name), int(environment.get("RANK", -1))


def environment_of(folder: Path) -> Mapping[str, Any]:
    text = (folder / "environ").read_bytes().decode(errors="replace")
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("which", choices=("steady", "kills"))
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    is_well = steady(args.seconds) if args.which == "steady" else kills(args.seconds, args.seed)
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
