"""Ten thousand steps of a mixture whose tokens choose at random, with ranks killed at random moments.

    python tests/soak/experts.py --steps 10000 --kills 60

Four ranks train under a launcher that starts them again, two sharing the experts of each layer. Some steps send all
tokens to one expert, some none to many, some ranks have none at all. Beside the training each step sends whole numbers
through experts that nobody trains, and compares sums and gradients with those of one rank, exactly. What counts: no
sum differs, nothing hangs, and every loss that any start printed, and the parameters at the end, have the bits of the
run that nobody disturbs. Prints a table; the exit code is 1 where anything differs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from random import Random
from time import monotonic, perf_counter

from replicas import Job, kill

RANKS = Path(__file__).with_name("expert_ranks.py")
COUNT = 4


def disturb(job: Job, steps: int, kills: int, draw: Random) -> Counter[str]:
    """Kill one rank or two, so many times over so many steps, and wait for the end of the training."""
    done, lines = Counter[str](), job.lines()
    targets = sorted(draw.sample(range(2, steps), kills))
    for target in targets:
        while job.last_step < target or len(job.pids) < COUNT:
            if next(lines, None) is None:
                return done
            if len(job.begun) > done.total() + 1:
                raise SystemExit("it ended by itself:\n" + "\n".join(job.log[-200:]))
        until_s = perf_counter() + draw.random() * 0.05
        while perf_counter() < until_s:  # anywhere within a step
            pass
        victims = draw.sample(range(COUNT), draw.choice((1, 1, 2)))
        starts = len(job.begun)
        done[f"ranks {sorted(victims)}"] += bool(kill(*(job.pids[rank] for rank in victims)))
        while len(job.begun) == starts:
            if next(lines, None) is None:
                return done
    for _ in lines:
        pass
    return done


def undisturbed(folder: Path, steps: int) -> tuple[dict[tuple[int, int], str], set[str]]:
    command = [sys.executable, "-m", "polyaccel", "run", "--nproc", str(COUNT), str(RANKS), str(folder), str(steps)]
    done = subprocess.run([*command, "alone"], stdout=subprocess.PIPE, text=True, check=True)
    found = re.findall(r"^\[rank (\d)\] loss (\d+) (\S+)$", done.stdout, re.MULTILINE)
    ends = set(re.findall(r"^\[rank \d\] ends (.*)$", done.stdout, re.MULTILINE))
    return {(int(step), int(rank)): loss for rank, step, loss in found}, ends


def main() -> None:
    """See the head of this file."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    began_s = monotonic()
    with tempfile.TemporaryDirectory(prefix="polyaccel-experts-") as name:
        folder = Path(name)
        job = Job(folder, RANKS, COUNT, str(args.steps))
        try:
            done = disturb(job, args.steps, args.kills, Random(args.seed))
            code = job.process.wait()
        finally:
            job.process.kill()
            job.process.wait()
        losses, ends = undisturbed(folder, args.steps)
    differs = [
        *job.differs,
        *(
            f"{key}: {loss}, undisturbed {losses.get(key)}"
            for key, loss in job.losses.items()
            if losses.get(key) != loss
        ),
        *(line for line in job.log if "wrong sum" in line),
    ]
    print("| killed | times |\n|---|---|")
    for victims, times in sorted(done.items()):
        print(f"| {victims} | {times} |")
    back = Counter(before - step for step, before in job.begun[1:])
    print(
        f"\n{args.steps:,} steps in {monotonic() - began_s:.0f} s, {len(job.begun)} starts; steps printed and done "
        f"again, by start: {dict(sorted(back.items()))}"
    )
    print(
        f"losses or sums that differ: {len(differs)} of {len(job.losses)}; parameters differ: {ends != job.ends}; "
        f"code {code}"
    )
    for line in differs[:20]:
        print(line)
    is_well = not differs and code == 0 and ends == job.ends and len(losses) == COUNT * args.steps == len(job.losses)
    if not is_well:
        Path("experts-soak.log").write_text("\n".join(job.log))
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
