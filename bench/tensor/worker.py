"""What every rank does: `python -m bench.tensor.worker VARIANT STEPS RESULT` under `polyaccel run`.

A Llama of 16 million parameters from transformers, AdamW, float32, the same batch at each step. Rank 0 writes the
seconds of each forward and backward pass, which is where the variants differ, the losses, and the bytes that autograd
keeps of a forward pass beside parameters, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, logging

import polyaccel
from polyaccel import comm
from polyaccel.torch.activation_checkpointing.measuring import SavedMemory

LAYERS, WORDS = 4, 4096
WARMUP = 3
RANKS = 2
LR = 1e-4
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
}


def main(argv: list[str]) -> None:
    variant, steps, result = argv[0], int(argv[1]), Path(argv[2])
    torch.set_num_threads(RANKS if variant == "one rank" else 1)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=512, intermediate_size=1408, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    if variant in ("polyaccel", "tokens shared"):
        tensor = {"autotp_size": RANKS, "sequence_sharded": variant == "tokens shared"}
        model, *_ = polyaccel.initialize(model=model, config=CONFIG | {"tensor_parallel": tensor})
        run_backward, update = model.backward, model.step
    else:
        if variant == "DTensor":
            comm.init_distributed()
            share_by_torch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, foreach=False)
        run_backward, update = Tensor.backward, lambda: (optimizer.step(), optimizer.zero_grad())
    words = torch.randint(0, WORDS, (2, 256), generator=torch.Generator().manual_seed(1))
    seconds, losses = [], []
    for _ in range(WARMUP + steps):
        began = perf_counter()
        loss = model(input_ids=words, labels=words).loss
        run_backward(loss)
        seconds.append(perf_counter() - began)
        update()
        losses.append(loss.item())
    kept: dict[Any, int] = {}
    with SavedMemory([*model.parameters(), *model.buffers()]).counting(lambda: kept):
        model(input_ids=words, labels=words)
    if variant == "one rank" or comm.get_rank() == 0:
        figures = {"seconds": seconds[WARMUP:], "losses": losses, "kept_nbytes": sum(kept.values())}
        result.write_text(json.dumps(figures))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def share_by_torch(model: nn.Module) -> None:
    """torch's parallelize_module: the same layers, cut in the same way."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in range(LAYERS):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{layer}.{name}"] = RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)


if __name__ == "__main__":
    main(sys.argv[1:])
