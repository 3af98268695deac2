"""Train a byte-level GPT on the source text of Python's standard library.

    polyaccel run --ranks 2 examples/gpt/train.py
    polyaccel run --ranks 2 examples/gpt/train.py --resume

Also runs under torchrun, mpirun and srun, and alone: `python examples/gpt/train.py`. All that it leaves is in runs/gpt.
Ctrl-C, or SIGTERM, stops it at the end of a step, with a checkpoint; a second one at once.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from corpus import Windows, open_corpus
from model import SHAPES, Gpt, generate
from torch.utils.data import DataLoader, Subset

import polyaccel
from polyaccel import PolyaccelError, TorchEngine, comm

_PROMPT, _SAMPLE_NBYTES = b"def ", 400


def main() -> int:
    args = parse_arguments()
    try:
        polyaccel.init_distributed()
        code = train(args)
        comm.destroy_process_group()
        return code
    except PolyaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=SHAPES, help="the model (default: mini, 3.3 M parameters)")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps (default: 650)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the initial parameters (default: 1)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="default: fp32 on a CPU, else bf16")
    parser.add_argument("--config", metavar="FILE", help="the JSON config (default: config.json next to this file)")
    parser.add_argument("--run-dir", default="runs/gpt", metavar="DIR", help="default: runs/gpt, or runs/gpt-2, ...")
    parser.add_argument("--resume", action="store_true", help="continue the run that was written last")
    parser.add_argument("--until", type=int, metavar="N", help="stop after step N, ready for --resume")
    parser.add_argument("--save-every", type=int, default=350, metavar="N", help="steps between checkpoints")
    parser.add_argument("--eval-every", type=int, default=50, metavar="N", help="steps between validations")
    parser.add_argument("--eval-windows", type=int, default=96, metavar="N", help="sequences of a validation")
    return parser.parse_args()


def train(args: argparse.Namespace) -> int:
    """The whole run, or as much of it as there is time for. Returns the exit code. Collective."""
    given = {name: getattr(args, name) for name in ("size", "steps", "seed", "precision")}
    is_cpu = polyaccel.get_accelerator().name == "cpu"
    usual = {"size": "mini", "steps": 650, "seed": 1, "precision": "fp32" if is_cpu else "bf16"}
    folder, run = polyaccel.begin_run(args.run_dir, given, defaults=usual, resume=args.resume)
    corpus, shape = open_corpus(), SHAPES[run["size"]]
    torch.manual_seed(run["seed"])
    model = Gpt(shape)
    engine, *_ = polyaccel.initialize(
        model=model, training_data=Windows(corpus.training, shape.context), config=config_of(args, run, folder)
    )
    if args.resume and engine.load_checkpoint(f"{folder}/checkpoint")[1]["corpus"] != corpus.digest:
        raise PolyaccelError("the library is not the run's", hint="resume with the Python that started the run")
    validation = Windows(corpus.validation, shape.context)
    last, stop, stopped_by = min(run["steps"], args.until or run["steps"]), polyaccel.StopRequest(), 0
    with polyaccel.open_progress(run["steps"], engine.global_steps) as progress:
        shared = f"{run['precision']}, {engine.train_batch_size()} samples a step on {comm.get_world_size()} ranks"
        progress.say(f"{folder}: {run['size']} GPT, {model.numel / 1e6:.1f} M parameters, {shared}")
        while engine.global_steps < last and not stopped_by:
            engine.train_batch()
            assert engine.metrics is not None  # after an optimizer step
            progress.step(engine.metrics)
            step, stopped_by = engine.global_steps, stop.agreed()
            if step % args.eval_every == 0 or step == last:
                progress.say(f"step {step}: validation loss {evaluate(engine, validation, args.eval_windows):.4f}")
            if step % args.save_every == 0 or step == last or stopped_by:
                engine.save_checkpoint(f"{folder}/checkpoint", client_state={"corpus": corpus.digest})
        if engine.global_steps < run["steps"]:
            by = f" by {signal.Signals(stopped_by).name}" if stopped_by else ""
            where = f"at step {engine.global_steps} of {run['steps']}; checkpoint: {folder}/checkpoint"
            progress.say(f"stopped{by} {where}; --resume continues")
        else:
            text = sample(engine, folder, shape.context)
            progress.say(f"--- sample ---\n{text}\n--------------\nreport: {folder}/report.html")
    engine.destroy()  # writes the report
    return 128 + stopped_by if stopped_by else 0


def config_of(args: argparse.Namespace, run: dict[str, Any], folder: str) -> dict[str, Any]:
    """The config with the settings of the run in place of each "auto", and a batch that the ranks can share."""
    config: dict[str, Any] = json.loads(Path(args.config or Path(__file__).with_name("config.json")).read_text())
    if not args.config:
        config["train_batch_size"] += -config["train_batch_size"] % comm.get_world_size()  # as many on each rank
    schedule = config.get("scheduler", {}).get("params", {})
    if schedule.get("total_num_steps") == "auto":
        schedule |= {"total_num_steps": run["steps"], "warmup_num_steps": max(2, run["steps"] // 20)}
    if config.get("bf16", {}).get("enabled") == "auto":
        config["bf16"]["enabled"] = run["precision"] == "bf16"
    return {**config, "run_dir": folder}


def evaluate(engine: TorchEngine, windows: Windows, count: int) -> float:
    """The mean loss over all ranks' windows, which is also on the run's page. Collective."""
    share = windows.share(count, comm.get_rank(), comm.get_world_size())
    loader = DataLoader(Subset(windows, share), batch_size=engine.train_micro_batch_size_per_gpu())
    losses = [engine.eval_batch(iter([batch])) * len(batch[0]) for batch in loader]
    mean = torch.stack(losses).sum(dim=0, keepdim=True) / len(share)
    comm.all_reduce(mean, op=comm.ReduceOp.AVG)
    engine.monitor.write_events([("validation_loss", float(mean), engine.global_steps)])
    return float(mean)


def sample(engine: TorchEngine, folder: str, context: int) -> str:
    """Generate text, and keep it in the run's folder. Every rank does, for where parameters are sharded. Collective."""
    engine.eval()
    drawn = generate(engine, _PROMPT, _SAMPLE_NBYTES, context=context, device=engine.device)
    text = (_PROMPT + bytes(drawn)).decode(errors="replace").replace("\0", "\n")
    text = "\n".join(line.rstrip() for line in text.splitlines())
    if comm.get_rank() == 0:
        Path(folder, "sample.txt").write_text(text + "\n", encoding="utf-8")
    return text


if __name__ == "__main__":
    sys.exit(main())
