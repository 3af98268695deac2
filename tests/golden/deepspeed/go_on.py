"""A real DeepSpeed that goes on from a universal checkpoint: `go_on.py PLACE CONFIG OUT`, on every rank.

CONFIG is a file with `variant` (see `make_checkpoints.py`), `stage`, `steps` (from, to), whether states are wanted,
whether all parameters are in one group, and whether the schedule is a client's (`decays`);
OUT gets what it had after loading, and the mean losses of those steps.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from make_checkpoints import SAMPLES, VARIANTS, Net, config_of, groups_of


def main():
    place, settings = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    _, _, beside, of_zero = VARIANTS[settings["variant"]]
    deepspeed.init_distributed("gloo")
    ranks = torch.distributed.get_world_size()
    config = config_of(ranks, settings["stage"], beside, of_zero)
    config["checkpoint"] = {"load_universal": True}
    torch.manual_seed(0)  # DeepSpeed takes frozen parameters and buffers of no universal checkpoint: these are the same
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.fill_(3.0)
    groups = groups_of(model)
    if settings["one_group"]:
        groups = [{"params": [param for group in groups for param in group["params"]], "weight_decay": 0.1}]
    schedule = None
    if settings.get("decays"):
        del config["scheduler"]
        schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))  # noqa: E731
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, lr_scheduler=schedule, config=config)
    _, client_state = engine.load_checkpoint(place, load_optimizer_states=settings["states"])
    found = {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "lr": engine.get_lr(),
        "loss_scale": engine.optimizer.cur_scale,
        "weight_decay": [group["weight_decay"] for group in engine.optimizer.param_groups],
        "epoch": client_state["epoch"],
    }
    width = SAMPLES // ranks
    rows = slice(width * engine.global_rank, width * (engine.global_rank + 1))
    losses = []
    for step in range(*settings["steps"]):
        tokens = torch.randint(0, 16, (SAMPLES, 8), generator=torch.Generator().manual_seed(100 + step))
        loss = engine(tokens[rows], ((tokens * 3 + 1) % 16)[rows])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / ranks)
    if engine.global_rank == 0:
        Path(sys.argv[3]).write_text(json.dumps({**found, "losses": losses}))


if __name__ == "__main__":
    main()
