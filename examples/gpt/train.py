"""Train a byte-level GPT on the source text of Python's standard library.

    polyaccel run --ranks 2 examples/gpt/train.py
    polyaccel run --ranks 2 examples/gpt/train.py --resume

Also runs under torchrun, mpirun and srun, and alone: `python examples/gpt/train.py`. Figures, log, checkpoint, sample
and report.html are in runs/gpt. Ctrl-C, or SIGTERM, stops it at the end of a step, with a checkpoint; a second one at
once.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from corpus import Windows, open_corpus, validation_share
from model import SHAPES, Gpt, generate

import polyaccel
from polyaccel import PolyaccelError, TorchEngine, comm

_PROMPT, _SAMPLE_NBYTES = b"def ", 400
_CPUINFO = Path("/proc/cpuinfo")


def main() -> int:
    args = parse_arguments()
    try:
        polyaccel.init_distributed()
        code = train(args)
        comm.destroy_process_group()
    except PolyaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return code


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=SHAPES, help="the model (default: small, 10.8 M parameters)")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps (default: 350)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the initial parameters (default: 1)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="default: bf16 where it is fast")
    parser.add_argument("--config", metavar="FILE", help="the JSON config (default: config.json next to this file)")
    parser.add_argument("--run-dir", default="runs/gpt", metavar="DIR", help="default: runs/gpt, or runs/gpt-2, ...")
    parser.add_argument("--resume", action="store_true", help="continue the run that was written last")
    parser.add_argument("--until", type=int, metavar="N", help="stop after step N, ready for --resume")
    parser.add_argument("--save-every", type=int, default=200, metavar="N", help="steps between checkpoints")
    parser.add_argument("--eval-every", type=int, default=50, metavar="N", help="steps between validations")
    parser.add_argument("--eval-windows", type=int, default=96, metavar="N", help="sequences of a validation")
    return parser.parse_args()


def train(args: argparse.Namespace) -> int:
    """The whole run, or as much of it as there is time for. Returns the exit code. Collective."""
    given = {name: getattr(args, name) for name in ("size", "steps", "seed", "precision")}
    usual = {"size": "small", "steps": 350, "seed": 1, "precision": "bf16" if has_fast_bf16() else "fp32"}
    folder, run = polyaccel.begin_run(args.run_dir, given, defaults=usual, resume=args.resume)
    corpus, shape = open_corpus(), SHAPES[run["size"]]
    torch.manual_seed(run["seed"])
    model = Gpt(shape)
    engine, *_ = polyaccel.initialize(
        model=model, training_data=Windows(corpus.training, shape.context), config=config_of(args, run, folder)
    )
    if args.resume and engine.load_checkpoint(f"{folder}/checkpoint")[1]["corpus"] != corpus.digest:
        hint = "resume with the Python that the run was started with"
        raise PolyaccelError("the library is not the one that the run was trained on", hint=hint)
    validation = Windows(corpus.validation, shape.context)
    last = min(run["steps"], args.until or run["steps"])
    stop, stopped_by = polyaccel.StopRequest(), 0
    with polyaccel.open_progress(run["steps"], engine.global_steps) as progress:
        progress.say(f"{folder}: {run['size']} GPT, {model.numel / 1e6:.1f} M parameters, {run['precision']}")
        while engine.global_steps < last and not stopped_by:
            engine.train_batch()
            assert engine.metrics is not None  # after an optimizer step
            progress.step(engine.metrics)
            step, stopped_by = engine.global_steps, stop.agreed()
            if step % args.eval_every == 0 or step == last:
                progress.say(f"step {step}: validation loss {evaluate(engine, validation, args.eval_windows):.4f}")
            if step % args.save_every == 0 or step == last or stopped_by:
                engine.save_checkpoint(f"{folder}/checkpoint", client_state={"corpus": corpus.digest})
        where = f"at step {engine.global_steps} of {run['steps']}; checkpoint: {folder}/checkpoint"
        if stopped_by:
            progress.say(f"stopped by {signal.Signals(stopped_by).name} {where}; --resume continues")
        elif engine.global_steps < run["steps"]:
            progress.say(f"stopped {where}; --resume continues")
        else:
            progress.say(f"--- sample ---\n{sample(engine, folder, run)}\n--------------\nreport: {folder}/report.html")
    engine.destroy()  # writes the report
    return 128 + stopped_by if stopped_by else 0


def config_of(args: argparse.Namespace, run: dict[str, Any], folder: str) -> dict[str, Any]:
    """The config with the settings of the run in place of each "auto"."""
    config: dict[str, Any] = json.loads(Path(args.config or Path(__file__).with_name("config.json")).read_text())
    steps, schedule = run["steps"], config.get("scheduler", {}).get("params", {})
    if schedule.get("total_num_steps") == "auto":
        schedule |= {"total_num_steps": steps, "warmup_num_steps": max(2, steps // 20)}
    if config.get("bf16", {}).get("enabled") == "auto":
        config["bf16"]["enabled"] = run["precision"] == "bf16"
    return {**config, "run_dir": folder}


def has_fast_bf16() -> bool:
    """Whether the accelerator multiplies bf16 faster than fp32: a CPU only with instructions for it."""
    accelerator = polyaccel.get_accelerator()
    flags = _CPUINFO.read_text() if accelerator.name == "cpu" and _CPUINFO.exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags or accelerator.name != "cpu"


def evaluate(engine: TorchEngine, windows: Windows, count: int) -> float:
    """The mean loss over all ranks' windows, which is also on the run's page. Collective."""
    share = validation_share(windows, count=count, rank=comm.get_rank(), world_size=comm.get_world_size())
    size = engine.train_micro_batch_size_per_gpu()
    mean = torch.zeros(1, device=engine.device)
    for begin in range(0, len(share), size):
        part = share[begin : begin + size]
        tokens, targets = zip(*(windows[index] for index in part), strict=True)
        mean += engine.eval_batch(iter([(torch.stack(tokens), torch.stack(targets))])) * len(part) / len(share)
    comm.all_reduce(mean, op=comm.ReduceOp.AVG)
    engine.monitor.write_events([("validation_loss", float(mean), engine.global_steps)])
    return float(mean)


def sample(engine: TorchEngine, folder: str, run: dict[str, Any]) -> str:
    """Generate text, and keep it in the run's folder. Every rank does, for where parameters are sharded. Collective."""
    engine.eval()
    shape = SHAPES[run["size"]]
    drawn = generate(engine, shape, _PROMPT, _SAMPLE_NBYTES, seed=run["seed"], device=engine.device)
    text = readable(_PROMPT + bytes(drawn))
    if comm.get_rank() == 0:
        Path(folder, "sample.txt").write_text(text + "\n", encoding="utf-8")
    return text


def readable(generated: bytes) -> str:
    """Text that a terminal may be shown, without trailing spaces: an early model also writes control characters."""
    text = generated.decode("utf-8", errors="replace").replace("\0", "\n")
    shown = "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)
    return "\n".join(line.rstrip() for line in shown.splitlines()).rstrip()


if __name__ == "__main__":
    sys.exit(main())
