"""A job for the tests: trains a small Llama or Mixtral of transformers under many settings, one after another, on this
rank's device.

Prints one JSON object on rank 0: the mean losses of the ranks and the norms of each setting.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

import polyaccel

STEPS, MICRO_BATCHES, LENGTH = 3, 2, 13


def build(*, has_experts: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if has_experts:
        experts = {"num_local_experts": 4, "experts_implementation": "eager"}
        return MixtralForCausalLM(MixtralConfig(**sizes, **heads, **ends, **experts)).train()
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends)).train()


def train(zero: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    has_experts = changes.pop("has_experts", False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.5,
        **changes,
        "zero_optimization": {"reduce_bucket_size": 3000, **zero},
    }
    engine, *_ = polyaccel.initialize(model=build(has_experts=has_experts), config=config)
    losses, norms = [], []
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(step)
        drawn = [torch.randint(3, 61, (2, LENGTH), generator=draws) for _ in range(MICRO_BATCHES)]
        batches = [{"input_ids": tokens, "labels": tokens, "use_cache": False} for tokens in drawn]
        mean = engine.train_batch(iter(batches))
        polyaccel.comm.all_reduce(mean)
        losses.append(mean.item() / polyaccel.comm.get_world_size())
        norms.append(engine.get_global_grad_norm())
    assert engine.device.type == polyaccel.get_accelerator().torch_device_type
    engine.destroy()
    return {"losses": losses, "norms": norms}


def main() -> None:
    found = {name: train(zero, changes) for name, (zero, changes) in json.loads(sys.argv[1]).items()}
    accelerator = polyaccel.get_accelerator()
    accelerator.synchronize()
    if polyaccel.comm.get_rank() == 0:
        print("RESULT", json.dumps({"device": accelerator.name, "runs": found}), flush=True)
    polyaccel.comm.destroy_process_group()


if __name__ == "__main__":
    main()
