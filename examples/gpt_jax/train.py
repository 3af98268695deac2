"""Train the byte-level GPT of examples/gpt as a JAX function, on the same text; PyTorch need not be installed.

    polyaccel run --ranks 2 examples/gpt_jax/train.py
    polyaccel run --ranks 2 examples/gpt_jax/train.py --resume

Figures, log, checkpoint, sample and report.html are in runs/gpt_jax. Ctrl-C, or SIGTERM, stops it at the end of a step,
with a checkpoint; a second one at once.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from corpus import Windows, open_corpus
from model import SHAPES, generate, initial_params, loss

import polyaccel
from polyaccel import PolyaccelError, comm

if TYPE_CHECKING:
    from polyaccel.jax.engine import JaxEngine

_PROMPT = b"def "
_SAMPLE_NBYTES = 400


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=SHAPES, help="the model (default: small, 10.8 M parameters)")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps (default: 350)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the initial parameters (default: 1)")
    parser.add_argument("--config", metavar="FILE", help="the JSON config (default: config.json next to this file)")
    parser.add_argument(
        "--run-dir", default="runs/gpt_jax", metavar="DIR", help="default: runs/gpt_jax, or with -2, ..."
    )
    parser.add_argument("--resume", action="store_true", help="continue the run that was written last")
    parser.add_argument("--until", type=int, metavar="N", help="stop after step N, ready for --resume")
    parser.add_argument("--save-every", type=int, default=200, metavar="N", help="steps between checkpoints")
    parser.add_argument("--eval-every", type=int, default=50, metavar="N", help="steps between validations")
    parser.add_argument("--eval-windows", type=int, default=96, metavar="N", help="sequences of a validation")
    args = parser.parse_args()
    try:
        polyaccel.init_distributed()
        code = train(args)
    except PolyaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    comm.destroy_process_group()
    return code


def train(args: argparse.Namespace) -> int:
    """The whole run, or as much of it as there is time for. Returns the exit code. Collective."""
    ranks = comm.default_communicator()
    given = {name: getattr(args, name) for name in ("size", "steps", "seed")}
    usual = {"size": "small", "steps": 350, "seed": 1}
    folder, run = polyaccel.begin_run(args.run_dir, given, defaults=usual, resume=args.resume)
    shape = SHAPES[run["size"]]
    engine = polyaccel.initialize(
        model=partial(loss, heads=shape.heads),
        params=initial_params(shape, run["seed"]),
        config=config_of(args, run, folder),
        seed=run["seed"],
    )
    if args.resume:
        engine.load_checkpoint(f"{folder}/checkpoint")
    windows, validation = (Windows(text, shape.context) for text in open_corpus())
    last = min(run["steps"], args.until or run["steps"])
    each = engine.train_batch_size() // ranks.world_size
    stop, stopped_by = polyaccel.StopRequest(), 0
    with polyaccel.open_progress(run["steps"], engine.global_steps) as progress:
        progress.say(f"{folder}: {run['size']} GPT in JAX, parameters {engine.copies}")
        while engine.global_steps < last and not stopped_by:
            indices = windows.shuffled(engine.global_samples, engine.train_batch_size(), run["seed"])
            engine.train_batch(windows.batch(indices[ranks.rank * each : (ranks.rank + 1) * each]))
            assert engine.metrics is not None  # after an optimizer step
            progress.step(engine.metrics)
            step, stopped_by = engine.global_steps, stop.agreed()
            if step % args.eval_every == 0 or step == last:
                progress.say(f"step {step}: validation loss {evaluate(engine, validation, args.eval_windows):.4f}")
            if step % args.save_every == 0 or step == last or stopped_by:
                engine.save_checkpoint(f"{folder}/checkpoint")
        where = f"at step {engine.global_steps} of {run['steps']}; checkpoint: {folder}/checkpoint"
        if stopped_by:
            progress.say(f"stopped by {signal.Signals(stopped_by).name} {where}; --resume continues")
        elif engine.global_steps < run["steps"]:
            progress.say(f"stopped {where}; --resume continues")
        params = engine.params  # every rank asks: at stage 3 they are gathered
        if ranks.rank == 0 and engine.global_steps == run["steps"]:
            text = bytes(generate(params, shape, _PROMPT, _SAMPLE_NBYTES, seed=run["seed"]))
            Path(folder, "sample.txt").write_bytes(_PROMPT + text)
            progress.say(f"report: {folder}/report.html")
    engine.destroy()  # writes the report
    return 128 + stopped_by if stopped_by else 0


def config_of(args: argparse.Namespace, run: dict[str, Any], folder: str) -> dict[str, Any]:
    """The config with a batch that the ranks can share, the number of steps in its schedule, and the run's folder."""
    config: dict[str, Any] = json.loads(Path(args.config or Path(__file__).with_name("config.json")).read_text())
    if not args.config:
        config["train_batch_size"] += -config["train_batch_size"] % comm.get_world_size()  # as many on each rank
    if config.get("scheduler", {}).get("params", {}).get("total_num_steps") == "auto":
        steps = run["steps"]
        config["scheduler"]["params"] |= {"total_num_steps": steps, "warmup_num_steps": max(2, steps // 20)}
    return {**config, "run_dir": folder}


def evaluate(engine: JaxEngine, windows: Windows, count: int) -> float:
    """The mean loss over all ranks' validation windows, which is also on the run's page. Collective."""
    ranks = engine.communicator
    share = windows.share(count, ranks.rank, ranks.world_size)
    size = engine.train_micro_batch_size_per_gpu()
    parts = [share[begin : begin + size] for begin in range(0, len(share), size)]
    total = sum(float(engine.eval_batch(windows.batch(part))) * len(part) for part in parts)
    mean = float(np.mean(ranks.all_gather_object(total / len(share))))
    engine.monitor.write_events([("validation_loss", mean, engine.global_steps)])
    return mean


if __name__ == "__main__":
    sys.exit(main())
