"""A job for the tests: trains one small model under many settings, one after another, on this rank's device.

Prints one JSON object on rank 0: what each setting left behind.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import tempfile
from typing import Any

import torch
from torch import nn

import polyaccel

STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, 33), nn.Linear(33, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.narrow(torch.tanh(self.wide(self.norm(hidden))))


class Model(nn.Module):
    """Tied, frozen and unused parameters, sizes that divide by nothing."""

    def __init__(self, dropout: float, width: int = 10) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embed = nn.Embedding(17, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 17, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.frozen
        for block in self.blocks:
            hidden = self.dropout(block(hidden))
        return nn.functional.cross_entropy(self.head(hidden).float(), targets)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(100 * step + rank)
    tokens, targets = (torch.randint(0, 17, (6,), generator=draws) for _ in range(2))
    return tokens, targets


def train(zero: dict[str, Any], changes: dict[str, Any], dropout: float, *, resume: bool) -> dict[str, Any]:
    """Losses, norms and the digest of the final parameters; with `resume` the last step is another engine's, which
    continues from a checkpoint. The ranks' random numbers are apart once they have built the model."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.5,
        **changes,
        "zero_optimization": {"reduce_bucket_size": 128, **zero},
    }
    model = Model(dropout)
    torch.manual_seed(int(os.environ["RANK"]))
    parameters = list(model.parameters())  # the caller's own references stay good
    engine, *_ = polyaccel.initialize(model=model, model_parameters=parameters, config=config)
    rank, losses, norms = polyaccel.comm.groups.get_data_parallel_rank(), [], []
    folder = [tempfile.mkdtemp()]
    polyaccel.comm.broadcast_object_list(folder)
    for step in range(STEPS):
        if resume and step == STEPS - 1:
            engine.save_checkpoint(folder[0])
            engine.destroy()
            engine, *_ = polyaccel.initialize(model=Model(dropout), config=config)
            engine.load_checkpoint(folder[0])
        tokens, targets = (part.to(engine.device) for part in batch(step, rank))
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    state = engine.module_state_dict()
    bits = hashlib.sha256(b"".join(state[name].cpu().view(torch.uint8).numpy().tobytes() for name in sorted(state)))
    assert engine.device.type == polyaccel.get_accelerator().torch_device_type
    engine.destroy()
    del engine, model, parameters, state, tokens, targets, loss
    gc.collect()
    return {"losses": losses, "norms": norms, "bits": bits.hexdigest()}


def main() -> None:
    found = {}
    for name, (zero, changes, resume) in json.loads(sys.argv[1]).items():
        dropout = changes.pop("dropout", 0.0)
        found[name] = train(zero, changes, dropout, resume=resume)
    results = [None] * polyaccel.comm.get_world_size()
    polyaccel.comm.all_gather_object(results, {name: one["bits"] for name, one in found.items()})
    assert all(result == results[0] for result in results), "ranks ended with different parameters"
    accelerator = polyaccel.get_accelerator()
    accelerator.synchronize()
    if polyaccel.comm.get_rank() == 0:
        print("RESULT", json.dumps({"device": accelerator.name, "runs": found}), flush=True)
    polyaccel.comm.destroy_process_group()


if __name__ == "__main__":
    main()
