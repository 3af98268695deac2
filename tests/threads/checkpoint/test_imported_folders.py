"""Folders and files that trainers write: weights with the optimizer and the schedule, among other files."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_runs import AFTER, BEFORE, PlainRun, importing, next_losses, two_groups
from safetensors.torch import save_file
from torch import nn

from polyaccel.checkpoint import open_checkpoint
from polyaccel.errors import CheckpointError


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


@pytest.fixture
def run() -> PlainRun:
    """After four steps with two groups of parameters and a schedule."""
    run = PlainRun(adamw, two_groups)
    run.schedule = decaying(run.optimizer)
    run.losses(range(BEFORE))
    return run


def weights(run: PlainRun) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def trainer_folder(run: PlainRun, folder: Path) -> None:
    save_file(weights(run), folder / "model.safetensors")
    torch.save(run.optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(run.schedule.state_dict(), folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    torch.save(Namespace(lr=1), folder / "training_args.bin")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": BEFORE}))


def accelerate_folder(run: PlainRun, folder: Path) -> None:
    torch.save(weights(run), folder / "pytorch_model.bin")
    torch.save(run.optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(run.schedule.state_dict(), folder / "scheduler.bin")
    torch.save(torch.ones(3), folder / "sampler.bin")
    (folder / "random_states_0.pkl").write_bytes(b"x")


def lightning_file(run: PlainRun, folder: Path) -> None:
    content = {
        "epoch": 1,
        "global_step": BEFORE,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": weights(run),
        "loops": {"fit_loop": {}},
        "callbacks": {},
        "optimizer_states": [run.optimizer.state_dict()],
        "lr_schedulers": [run.schedule.state_dict()],
        "hparams_name": "kwargs",
    }
    torch.save(content, folder / "last.bin")


def tutorial_file(run: PlainRun, folder: Path) -> None:
    content = {"step": BEFORE, "model_state_dict": weights(run), "loss": 0.5, "args": Namespace(lr=0.1)}
    content["optimizer_state_dict"] = run.optimizer.state_dict()
    torch.save({**content, "scheduler_state_dict": run.schedule.state_dict()}, folder / "checkpoint.bin")


def module_file(run: PlainRun, folder: Path) -> None:
    content = {"module": weights(run), "optimizer": run.optimizer.state_dict(), "scheduler": run.schedule.state_dict()}
    torch.save(content, folder / "checkpoint.bin")


WRITERS = [trainer_folder, accelerate_folder, lightning_file, tutorial_file, module_file]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_training_goes_on_with_the_losses_of_the_trainer(
    write: Any, run: PlainRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write(run, source)
    wanted = run.losses(range(BEFORE, BEFORE + AFTER))
    kind = "safetensors" if write is trainer_folder else "bin"
    assert importing(source, tmp_path / "c", kind) == 0
    assert "the optimizer Adam after 4 updates" in capsys.readouterr().out
    ranks, stage = [(1, 0), (2, 1), (3, 3), (2, 2), (1, 3)][WRITERS.index(write)]
    arguments: dict[str, Any] = {"groups": two_groups, "schedule": decaying}
    assert next_losses(tmp_path / "c", adamw, ranks=ranks, stage=stage, **arguments) == pytest.approx(wanted, rel=2e-6)
    has_count = write not in (accelerate_folder, module_file)
    assert open_checkpoint(tmp_path / "c").scalars["counters"]["global_steps"] == (BEFORE if has_count else 0)
    with pytest.raises(CheckpointError):  # positions have a meaning in the saved groups alone
        next_losses(tmp_path / "c", adamw)


def test_groups_in_another_order_are_refused_where_shapes_differ(run: PlainRun, tmp_path: Path) -> None:
    def mixed(model: nn.Module) -> Any:
        groups = two_groups(model)
        groups[0]["params"] = groups[0]["params"][::-1]
        return groups

    trainer_folder(run, tmp_path)
    assert importing(tmp_path, tmp_path / "c", "safetensors") == 0
    with pytest.raises(CheckpointError):
        next_losses(tmp_path / "c", adamw, groups=mixed)


def test_several_optimizers_fail_unless_weights_are_enough(
    run: PlainRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerate_folder(run, tmp_path)
    torch.save(run.optimizer.state_dict(), tmp_path / "optimizer_1.bin")
    assert importing(tmp_path, tmp_path / "c", "bin") == 1
    assert "optimizer" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
    assert importing(tmp_path, tmp_path / "c", "bin", "--weights-only") == 0
    assert {entry.kind for entry in open_checkpoint(tmp_path / "c").tensors()} == {"param"}


def test_an_optimizer_that_is_none_of_torch_is_named(
    run: PlainRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(weights(run), tmp_path / "model.safetensors")
    torch.save({"moments": torch.ones(3)}, tmp_path / "optimizer.pt")
    assert importing(tmp_path, tmp_path / "c", "safetensors") == 1
    assert "optimizer.pt" in capsys.readouterr().err


ONE, TWO = {"a": torch.ones(2)}, {"b": torch.ones(3)}


def beside(folder: Path, *names: str) -> None:
    for name in names:
        save_file({"other": torch.zeros(1)}, folder / name)


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        (["model.safetensors"], ["consolidated.safetensors", "ema.safetensors"]),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], ["consolidated.safetensors"]),
        (["diffusion_pytorch_model.safetensors"], ["diffusion_pytorch_model.fp16.safetensors"]),
        (["adapter_model.safetensors"], ["optimizer.safetensors"]),
        (["consolidated.safetensors"], []),
        (["anything.safetensors"], ["optimizer.safetensors"]),
    ],
    ids=lambda names: "+".join(names)[:40],
)
def test_the_model_among_other_files_is_found(mine: list[str], others: list[str], tmp_path: Path) -> None:
    beside(tmp_path, *others)
    for name, content in zip(mine, (ONE, TWO), strict=False):
        save_file(content, tmp_path / name)
    assert importing(tmp_path, tmp_path / "c", "safetensors") == 0
    names = {entry.fqn for entry in open_checkpoint(tmp_path / "c").tensors()}
    assert names == {name for content, _ in zip((ONE, TWO), mine, strict=False) for name in content}


@pytest.mark.parametrize(
    "names", [["one.safetensors", "two.safetensors"], ["model-00001-of-00003.safetensors"]], ids=["several", "a part"]
)
def test_a_folder_whose_model_is_unclear_is_refused(
    names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside(tmp_path, *names)
    assert importing(tmp_path, tmp_path / "c", "safetensors") == 1
    assert "hint:" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_index_with_a_tensor_that_no_file_has_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stem = "model" if kind == "safetensors" else "pytorch_model"
    if kind == "safetensors":
        save_file(ONE, tmp_path / "model-1.safetensors")
    else:
        torch.save(ONE, tmp_path / "pytorch_model-1.bin")
    places = {"a": f"{stem}-1.{kind}", "lost": f"{stem}-1.{kind}"}
    (tmp_path / f"{stem}.{kind}.index.json").write_text(json.dumps({"weight_map": places}))
    assert importing(tmp_path, tmp_path / "c", kind) == 1
    assert "'lost'" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_a_file_of_an_old_torch_is_read(tmp_path: Path) -> None:
    torch.save({"state_dict": ONE}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert importing(tmp_path, tmp_path / "c", "bin") == 0
    assert {entry.fqn for entry in open_checkpoint(tmp_path / "c").tensors()} == {"a"}
