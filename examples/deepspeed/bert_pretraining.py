"""Pre-train a BERT on masked tokens and on whether two sentences belong together, by DeepSpeed's API.

deepspeed --num_gpus 2 bert_pretraining.py --deepspeed_config bert_config.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

VOCABULARY, LENGTH, MASKED = 99, 32, 5
MASK = VOCABULARY - 1
WARMUP_STEPS, ALL_STEPS = 4, 100


class Bert(nn.Module):
    """An encoder whose output embedding is its input's, and a head over the first token."""

    def __init__(self, width: int = 48, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.segments = nn.Embedding(VOCABULARY, width), nn.Embedding(2, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.next_sentence = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, segments: Tensor, places: Tensor, targets: Tensor, follows: Tensor) -> Tensor:
        """The loss of the masked `places` (batch, MASKED), whose tokens are `targets`, plus that of `follows`."""
        hidden = self.encoder(self.tokens(tokens) + self.segments(segments) + self.positions)
        at = places.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        logits = functional.linear(hidden.gather(1, at), self.tokens.weight, self.bias)
        masked = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return masked + functional.cross_entropy(self.next_sentence(hidden[:, 0]), follows)


def build() -> Bert:
    torch.manual_seed(2)
    return Bert()


def draw_batch(step: int, rank: int, size: int) -> tuple[Tensor, ...]:
    """What a rank reads in a micro-batch: walks through the vocabulary, with MASKED tokens of each hidden."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(VOCABULARY - 1, (size, 1), generator=generator)
    follows = torch.randint(2, (size,), generator=generator)
    gap = torch.where(torch.arange(LENGTH) < LENGTH // 2, 0, 1) * (1 - follows[:, None]) * 31
    whole = (starts + 3 * torch.arange(LENGTH) + gap) % (VOCABULARY - 1)
    places = torch.rand(size, LENGTH, generator=generator).argsort(dim=1)[:, :MASKED]
    tokens = whole.scatter(1, places, MASK)
    segments = (torch.arange(LENGTH) >= LENGTH // 2).long().expand(size, -1)
    return tokens, segments, places, whole.gather(1, places), follows


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for biases and norms."""
    matrices = [one for one in model.parameters() if one.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.01},
        {"params": [one for one in model.parameters() if one.dim() < 2], "weight_decay": 0.0},
    ]


def schedule_of(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Up over WARMUP_STEPS, then down."""
    return LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, (ALL_STEPS - step) / (ALL_STEPS - WARMUP_STEPS))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--losses", type=Path, help="write the mean loss of every step there")
    args = deepspeed.add_config_arguments(parser).parse_args()

    deepspeed.init_distributed()
    model = build()
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-3)
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=model, optimizer=optimizer, lr_scheduler=schedule_of(optimizer)
    )
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    losses, accumulation = [], engine.gradient_accumulation_steps()
    for step in range(args.steps):
        total = torch.zeros(1, device=engine.device)
        for turn in range(accumulation):
            batch = draw_batch(step * accumulation + turn, rank, engine.train_micro_batch_size_per_gpu())
            loss = engine(*(each.to(engine.device) for each in batch))
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        deepspeed.comm.all_reduce(total)
        losses.append(total.item() / ranks / accumulation)
    if rank == 0:
        print(f"step {args.steps}: loss {losses[-1]:.4f}, learning rate {engine.get_lr()[0]:.2e}", flush=True)
        if args.losses:
            args.losses.write_text(json.dumps(losses), encoding="utf-8")
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main()
