"""What wrote the checkpoints beside this file, in an environment of its own with a real DeepSpeed on the CPU:

    pip install torch==2.13.0 deepspeed==0.19.8      (with DS_BUILD_OPS=0)
    for name in VARIANTS: DS_ACCELERATOR=cpu torchrun --nproc-per-node RANKS make_checkpoints.py $name
    DS_ACCELERATOR=cpu python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state \
        --input_folder zero1/global_step4 --output_folder universal/global_step4

with the ranks of VARIANTS (`make_all.sh` is these lines). The ranks train eight steps and save after four. `steps.json`
has each variant's config, number of ranks and mean losses of all eight.
"""

import json
import sys
from pathlib import Path

import deepspeed
import deepspeed.comm.torch
import torch
from torch import nn

# It would be compiled; the collectives of gloo serve.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
# torch computes in it on any CPU; DeepSpeed asks for an instruction set that makes it fast.
type(deepspeed.get_accelerator()).is_fp16_supported = lambda self: True


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.up = nn.Linear(12, 20)
        self.norm = nn.LayerNorm(20)
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.down = nn.Linear(20, 12)
        self.head = nn.Linear(12, 16, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(12, 12).requires_grad_(False)

    def forward(self, x, y):
        h = self.embed(x)
        h = h + self.down(self.norm(torch.relu(self.up(h)))) * self.scale.to(h.dtype) + self.frozen(h)
        return nn.functional.cross_entropy(self.head(h).float().flatten(0, 1), y.flatten())


SAMPLES = 6
TOLD = Path("steps.json")
BF16, OFFLOAD = {"bf16": {"enabled": True}}, {"offload_optimizer": {"device": "cpu"}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 3, "hysteresis": 1}}
VARIANTS = {
    # name: (ranks, stage, the config beside, that of ZeRO beside)
    "zero1": (2, 1, {}, {}),
    "zero2": (2, 2, {}, {}),
    "zero3": (2, 3, {}, {}),
    "bf16": (3, 2, BF16, {}),
    "bf16-zero3": (2, 3, BF16, {}),
    "fp16": (2, 1, FP16, {}),
    "fp16-zero3": (2, 3, FP16, {}),
    "offload": (2, 2, {"zero_force_ds_cpu_optimizer": False}, OFFLOAD),
    "offload-zero3": (3, 3, {"zero_force_ds_cpu_optimizer": False}, OFFLOAD),
}


def groups_of(model):
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim <= 1], "weight_decay": 0.0},
    ]


def config_of(ranks, stage, beside, of_zero):
    warmup = {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 6, "warmup_type": "linear"}
    return {
        "train_micro_batch_size_per_gpu": SAMPLES // ranks,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "torch_adam": True},
        },
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 0,
            **of_zero,
        },
        **beside,
    }


def main():
    name = sys.argv[1]
    ranks, stage, beside, of_zero = VARIANTS[name]
    config = config_of(ranks, stage, beside, of_zero)
    torch.manual_seed(0)
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)
    width = config["train_micro_batch_size_per_gpu"]
    rows = slice(width * engine.global_rank, width * (engine.global_rank + 1))
    losses = []
    for step in range(8):
        if step == 4:
            engine.save_checkpoint(name, client_state={"epoch": 3})
        tokens = torch.randint(0, 16, (SAMPLES, 8), generator=torch.Generator().manual_seed(100 + step))
        loss = engine(tokens[rows], ((tokens * 3 + 1) % 16)[rows])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / engine.world_size)
    if engine.global_rank == 0:
        told = json.loads(TOLD.read_text()) if TOLD.exists() else {}
        told[name] = {"ranks": ranks, "config": config, "losses": losses}
        TOLD.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
