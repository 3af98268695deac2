"""Train a small Llama of transformers on sequences of 16,384 bytes, each of which all ranks share.

polyaccel run --ranks 2 examples/long_context/train.py
polyaccel run --ranks 2 examples/long_context/train.py --method ring --length 32768
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import polyaccel
from polyaccel import PolyaccelError, comm

BYTES = 256


class Documents(Dataset[dict[str, Tensor]]):
    """Windows of `length` bytes of the sources of Python's standard library, side by side."""

    def __init__(self, length: int, windows: int) -> None:
        text = bytearray()
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += file.read_bytes()
            if len(text) >= length * windows:
                break
        self._windows = torch.frombuffer(text, dtype=torch.uint8)[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self._windows[index].long()
        return {"input_ids": window, "labels": window}


def main() -> int:
    args = parse_arguments()
    try:
        train(args)
    except PolyaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    comm.destroy_process_group()
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--length", type=int, default=16_384, metavar="N", help="tokens (default: 16384)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps (default: 5)")
    parser.add_argument("--method", choices=["ulysses", "ring"], default="ulysses", help="default: ulysses")
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    """Train, and print the loss of each step. Collective."""
    comm.init_distributed()
    config: dict[str, Any] = json.loads(Path(__file__).with_name("config.json").read_text())
    config |= {"sequence_parallel_size": comm.get_world_size(), "sequence_parallel": {"method": args.method}}
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": BYTES}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": args.length}
    engine, *_ = polyaccel.initialize(
        model=LlamaForCausalLM(LlamaConfig(**sizes)),
        training_data=Documents(args.length, args.steps),
        config=config,
    )
    for step in range(1, args.steps + 1):
        began = perf_counter()
        loss = float(engine.train_batch())
        if comm.get_rank() == 0:
            ranks, seconds = comm.get_world_size(), perf_counter() - began
            print(f"step {step}: loss {loss:.5f}, {args.length} tokens on {ranks} ranks, {seconds:.1f} s", flush=True)
    engine.destroy()


if __name__ == "__main__":
    sys.exit(main())
