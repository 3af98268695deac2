"""One rank of DeepSpeed's PipelineEngine on the model of `python -m bench pipeline`.

Usage, in an environment with DeepSpeed and no polyaccel, on two ranks that have RANK, WORLD_SIZE and MASTER_ADDR:
`-m bench.pipeline.deepspeed_worker SIZE MICRO_BATCHES STEPS RESULT`. Its optimizer is torch's: DeepSpeed's own is
compiled at the first start, which takes minutes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import distributed as dist

from bench.pipeline.layers import DECAY, HALVES, LR, RANKS, WARMUP, layers_of, loss_of, micro_batch, partition_of
from bench.steps.model import load_corpus


def main(size: str, micro_batches: int, steps: int, result: str) -> None:
    """Train, and write what this rank measured beside the file `result`, the last one its losses in it."""
    import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found,import-untyped,unused-ignore]

    torch.set_num_threads(1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "torch_adam": True}},
        "gradient_clipping": 0.0,  # it clips to a norm of 1 where this is left out
        "steps_per_print": 10**9,
    }
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    layers = layers_of(size.removesuffix(HALVES), halves=size.endswith(HALVES))
    module = PipelineModule(layers, num_stages=RANKS, loss_fn=loss_of, partition_method=partition_of(layers))
    parameters = [one for one in module.parameters() if one.requires_grad]
    engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=config)
    corpus = load_corpus()
    seconds, cpu, losses = [], [], []
    for step in range(WARMUP + steps):
        batches = [micro_batch(corpus, step, number) for number in range(micro_batches)]
        dist.barrier()
        began, cpu_began = perf_counter(), process_time()
        loss = engine.train_batch(iter(batches))
        seconds.append(perf_counter() - began)
        cpu.append(process_time() - cpu_began)
        losses.append(float(loss))
    Path(f"{result}.{rank}").write_text(json.dumps(cpu[WARMUP:]))
    if rank == RANKS - 1:
        parts = [int(part) for part in module.parts]
        Path(result).write_text(json.dumps({"seconds": seconds[WARMUP:], "losses": losses, "parts": parts}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # its process aborts or hangs where gloo is taken down


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
