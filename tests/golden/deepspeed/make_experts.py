"""What wrote `experts` beside this file, in the environment of `make_checkpoints.py`, with tests/support on the path:

    PYTHONPATH=../../support DS_ACCELERATOR=cpu torchrun --nproc-per-node 4 make_experts.py

Four ranks, of which neighbours share the experts of two layers of DeepSpeed's `MoE`, train eight steps at ZeRO 2 and
save after four. `experts.json` has each rank's losses of all eight.
"""

import json
import sys
from pathlib import Path

import deepspeed
import deepspeed.comm.torch
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from dropin_mixtures import batch, built

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
CASE, SIZES, STEPS = "top 1 in order of nothing dropped", (2, 2), 8
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
}


def main():
    deepspeed.init_distributed(dist_backend="gloo")
    model = built(CASE, SIZES)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": [*model.parameters()], "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=CONFIG)
    rank, losses = deepspeed.comm.get_rank(), []
    for step in range(STEPS):
        if step == STEPS // 2:
            engine.save_checkpoint("experts")
        loss, _ = engine(batch(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    every = [None] * deepspeed.comm.get_world_size()
    torch.distributed.all_gather_object(every, losses)
    if rank == 0:
        Path("experts.json").write_text(json.dumps(every) + "\n")


if __name__ == "__main__":
    main()
