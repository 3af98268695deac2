"""The run of `tests/golden/deepspeed/make_checkpoints.py` in polyaccel, and exports of its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from parity_models import drawn_from
from polyaccel_deepspeed.exchange.exporting import write
from polyaccel_deepspeed.exchange.importing import read
from torch import nn

import polyaccel
from polyaccel.checkpoint import open_checkpoint
from polyaccel.checkpoint.convert.exporting import chosen
from polyaccel.checkpoint.convert.importing import imported
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads

GOLDEN = Path(__file__).parents[1] / "golden" / "deepspeed"
TOLD = json.loads((GOLDEN / "steps.json").read_text())
"""By the name of a variant: DeepSpeed's number of ranks, its config and its losses."""
TOLD["universal"] = TOLD["zero1"]
SAMPLES = 6


class Net(nn.Module):
    """A tied weight, a buffer, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.up = nn.Linear(12, 20)
        self.norm = nn.LayerNorm(20)
        self.register_buffer("scale", torch.zeros(1))
        self.down = nn.Linear(20, 12)
        self.head = nn.Linear(12, 16, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(12, 12).requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = h + self.down(self.norm(torch.relu(self.up(h)))) * self.scale.to(h.dtype) + self.frozen(h)
        return nn.functional.cross_entropy(self.head(h).float().flatten(0, 1), y.flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two optimizer groups: of matrices, and of the rest."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim <= 1], "weight_decay": 0.0},
    ]


def batch(step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of a step, for all ranks the same."""
    tokens = torch.randint(0, 16, (SAMPLES, 8), generator=torch.Generator().manual_seed(100 + step))
    return tokens[rows], ((tokens * 3 + 1) % 16)[rows]


def decaying(optimizer: Any) -> torch.optim.lr_scheduler.LambdaLR:
    """A client's schedule."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def engine_of(
    communicator: Communicator,
    name: str,
    stage: int,
    *,
    seed: int = 9,
    one_group: bool = False,
    decays: bool = False,
) -> Any:
    """An engine with the config of a variant, for other weights than its own, which `seed` 0 makes. With `decays` its
    schedule is a client's."""
    with drawn_from(seed):
        model = Net()
    if seed == 0:
        model.get_buffer("scale").fill_(0.5)
    params_of = groups(model)
    if one_group:
        params_of = [{"params": [param for group in params_of for param in group["params"]], "weight_decay": 0.1}]
    config = {**TOLD[name]["config"], "zero_optimization": {"stage": stage}}
    config.pop("zero_force_ds_cpu_optimizer", None)
    config["train_micro_batch_size_per_gpu"] = SAMPLES // communicator.world_size
    params = {key: value for key, value in config["optimizer"]["params"].items() if key != "torch_adam"}
    config["optimizer"] = {"type": "AdamW", "params": params}
    schedule = None
    if decays:
        del config["scheduler"]
        schedule = decaying
    return polyaccel.initialize(model=model, model_parameters=params_of, lr_scheduler=schedule, config=config)[0]


def steps(communicator: Communicator, engine: Any, numbers: range) -> list[float]:
    """The mean losses of these steps."""
    width = SAMPLES // communicator.world_size
    rows = slice(width * communicator.rank, width * (communicator.rank + 1))
    losses = []
    for step in numbers:
        loss = engine(*batch(step, rows))
        engine.backward(loss)
        engine.step()
        losses.append(sum(communicator.all_gather_object(loss.item())) / communicator.world_size)
    return losses


def go_on(communicator: Communicator, name: str, place: str, stage: int, numbers: range) -> list[float]:
    """The losses of a run that goes on from DeepSpeed's checkpoint, which was imported to `place`."""
    engine = engine_of(communicator, name, stage)
    _path, client_state = engine.load_checkpoint(place)
    assert client_state == {"epoch": 3}
    assert engine.global_steps == 4
    return steps(communicator, engine, numbers)


def taken_over(name: str, folder: Path) -> Path:
    """DeepSpeed's checkpoint as one of ours, in `folder`."""
    imported(read(GOLDEN / name), str(folder), "imported", name, lambda nbytes: None)
    return folder


def exported(name: str, folder: Path, *kinds: str, one_group: bool = False, decays: bool = False) -> tuple[Path, int]:
    """A checkpoint that our own engine saved after it went on from DeepSpeed's (with `one_group` for all parameters, or
    a client's schedule: after it ran from the start), as a universal one of these `kinds` of tensors; and the steps
    that were skipped."""
    starts = one_group or decays

    def save(communicator: Communicator) -> int:
        engine = engine_of(communicator, name, 2, seed=0 if starts else 9, one_group=one_group, decays=decays)
        if starts:
            steps(communicator, engine, range(4))
        else:
            engine.load_checkpoint(str(folder / "imported"))
        engine.save_checkpoint(str(folder / "ours"), client_state={"epoch": 3})
        skipped: int = engine.skipped_steps
        return skipped

    taken_over(name, folder / "imported")
    skipped = run_threads(TOLD[name]["ranks"], save)[0]
    reader = open_checkpoint(folder / "ours")
    wanted = kinds or sorted({tensor.kind for tensor in reader.tensors()})
    tensors = tuple(tensor for kind in wanted for tensor in chosen(reader, [kind], None))
    (folder / "out").mkdir()
    assert write(folder / "out", reader, tensors, lambda nbytes: None) == ["global_step4", "latest_universal"]
    return folder / "out", skipped


def next_losses(
    name: str, folder: Path, ranks: int, *, one_group: bool = False, decays: bool = False
) -> tuple[list[float], float]:
    """Our own losses from the same checkpoint on, and its loss scale."""

    def work(communicator: Communicator) -> tuple[list[float], float]:
        engine = engine_of(communicator, name, 2, one_group=one_group, decays=decays)
        engine.load_checkpoint(str(folder / "ours"))
        scale: float = engine.loss_scaler.loss_scale
        return steps(communicator, engine, range(4, 8)), scale

    found: tuple[list[float], float] = run_threads(ranks, work)[0]
    return found
