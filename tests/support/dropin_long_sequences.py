"""A script as people write them for DeepSpeed's long sequences: attention is registered, a loader adapted, and losses
are weighed by tokens. It is run by the command `deepspeed`; rank 0 writes its losses to `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.sequence.layer import DistributedAttention
from hf_models import VOCABULARY, tiny
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

RANKS, BATCHES, LENGTH = 2, 2, 19
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3},
}


def batches(rank: int) -> list[dict[str, Tensor]]:
    """What the loader of a rank gives: two packed documents, and labels of which one batch has few."""
    found = []
    for number in range(BATCHES):
        generator = torch.Generator().manual_seed(10 * rank + number)
        ids = torch.randint(3, VOCABULARY, (1, LENGTH), generator=generator)
        positions = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)])[None]
        labels = ids.clone()
        if number:
            labels[:, 4:] = -100
        found.append({"input_ids": ids, "position_ids": positions, "labels": labels})
    return found


def plain_losses() -> list[float]:
    """Those of plain torch on every rank's batches in turn."""
    model = tiny("llama", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for number in range(BATCHES):
        for rank in range(RANKS):
            loss = model(**batches(rank)[number], use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def weighed(engine: Any, batch: dict[str, Tensor], group: Any) -> Tensor:
    """The mean over all tokens of a sequence, as DeepSpeed's guide computes it."""
    targets = batch.pop("shift_labels")
    logits = engine(**batch, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    losses = torch.distributed.nn.functional.all_gather(loss, group=group)
    counts = [torch.zeros((), dtype=torch.int64) for _ in losses]
    torch.distributed.all_gather(counts, (targets != -100).sum(), group=group)
    return sum(losses) / sum(counts)


def check_attention(group: Any) -> None:
    """DeepSpeed's layer over torch's group: (rows, tokens, heads, width)."""
    rank = torch.distributed.get_rank(group)
    whole = torch.randn(3, 2, 8, 3, 4, generator=torch.Generator().manual_seed(1))

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)), is_causal=True).transpose(1, 2)

    layer = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)
    out = layer(*(one[:, 4 * rank : 4 * rank + 4] for one in whole), 0)
    torch.testing.assert_close(out, local(*whole)[:, 4 * rank : 4 * rank + 4])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    deepspeed.init_distributed("gloo")
    rank = int(os.environ["RANK"])
    mpu = UlyssesSPAttentionHF.register_with_transformers("any/model", "sdpa", RANKS, micro_batch_size=1)
    group = mpu.get_sequence_parallel_group()
    check_attention(group)
    model = tiny("llama", dtype=torch.float32).train()
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG, mpu=mpu, model_parameters=model.parameters())
    loader = UlyssesSPDataLoaderAdapter(
        batches(rank), sp_rank=rank, sp_group=group, sp_world_size=RANKS, device=engine.device
    )
    losses = []
    for batch in loader:
        loss = weighed(engine, batch, group)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if rank == 0:
        args.out.write_text(json.dumps({"losses": losses, "steps": len(loader)}))


if __name__ == "__main__":
    main()
