"""Weights from a peer's file evaluate as they did there: the model says which of the tensors are buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp

import polyaccel
from polyaccel.checkpoint import open_checkpoint
from polyaccel.cli.main import main
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError
from polyaccel.testkit.ranks.threads import run_threads


class WithStatistics(nn.Module):
    """Buffers of every kind of type, a frozen layer, and a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.ones(6, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool))
        self.register_buffer("narrow", torch.ones((), dtype=torch.bfloat16))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.last = nn.Linear(6, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x)) * self.scale.float() * self.mask * self.narrow.float()
        return self.last(hidden)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(6, 2))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2)))


def unweighted() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False, momentum=None), nn.Linear(3, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm and others": WithStatistics,
    "convolution": convolution,
    "spectral norm": normalised,
    "without weights": unweighted,
}


def trained(build: Callable[[], nn.Module]) -> nn.Module:
    """A model whose buffers have moved away from where a new one has them."""
    torch.manual_seed(0)
    model = build()
    for _ in range(6):
        model(3.0 + 2.0 * torch.randn(16, 4))
    for name, buffer in model.named_buffers():
        if name in ("scale", "mask", "narrow"):
            buffer.fill_(0.5 if buffer.is_floating_point() else 1)
    model.eval()
    return model


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def written(model: nn.Module, kind: str, folder: Path) -> Path:
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if kind == "safetensors":
        save_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    if kind == "bin":
        torch.save(state, folder / "pytorch_model.bin")
        return folder / "pytorch_model.bin"
    dcp.save({"model": state}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("kind", ["safetensors", "bin", "dcp"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_buffers_evaluates_as_its_peer(name: str, kind: str, tmp_path: Path) -> None:
    build = MODELS[name]
    model = trained(build)
    x = torch.randn(5, 4)
    want = model(x).detach()
    assert main(["ckpt", "import", str(written(model, kind, tmp_path)), str(tmp_path / "c"), "--from", kind]) == 0
    index = [*MODELS].index(name)
    ranks, stage = [(1, 0), (2, 1), (3, 2), (2, 3)][(index + ["safetensors", "bin", "dcp"].index(kind)) % 4]

    def evaluate(communicator: Communicator) -> Any:
        torch.manual_seed(7)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage},
        }
        engine = polyaccel.initialize(model=build(), config=config)[0]
        engine.load_checkpoint(str(tmp_path / "c"), load_module_only=True)
        engine.eval()
        out = engine(x).detach()
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return out, state

    out, state = run_threads(ranks, evaluate)[0]
    assert torch.equal(out, want)
    assert all(torch.equal(value, state[each]) for each, value in model.state_dict().items())


def test_a_buffer_of_another_shape_is_refused(tmp_path: Path) -> None:
    state = {
        "weight": torch.ones(3),
        "bias": torch.ones(3),
        "running_mean": torch.ones(4),
        "running_var": torch.ones(3),
    }
    save_file(state, tmp_path / "model.safetensors")
    assert main(["ckpt", "import", str(tmp_path), str(tmp_path / "c"), "--from", "safetensors"]) == 0
    engine = polyaccel.initialize(model=nn.BatchNorm1d(3), config={"train_batch_size": 1})[0]
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(str(tmp_path / "c"), load_module_only=True)
    assert "running_mean" in str(caught.value)


def test_another_shape_is_refused_without_the_advice_to_be_lenient(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3, 5), "bias": torch.ones(3)}, tmp_path / "model.safetensors")
    assert main(["ckpt", "import", str(tmp_path), str(tmp_path / "c"), "--from", "safetensors"]) == 0
    engine = polyaccel.initialize(model=nn.Linear(4, 3), config={"train_batch_size": 1})[0]
    for strict in (True, False):
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path / "c"), load_module_only=True, load_module_strict=strict)
        assert "load_module_strict" not in (caught.value.hint or "")
        assert "weight" in str(caught.value)


def test_names_are_mapped_before_buffers_are_found(tmp_path: Path) -> None:
    model = trained(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    save_file({f"model.{name}": value for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    assert main(["ckpt", "import", str(tmp_path), str(tmp_path / "c"), "--from", "safetensors"]) == 0
    config = {"train_batch_size": 1}
    engine = polyaccel.initialize(model=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), config=config)[0]
    engine.load_checkpoint(str(tmp_path / "c"), load_module_only=True, name_map={r"^(\d)": r"model.\1"})
    state = engine.module_state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {entry.kind for entry in open_checkpoint(tmp_path / "c").tensors()} == {"param", "buffer"}
