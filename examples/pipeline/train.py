"""Train a small Llama of transformers over the stages of a pipeline, and see when each stage did what.

    polyaccel run --ranks 2 examples/pipeline/train.py
    polyaccel run --ranks 4 examples/pipeline/train.py --stages 2 --schedule zb-v

The model is the library's own, unchanged. The report is runs/pipeline/report.html.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from stages import measured_step, promised_step, write_report
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import polyaccel
from polyaccel import PolyaccelError, comm
from polyaccel.pipeline.select import select_schedule

BYTES = 256


def main() -> int:
    args = parse_arguments()
    try:
        comm.init_distributed()
        train(args)
    except PolyaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    comm.destroy_process_group()
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stages", type=int, metavar="N", help="of the pipeline (default: as many as there are ranks)")
    parser.add_argument("--schedule", default="1f1b", help="a published one, or a CSV file (default: 1f1b)")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="blocks of the model (default: 8)")
    parser.add_argument("--length", type=int, default=256, metavar="N", help="bytes of a window (default: 256)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer steps (default: 20)")
    parser.add_argument("--report", type=Path, default=Path("runs/pipeline/report.html"), metavar="FILE")
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    """Train, print the loss of each step, and write the report where there are stages. Collective."""
    stages = args.stages or comm.get_world_size()
    config: dict[str, Any] = json.loads(Path(__file__).with_name("config.json").read_text())
    config["pipeline"] |= {"stages": stages, "schedule": args.schedule}
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": BYTES}
    sizes |= {"num_hidden_layers": args.layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=args.length))
    engine: Any
    engine, *_ = polyaccel.initialize(model=model, config=config)
    windows = Windows(args.length, engine)
    losses, seconds = [], []
    for step in range(1, args.steps + 1):
        began = perf_counter()
        losses.append(float(engine.train_batch(windows)))
        seconds.append(perf_counter() - began)
        if comm.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.5f}, {seconds[-1]:.2f} s", flush=True)
    if stages > 1:
        table = select_schedule(args.schedule, stages, engine.gradient_accumulation_steps())
        measured = measured_step(engine, table)
        if measured is not None:
            promised = promised_step(measured, table)
            write_report(args.report, losses, seconds, measured, promised)
            print(
                f"last step: {measured.makespan:.0f} ms from the first task to the last, "
                f"{promised.makespan:.0f} ms by the table; report: {args.report}"
            )
    engine.destroy()


class Windows:
    """Micro-batches of windows of Python's standard library, for ever; other ones on each data rank."""

    def __init__(self, length: int, engine: Any) -> None:
        text = bytearray()
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]:
            text += file.read_bytes()
        self._windows = torch.frombuffer(text, dtype=torch.uint8)[: len(text) // length * length].view(-1, length)
        self._size = engine.train_micro_batch_size_per_gpu()
        self._place = engine.mesh.coordinates(comm.get_rank())["data"]
        self._numbers = count()

    def __iter__(self) -> Windows:
        return self

    def __next__(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 * next(self._numbers) + self._place)
        chosen = torch.randint(len(self._windows), (self._size,), generator=generator)
        words = self._windows[chosen].long()
        return {"input_ids": words, "labels": words}


if __name__ == "__main__":
    sys.exit(main())
