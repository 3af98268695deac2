"""What wrote the checkpoints beside this file, in an environment of its own with a real DeepSpeed on the CPU:

    pip install torch==2.13.0 deepspeed==0.19.8      (with DS_BUILD_OPS=0)
    for stage in 1 2 3: DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 make_checkpoints.py $stage zero$stage
    DS_ACCELERATOR=cpu python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state \
        --input_folder zero1/global_step4 --output_folder universal/global_step4

Two ranks train eight steps and save after four. `steps.json` has the config and the mean losses of all eight, which
are those of every stage to the last digit.
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
        h = h + self.down(self.norm(torch.relu(self.up(h)))) * self.scale + self.frozen(h)
        return nn.functional.cross_entropy(self.head(h).float().flatten(0, 1), y.flatten())


def main():
    stage, out = int(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(0)
    model = Net()
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim <= 1], "weight_decay": 0.0},
    ]
    warmup = {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 6, "warmup_type": "linear"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "torch_adam": True},
        },
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_optimization": {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    rows = slice(2 * engine.global_rank, 2 * engine.global_rank + 2)
    losses = []
    for step in range(8):
        if step == 4:
            engine.save_checkpoint(str(out), client_state={"epoch": 3})
        tokens = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(100 + step))
        loss = engine(tokens[rows], ((tokens * 3 + 1) % 16)[rows])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / 2)
    if engine.global_rank == 0:
        Path("steps.json").write_text(json.dumps({"config": config, "losses": losses}))


if __name__ == "__main__":
    main()
