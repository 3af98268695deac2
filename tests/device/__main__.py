"""`python tests/device --out FOLDER`: prove and measure this project on the device of this machine. See `make device`.

Each step runs in its own process within its own limit, and its result is one line of FOLDER/summary.txt, with the whole
output in FOLDER/log.txt. Steps that passed are left out when the same folder is used again.

On a machine without network, run this in a checkout that `make device-wheels` has put wheels into:

  bash tests/device/start.sh --out results
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29544"}
REHEARSAL_LIMIT_S = 900.0
PYTEST = ["-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "--tb", "short", "-W", "default"]


@dataclass(frozen=True)
class Step:
    """What runs: arguments of Python, the variables it needs, and the seconds that it may take."""

    name: str
    arguments: list[str]
    limit_s: float = 150
    environ: Mapping[str, str] = field(default_factory=dict)


def proofs(device: str, *, is_rehearsal: bool) -> list[Step]:
    """Return the steps that may run together, in order of worth. A rehearsal has a few settings of each."""
    few = ["--few"] if is_rehearsal else []
    two = {"POLYACCEL_COMM": "gloo"}
    run = ["-m", "polyaccel", "run", "--nproc"]
    check = ["-m", "polyaccel", "plugins", "check"]
    return [
        Step("doctor", ["-m", "polyaccel", "doctor", "--json"], 60),
        Step("contract", [*PYTEST, str(HERE / "test_present_devices.py")]),
        Step("kernels", [*PYTEST, str(HERE / "test_device_kernels.py")]),
        Step("stages", [*run, "1", str(HERE / "train_stages.py"), "single", *few], 150, DETERMINISTIC),
        Step("features", [str(HERE / "train_features.py"), *few]),
        Step("two ranks", [*run, "2", str(HERE / "train_stages.py"), "double", *few], 150, {**DETERMINISTIC, **two}),
        Step("check", [*check, device, "-v", "-n", "1"]),
        Step("check over gloo", [*check, "gloo", "-v", "-n", "2", "--accelerator", device], 200),
        Step("jax", [str(HERE / "train_jax.py")], 120, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        Step("trainer", [str(HERE / "train_trainer.py")], 120, ONE_RANK),
    ]


def figures(trace: Path) -> list[Step]:
    """Return the steps that need the device alone."""
    bench = ["-m", "bench", "one-device", "--trace", str(trace)]
    large = ["torch", "fsdp2", "pa0", "pa2", "pa3", "pa2-host", "fsdp2-host"]
    return [
        Step("figures 350m", [*bench, "--size", "350m", "--rates"], 150),
        Step("figures 1.3b", [*bench, "--size", "1.3b", "--micro-batch", "4", "--variants", *large], 250),
    ]


class Report:
    """The files of a run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._lock = folder, Lock()
        self.done: list[str] = []
        if (path := folder / "done.json").exists():
            self.done = json.loads(path.read_text())

    def add(self, step: Step, code: int | None, seconds: float, output: str) -> None:
        """Append the outcome of a step to the files, and print its line."""
        state = "passed" if code == 0 else "past its limit" if code is None else f"FAILED ({code})"
        last = [line for line in output.strip().splitlines() if line.strip()][-1:]
        line = f"{step.name:18} {state:15} {seconds:6.1f} s  {' '.join(last)[:150]}"
        with self._lock:
            print(line, flush=True)
            with (self._folder / "summary.txt").open("a") as file:
                file.write(line + "\n")
            with (self._folder / "log.txt").open("a") as file:
                file.write(f"######## {line}\n{output[:200_000]}\n...\n{output[200_000:][-400_000:]}\n")
            if code == 0:
                self.done.append(step.name)
                (self._folder / "done.json").write_text(json.dumps(self.done))


def run(step: Step, report: Report) -> None:
    """Run one step in a session of processes that ends with it."""
    begin = time.monotonic()
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2", **step.environ}
    job = subprocess.Popen(
        [sys.executable, *step.arguments],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=step.limit_s)
        code: int | None = job.returncode
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        code = None
    report.add(step, code, time.monotonic() - begin, output)


def main() -> int:
    """Run the steps that have not passed."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="make device", description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default=os.environ.get("DS_ACCELERATOR", "cuda"))
    parser.add_argument("--only", nargs="+", help="names of steps")
    parser.add_argument("--together", type=int, default=10, help="proofs that run at once")
    parser.add_argument("--rehearsal", action="store_true", help="a few settings of each step, without limits")
    args = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = args.device
    report = Report(args.out)
    steps = proofs(args.device, is_rehearsal=args.rehearsal)
    if args.rehearsal:
        steps = [replace(step, limit_s=REHEARSAL_LIMIT_S) for step in steps]
    wanted = [step for step in steps if step.name not in report.done]
    alone = [step for step in figures(args.out / "trace.txt") if step.name not in report.done and not args.rehearsal]
    if args.only:
        wanted, alone = ([step for step in steps if step.name in args.only] for steps in (wanted, alone))
    with ThreadPoolExecutor(max(args.together, 1)) as pool:
        list(pool.map(lambda step: run(step, report), wanted))
    for step in alone:
        run(step, report)
    return 0 if {step.name for step in [*wanted, *alone]} <= set(report.done) else 1


if __name__ == "__main__":
    sys.exit(main())
