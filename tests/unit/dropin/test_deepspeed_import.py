"""Checkpoints that a real DeepSpeed 0.19.8 wrote load here, and training goes on with DeepSpeed's own next losses.

`tests/golden/deepspeed` was made by `make_checkpoints.py` there, in an environment with DeepSpeed: two ranks on the
CPU, after four of eight steps.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from polyaccel_deepspeed.importing import read
from torch import nn

import polyaccel
from polyaccel.checkpoint import open_checkpoint
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError
from polyaccel.exchange.importing import imported
from polyaccel.testkit.ranks.threads import run_threads

GOLDEN = Path(__file__).parents[2] / "golden" / "deepspeed"
SAVED = ("zero1", "zero2", "zero3", "universal")
TOLD = json.loads((GOLDEN / "steps.json").read_text())
TRAINED = ("embed.weight", "up.weight", "down.weight", "up.bias", "norm.weight", "norm.bias", "down.bias")


class Net(nn.Module):
    """The model of `make_checkpoints.py`: a tied weight, a buffer, a frozen layer, two optimizer groups."""

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
        h = h + self.down(self.norm(torch.relu(self.up(h)))) * self.scale + self.frozen(h)
        return nn.functional.cross_entropy(self.head(h).float().flatten(0, 1), y.flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim <= 1], "weight_decay": 0.0},
    ]


def batch(step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(100 + step))
    return tokens[rows], ((tokens * 3 + 1) % 16)[rows]


def go_on(communicator: Communicator, place: str, stage: int, steps: range) -> list[float]:
    torch.manual_seed(9)
    model = Net()
    config = {**TOLD["config"], "zero_optimization": {"stage": stage}}
    if communicator.world_size == 1:
        config["train_micro_batch_size_per_gpu"] = 4
    params = {key: value for key, value in config["optimizer"]["params"].items() if key != "torch_adam"}
    config["optimizer"] = {"type": "AdamW", "params": params}
    engine, *_ = polyaccel.initialize(model=model, model_parameters=groups(model), config=config)
    _path, client_state = engine.load_checkpoint(place)
    assert client_state == {"epoch": 3}
    assert engine.global_steps == 4
    width = 4 // communicator.world_size
    rows = slice(width * communicator.rank, width * (communicator.rank + 1))
    losses = []
    for step in steps:
        loss = engine(*batch(step, rows))
        engine.backward(loss)
        engine.step()
        losses.append(sum(communicator.all_gather_object(loss.item())) / communicator.world_size)
    return losses


@pytest.fixture(scope="module", params=SAVED)
def taken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Each of DeepSpeed's checkpoints, and ours of it."""
    out = tmp_path_factory.mktemp(request.param)
    imported(read(GOLDEN / request.param), str(out), "imported", request.param, lambda nbytes: None)
    return request.param, out


@pytest.mark.parametrize(("ranks", "stage"), [(2, 1), (2, 3), (1, 2)])
def test_training_goes_on_with_the_losses_of_deepspeed(taken: tuple[str, Path], ranks: int, stage: int) -> None:
    losses = run_threads(ranks, go_on, str(taken[1]), stage, range(4, 8))[0]
    assert losses == pytest.approx(TOLD["losses"][4:], rel=2e-6)


def test_what_is_imported_is_the_whole_run(taken: tuple[str, Path]) -> None:
    reader = open_checkpoint(taken[1])
    kinds: dict[str, set[str]] = {}
    for entry in reader.tensors():
        kinds.setdefault(entry.fqn, set()).add(entry.kind)
    assert kinds == {
        **{key: {"param", "exp_avg", "exp_avg_sq"} for key in TRAINED},
        "frozen.weight": {"param"},
        "frozen.bias": {"param"},
        "scale": {"buffer"},
    }
    scalars = reader.scalars
    assert scalars["param_steps"] == dict.fromkeys(TRAINED, 4)
    assert scalars["counters"]["global_samples"] == 16
    assert scalars["lr_scheduler"] == {"last_batch_iteration": 3}
    assert [group["weight_decay"] for group in scalars["optimizer"]["param_groups"]] == [0.1, 0.0]


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize(
    "name", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"], ids=["model", "optimizer"]
)
def test_another_class_is_refused_by_name_and_nothing_runs(name: str, tmp_path: Path) -> None:
    copy, ran = tmp_path / "copy", tmp_path / "ran"
    shutil.copytree(GOLDEN / "zero1", copy)
    torch.save({"module": {}, "evil": Evil(ran)}, copy / "global_step4" / name)
    with pytest.raises(CheckpointError, match=rf"{name} is refused: it names posix\.system") as caught:
        read(copy)
    assert caught.value.cure
    assert not ran.exists()


def cut_off(copy: Path) -> str:
    (copy / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    return r"has \d+ of \d+ elements of '[\w.]+' \(param\)"


def truncated(copy: Path) -> str:
    file = copy / "global_step4" / "mp_rank_00_model_states.pt"
    file.write_bytes(file.read_bytes()[:1000])
    return "mp_rank_00_model_states.pt is refused"


def without_states(copy: Path) -> str:
    for file in copy.glob("*/*optim_states.pt"):
        file.unlink()
    return "ZeRO was off"


def tensor_parallel(copy: Path) -> str:
    (copy / "global_step4" / "mp_rank_01_model_states.pt").write_bytes(b"")
    return "tensor or pipeline parallel"


def out_of_the_folder(copy: Path) -> str:
    (copy / "latest").write_text("../elsewhere")
    return "no folder there"


def empty(copy: Path) -> str:
    shutil.rmtree(copy / "global_step4")
    (copy / "latest").unlink()
    return "is no checkpoint of DeepSpeed"


@pytest.mark.parametrize(
    "damage", [cut_off, truncated, without_states, tensor_parallel, out_of_the_folder, empty], ids=lambda f: f.__name__
)
def test_what_cannot_be_imported_is_said(damage: Any, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "zero1", tmp_path / "copy")
    with pytest.raises(CheckpointError, match=damage(tmp_path / "copy")):
        read(tmp_path / "copy")
