"""`zero_to_fp32`, the function and the command: types, several files with an index, trained weights alone."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from polyaccel_deepspeed.commands import zero_to_fp32
from polyaccel_deepspeed.engine.errors import deepspeeds_errors
from safetensors import safe_open
from torch import nn

from polyaccel.errors import CheckpointError

CONFIG = {"train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.frozen = nn.Linear(7, 33), nn.Linear(33, 5).requires_grad_(False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.wide(x)).square().mean()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor]]:
    """A checkpoint's folder, and its weights: in full precision those that are trained."""
    folder = tmp_path_factory.mktemp("saved")
    engine, *_ = deepspeed.initialize(model=Net(), config=CONFIG | {"zero_optimization": {"stage": 2}})
    engine.backward(engine(torch.ones(1, 7, dtype=torch.bfloat16)))
    engine.step()
    engine.save_checkpoint(str(folder))
    whole = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return str(folder), whole


def read(folder: Path, stem: str, suffix: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a folder's files, by their index where there is one, and the names of the files."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix == suffix)
    found: dict[str, torch.Tensor] = {}
    for name in names:
        if suffix == ".bin":
            found |= torch.load(folder / name, weights_only=True)
            continue
        with safe_open(folder / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}  # transformers refuses a file without it
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    index = folder / f"{stem}{suffix}.index.json"
    assert index.exists() == (len(names) > 1)
    if index.exists():
        assert json.loads(index.read_text())["weight_map"].keys() == found.keys()
    return found, names


@pytest.mark.parametrize(("size", "files"), [("5GB", 1), ("1KB", 2), (None, 1), (700, 3)])
@pytest.mark.parametrize(("stem", "suffix"), [("pytorch_model", ".bin"), ("model", ".safetensors")])
def test_files_are_as_large_as_they_may_be(
    size: Any, files: int, stem: str, suffix: str, saved: tuple[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    place, whole = saved
    convert_zero_checkpoint_to_fp32_state_dict(place, str(tmp_path / "out"), size, suffix == ".safetensors")
    found, names = read(tmp_path / "out", stem, suffix)
    assert names == ([f"{stem}{suffix}"] if files == 1 else [
        f"{stem}-{number:05d}-of-{files:05d}{suffix}" for number in range(1, files + 1)
    ])  # fmt: skip
    assert found.keys() == whole.keys()
    for name, value in found.items():
        assert value.dtype == (torch.float32 if name != "count" else torch.int64)
        assert torch.equal(value.to(whole[name].dtype), whole[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bf16", "torch.bfloat16", "half", "float"])
def test_types_have_all_of_deepspeeds_names(
    dtype: Any, saved: tuple[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    place, whole = saved
    convert_zero_checkpoint_to_state_dict(place, str(tmp_path / "one.ckpt"), dtype)
    found = torch.load(tmp_path / "one.ckpt", weights_only=True)
    wanted = {"half": torch.float16, "float": torch.float32}.get(str(dtype), torch.bfloat16)
    assert {value.dtype for name, value in found.items() if name != "count"} == {wanted}
    assert list(tmp_path.iterdir()) == [tmp_path / "one.ckpt"]
    assert found.keys() == whole.keys()


def test_trained_weights_are_there_alone(saved: tuple[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    place, whole = saved
    found = get_fp32_state_dict_from_zero_checkpoint(place, exclude_frozen_parameters=True)
    assert found.keys() == {"wide.weight", "wide.bias", "count"}
    given = [place, str(tmp_path), "--exclude_frozen_parameters", "--safe_serialization", "--max_shard_size", "500"]
    assert zero_to_fp32(given) == 0
    written, names = read(tmp_path, "model", ".safetensors")
    assert written.keys() == found.keys()
    assert len(names) == 2
    assert all(torch.equal(written[name], value) for name, value in found.items())
    loaded = load_state_dict_from_zero_checkpoint(Net(), place).state_dict()
    assert all(torch.equal(loaded[name].to(value.dtype), value) for name, value in whole.items())


@pytest.mark.parametrize(
    "wrong", [{"max_shard_size": "much"}, {"max_shard_size": "0GB"}, {"dtype": "int8"}, {"dtype": "f"}]
)
def test_what_cannot_be_is_refused_by_name(
    wrong: dict[str, Any], saved: tuple[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refused:
        convert_zero_checkpoint_to_state_dict(saved[0], str(tmp_path / "out"), **wrong)
    assert [refused.value.value] == [*wrong.values()]
    assert not (tmp_path / "out").exists()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def test_a_tied_weight_is_there_under_each_name(tmp_path: Path) -> None:
    engine, *_ = deepspeed.initialize(model=Tied(), config=CONFIG | {"zero_optimization": {"stage": 2}})
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "saved"))
    assert found["second.weight"] is found["first.weight"]
    convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path / "saved"), str(tmp_path / "whole"))
    written = torch.load(tmp_path / "whole" / "pytorch_model.bin", weights_only=True)
    assert written["second.weight"] is written["first.weight"]
    for state in (found, written):
        model = Tied()
        model.load_state_dict(state, strict=True)
        assert torch.equal(model.first.weight, found["first.weight"])
    convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path / "saved"), str(tmp_path / "safe"), safe_serialization=True)
    assert "second.weight" not in read(tmp_path / "safe", "model", ".safetensors")[0]


@pytest.mark.parametrize("folder", [None, ""])
def test_a_save_to_no_folder_is_refused(folder: Any) -> None:
    engine, *_ = deepspeed.initialize(model=Net(), config=CONFIG)
    with pytest.raises(ValueError) as caught:
        engine.save_checkpoint(folder)
    assert isinstance(caught.value, CheckpointError)
    engine.destroy()


def test_tags_of_several_ranks_are_refused_as_deepspeed_refuses_them() -> None:
    def refuse(value: object) -> None:
        with deepspeeds_errors("folder"):
            raise CheckpointError("tags", value=value)

    with pytest.raises(AssertionError) as caught:
        refuse(("a", "b"))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))
    with pytest.raises(CheckpointError) as other:
        refuse((0, 1))
    assert type(other.value) is CheckpointError


def test_a_folder_of_outputs_without_a_save_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events").write_text("1")
    (tmp_path / "zero_to_fp32.py").write_text("")
    engine, *_ = deepspeed.initialize(model=Net(), config=CONFIG)
    assert engine.load_checkpoint(str(tmp_path)) == (None, None)
    engine.save_checkpoint(str(tmp_path), tag="one")
    (tmp_path / "latest").unlink()
    assert engine.load_checkpoint(str(tmp_path))[0] is not None  # the newest whole one
    (tmp_path / "one" / "commit.json").unlink()
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(str(tmp_path))
    engine.destroy()
