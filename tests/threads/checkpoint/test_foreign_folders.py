"""A checkpoint of another tool, where one of ours is asked for, is named with the command that imports it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

import polyaccel
from polyaccel.cli.main import main
from polyaccel.errors import CheckpointError

GOLDEN = Path(__file__).parents[2] / "golden"


def deepspeed(folder: Path) -> Path:
    shutil.copytree(GOLDEN / "deepspeed" / "zero2", folder / "run")
    return folder / "run"


def deepspeed_tag(folder: Path) -> Path:
    return next(path for path in deepspeed(folder).iterdir() if path.is_dir())


def universal(folder: Path) -> Path:
    shutil.copytree(GOLDEN / "deepspeed" / "universal", folder / "run")
    return folder / "run"


def of_dcp(folder: Path) -> Path:
    dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def hub(folder: Path) -> Path:
    (folder / "hub").mkdir()
    save_file({"a": torch.ones(2)}, folder / "hub" / "model.safetensors")
    return folder / "hub"


def hub_file(folder: Path) -> Path:
    return hub(folder) / "model.safetensors"


def named(*names: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for name in names:
            (folder / "x" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "x" / name).write_bytes(b"x")
        return folder / "x"

    return make


FOLDERS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "DeepSpeed": (deepspeed, "DeepSpeed", "--from deepspeed"),
    "tag of DeepSpeed": (deepspeed_tag, "DeepSpeed", "--from deepspeed"),
    "universal": (universal, "DeepSpeed", "--from deepspeed"),
    "dcp": (of_dcp, "torch.distributed.checkpoint", "--from dcp"),
    "dcp of FSDP": (named("pytorch_model_fsdp_0/.metadata"), "torch.distributed.checkpoint", "--from dcp"),
    "hub": (hub, "safetensors", "--from safetensors"),
    "file": (hub_file, "safetensors", "--from safetensors"),
    "bin": (named("pytorch_model.bin", "config.json"), "torch", "--from bin"),
    "Trainer": (
        named("model.safetensors", "optimizer.pt", "trainer_state.json"),
        "transformers' Trainer",
        "safetensors",
    ),
    "Accelerate": (named("pytorch_model.bin", "optimizer.bin", "random_states_0.pkl"), "Accelerate", "--from bin"),
    "Lightning": (named("epoch=1-step=4.ckpt"), "Lightning", "--from bin"),
    "orbax": (named("_METADATA", "manifest.ocdbt"), "orbax", "--from orbax"),
    "manager of orbax": (named("3/default/_METADATA", "3/_CHECKPOINT_METADATA"), "orbax", "--from orbax"),
    "step of orbax": (named("default/_METADATA"), "orbax", "--from orbax"),
    "flax": (named("flax_model.msgpack"), "flax", "--from flax"),
    "equinox": (named("model.eqx"), "equinox", "tree_deserialise_leaves"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_another_tool_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, tool, format_name = FOLDERS[name]
    place = make(tmp_path)
    for verb in ("ls", "inspect"):
        assert main(["ckpt", verb, str(place)]) == 1
        error = capsys.readouterr().err
        assert tool in error
        assert format_name in error
    engine = polyaccel.initialize(model=torch.nn.Linear(2, 1), config={"train_batch_size": 1})[0]
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(str(place))
    assert tool in str(caught.value)
    assert format_name in (caught.value.hint or "")
    engine.destroy()


def test_a_save_of_our_own_that_was_cut_off_is_no_other_tools(tmp_path: Path) -> None:
    engine = polyaccel.initialize(model=torch.nn.Linear(2, 1), config={"train_batch_size": 1})[0]
    engine.save_checkpoint(str(tmp_path), tag="one")
    engine.wait_for_checkpoint()
    (tmp_path / "one" / "commit.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(str(tmp_path))
    assert "--from" not in (caught.value.hint or "")
    engine.destroy()
