"""What wrote the checkpoints `clients/*` beside this file, with a real DeepSpeed 0.19.8 on the CPU:

    for name in VARIANTS: DS_ACCELERATOR=cpu torchrun --nproc-per-node RANKS make_clients.py $name
    DS_ACCELERATOR=cpu python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state \
        --input_folder clients/adamw3/global_step4 --output_folder clients/universal3/global_step4

A client's optimizer and LambdaLR; four steps, a save, four more. `clients.json` has each variant's ranks and losses.
"""

import json
import sys
from pathlib import Path

import deepspeed
import deepspeed.comm.torch
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

SAMPLES = 6
TOLD = Path("clients.json")
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}
VARIANTS = {
    # name: (ranks, stage, optimizer)
    "adamw0": (1, 0, "AdamW"),
    "sgd0": (2, 0, "SGD"),
    "adamw1": (2, 1, "AdamW"),
    "amsgrad2": (2, 2, "amsgrad"),
    "radam2": (2, 2, "RAdam"),
    "nadam3": (2, 3, "NAdam"),
    "adamax2": (2, 2, "Adamax"),
    "rmsprop3": (2, 3, "RMSprop"),
    "sgd2": (2, 2, "SGD"),
    "adamw3": (2, 3, "AdamW"),
    "pipeline": (1, 1, "AdamW"),
}


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def groups_of(model):
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1]},
        {"params": [param for param in trained if param.ndim <= 1], "lr": 0.003},
    ]


def batch(step):
    generator = torch.Generator().manual_seed(50 + step)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 3, generator=generator)


def main():
    name = sys.argv[1]
    ranks, stage, kind = VARIANTS[name]
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Net()
    loss_of = nn.functional.mse_loss
    is_pipe = name.startswith("pipeline")
    if is_pipe:
        model = PipelineModule(list(model), num_stages=1, loss_fn=loss_of)
    optimizer = OPTIMIZERS[kind](groups_of(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // ranks,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    width = SAMPLES // ranks
    rows = slice(width * engine.global_rank, width * (engine.global_rank + 1))
    losses = []
    for step in range(8):
        if step == 4:
            engine.save_checkpoint(f"clients/{name}", client_state={"epoch": 3})
        x, y = batch(step)
        if is_pipe:
            loss = engine.train_batch(iter([(x[rows], y[rows])]))
        else:
            loss = loss_of(engine(x[rows]), y[rows])
            engine.backward(loss)
            engine.step()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / ranks)
    if engine.global_rank == 0:
        told = json.loads(TOLD.read_text()) if TOLD.exists() else {}
        told[name] = {"ranks": ranks, "stage": stage, "optimizer": kind, "losses": losses}
        TOLD.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
