"""`python -m bench jax`: a JAX function under the engine beside torch's path and beside JAX's own shardings.

All variants in turn, in rounds, each on two ranks of one thread. Needs jax, optax and torch in the environment.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.steps.launch import rank_environment

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 300.0
_VARIANTS = {
    "torch2": "torch, ZeRO-2",
    "views2": "JAX, views, ZeRO-2",
    "jit3": "JAX, one jit, ZeRO-3",
    "jit3-gloo": "JAX, one jit, ZeRO-3, over gloo",
    "gspmd3": "JAX's own shardings (GSPMD), ZeRO-3, over gloo",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench jax", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="medium", help="of the examples' GPT (medium: 29 M parameters)")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a variant in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", default=list(_VARIANTS), choices=list(_VARIANTS))
    args = parser.parse_args(argv)
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in args.variants}
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder:
        for _ in range(args.rounds):
            for variant in args.variants:
                found[variant].append(_run(variant, args, Path(folder)))
    print("| variant | ms a step | XLA arguments MiB | XLA temporary MiB | peak RSS MiB | first, last loss |")
    print("|---|---|---|---|---|---|")
    for variant, runs in found.items():
        needs = runs[-1]["needs"]
        memory = [f"{nbytes / 2**20:.0f}" for nbytes in needs] if needs else ["-", "-"]
        figures = [f"{1e3 * median(run['step_s'] for run in runs):.1f}", *memory, f"{runs[-1]['peak'] / 2**20:.0f}"]
        losses = ", ".join(f"{loss:.4f}" for loss in runs[-1]["losses"])
        print(f"| {_VARIANTS[variant]} | {' | '.join(figures)} | {losses} |")
    return 0


def _run(variant: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    result = folder / "figures.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", "--module", "bench.jax.worker", variant]
    environ = {
        **rank_environment(),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),  # rounds differ in nothing that is compiled
    }
    subprocess.run(
        [*command, args.size, str(args.micro_batch), str(args.steps), str(result)],
        cwd=_ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
        timeout=_LIMIT_S,
        check=True,
    )
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures
