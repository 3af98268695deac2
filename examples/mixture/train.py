"""Train a mixture of experts and a dense model with as many active parameters on the same bytes, and compare them.

    polyaccel run --ranks 2 examples/mixture/train.py

The data and the dense model are those of examples/gpt. Ranks share the experts of each layer. The report is
runs/mixture/report.html.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from comparison import Training, write_report
from mixture_model import MixtureGpt, active_numel

import polyaccel
from polyaccel import PolyaccelError, TorchEngine, comm

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpt"))  # the dense model, and its data

from corpus import Corpus, Windows, open_corpus
from model import Gpt, Shape

SHAPES = {
    "tiny": Shape(layers=2, width=64, heads=2, context=64),
    "small": Shape(layers=4, width=128, heads=4, context=128),
}
"""What `--size` can name."""


def main() -> int:
    args = parse_arguments()
    try:
        comm.init_distributed()
        compare(args)
    except PolyaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    comm.destroy_process_group()
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=SHAPES, default="small", help="of the models (default: small)")
    parser.add_argument("--experts", type=int, default=8, metavar="N", help="of each layer (default: 8)")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="optimizer steps of each (default: 400)")
    parser.add_argument("--eval-every", type=int, default=100, metavar="N", help="steps between validations")
    parser.add_argument("--eval-windows", type=int, default=128, metavar="N", help="windows of a validation")
    parser.add_argument("--report", type=Path, default=Path("runs/mixture/report.html"), metavar="FILE")
    return parser.parse_args()


def compare(args: argparse.Namespace) -> None:
    """Train both, and write the report. Collective."""
    shape, corpus = SHAPES[args.size], open_corpus()
    config = json.loads(Path(__file__).with_name("config.json").read_text(encoding="utf-8"))
    config["scheduler"]["params"] |= {"total_num_steps": args.steps, "warmup_num_steps": max(1, args.steps // 20)}
    sharing = {"enabled": True, "autoep_size": min(comm.get_world_size(), args.experts), "log_load": True}
    torch.manual_seed(1)
    mixture = MixtureGpt(shape, args.experts)
    torch.manual_seed(1)
    trainings = [
        trained("dense", Gpt(shape), corpus, config, args),
        trained("mixture", mixture, corpus, {**config, "expert_parallel": sharing}, args),
    ]
    if comm.get_rank() == 0:
        dense, of_experts = (training.validation[-1][1] for training in trainings)
        write_report(args.report, trainings, args.experts)
        print(
            f"validation loss after {args.steps} steps: mixture {of_experts:.4f}, dense {dense:.4f}, "
            f"{dense - of_experts:.4f} more; report: {args.report}"
        )


def trained(name: str, model: Gpt, corpus: Corpus, config: dict[str, Any], args: argparse.Namespace) -> Training:
    """What came of `model`, on batches that are the same for every model. Collective."""
    numel, active = model.numel, active_numel(model)
    windows = Windows(corpus.training, model.shape.context)
    engine, *_ = polyaccel.initialize(model=model, training_data=windows, config=config)
    training = Training(name, numel, active)
    held_out = Windows(corpus.validation, model.shape.context)
    for step in range(1, args.steps + 1):
        engine.train_batch()
        metrics = engine.metrics
        assert metrics is not None  # after an optimizer step
        training.steps.append(metrics)
        if step % args.eval_every == 0 or step == args.steps:
            loss = validated(engine, held_out, args.eval_windows)
            training.validation.append((step, loss))
            if comm.get_rank() == 0:
                took = median(each.step_time_s or 0.0 for each in training.steps)
                print(f"{name}, step {step}: validation loss {loss:.4f}, {1e3 * took:.0f} ms a step", flush=True)
    engine.destroy()
    return training


def validated(engine: TorchEngine, windows: Windows, count: int) -> float:
    """The mean loss over `count` windows that are nobody's training data. Collective."""
    share = windows.share(count, comm.get_rank(), comm.get_world_size())
    size = engine.train_micro_batch_size_per_gpu()
    parts = [share[begin : begin + size] for begin in range(0, len(share), size)]
    total = torch.zeros(1, device=engine.device)
    for part in parts:
        tokens, targets = zip(*(windows[index] for index in part), strict=True)
        total += engine.eval_batch(iter([(torch.stack(tokens), torch.stack(targets))])) * len(part) / len(share)
    comm.all_reduce(total, op=comm.ReduceOp.AVG)
    return float(total)


if __name__ == "__main__":
    sys.exit(main())
