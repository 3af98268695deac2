"""One rank of `python -m bench longest`: two steps of a small Llama on sequences of one length, and the peak of this
process's memory.

Usage: longest_worker.py RESULT WAY LENGTH.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import polyaccel

STEPS = 2
WORDS = 32_000
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3},
}
_SEQUENCE = {"sequence_parallel_size": 2, "sequence_parallel": {"method": "ulysses"}}
_RECOMPUTED = {"activation_checkpointing": {"enabled": True}}
OURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": _RECOMPUTED,
    "sequence": _SEQUENCE,
    "sequence-recomputed": _SEQUENCE | _RECOMPUTED,
    "tiles": _SEQUENCE | _RECOMPUTED | {"tiled_compute": {"enabled": True}},
}
"""What the config has beside `CONFIG`, by way."""


def main(result: str, way: str, length: int) -> None:
    """Train, and write what the ranks needed to the file `result`."""
    losses, seconds = _train(way, length)
    found = {"peak": _peak_nbytes(), "loss": losses[-1], "seconds": seconds}
    Path(f"{result}.{os.environ['RANK']}").write_text(json.dumps(found))


def _model(length: int) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "vocab_size": WORDS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": length}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.train()
    return model


def _ids(length: int) -> Tensor:
    return torch.randint(WORDS, (1, length), generator=torch.Generator().manual_seed(2))


def _train(way: str, length: int) -> tuple[list[float], float]:
    polyaccel.init_distributed()
    engine, *_ = polyaccel.initialize(model=_model(length), config=CONFIG | OURS[way])
    ids, losses, seconds = _ids(length), [], 0.0
    for _ in range(STEPS):
        began = perf_counter()
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        seconds = perf_counter() - began
    engine.destroy()
    return losses, seconds


def _peak_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
