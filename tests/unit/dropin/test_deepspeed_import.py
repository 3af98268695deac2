"""Checkpoints that a real DeepSpeed 0.19.8 wrote load here, and training goes on with DeepSpeed's own next losses.

`tests/golden/deepspeed` was made by `make_checkpoints.py` there, in an environment with DeepSpeed: two or three ranks
on the CPU, after four of eight steps, in float32, bfloat16 and float16 (of which two steps before and one after the
save overflow), with the optimizer on the device and offloaded.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_runs import GOLDEN, SAMPLES, TOLD, go_on, taken_over
from polyaccel_deepspeed.exchange.importing import read

from polyaccel.checkpoint import open_checkpoint
from polyaccel.errors import CheckpointError
from polyaccel.testkit.ranks.threads import run_threads

RELATIVE = {"bf16": 3e-3, "fp16": 3e-4}
"""Distance of losses whose forward pass has 16 bits; else 2e-6."""
TRAINED = ("embed.weight", "up.weight", "down.weight", "up.bias", "norm.weight", "norm.bias", "down.bias")


@pytest.fixture(scope="module", params=[*TOLD])
def taken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Each of DeepSpeed's checkpoints, and ours of it."""
    return request.param, taken_over(request.param, tmp_path_factory.mktemp(request.param))


def test_training_goes_on_with_the_losses_of_deepspeed(taken: tuple[str, Path]) -> None:
    """At another number of ranks and another stage than it was saved by, where that changes no number."""
    name, place = taken
    ranks, stage = [(2, 1), (3, 3), (1, 2)][[*TOLD].index(name) % 3]
    if name.startswith("fp16"):
        ranks = TOLD[name]["ranks"]  # where gradients overflow depends on how many samples a rank sums over
    losses = run_threads(ranks, go_on, name, str(place), stage, range(4, 8))[0]
    assert losses == pytest.approx(TOLD[name]["losses"][4:], rel=RELATIVE.get(name.partition("-")[0], 2e-6))


def test_what_is_imported_is_the_whole_run(taken: tuple[str, Path]) -> None:
    name, place = taken
    reader = open_checkpoint(place)
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
    skipped = 2 if name.startswith("fp16") else 0
    assert scalars["counters"]["skipped_steps"] == skipped
    assert scalars["param_steps"] == dict.fromkeys(TRAINED, 4 - skipped)
    assert scalars["counters"]["global_samples"] == 4 * SAMPLES
    assert scalars["lr_scheduler"] == {"last_batch_iteration": 3 - skipped}
    if skipped:
        assert scalars["loss_scaler"] == {"loss_scale": 2.0**16, "good_steps": 2, "tolerance": 1}
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
    with pytest.raises(CheckpointError) as caught:
        read(copy)
    assert all(part in str(caught.value) for part in ("posix.system", name))
    assert caught.value.hint
    assert not ran.exists()


def cut_off(copy: Path) -> str:
    (copy / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    return "up.weight"


def truncated(copy: Path) -> str:
    file = copy / "global_step4" / "mp_rank_00_model_states.pt"
    file.write_bytes(file.read_bytes()[:1000])
    return "mp_rank_00_model_states.pt"


def tensor_parallel(copy: Path) -> str:
    (copy / "global_step4" / "mp_rank_01_model_states.pt").write_bytes(b"")
    return "global_step4"


def out_of_the_folder(copy: Path) -> str:
    (copy / "latest").write_text("../elsewhere")
    return "../elsewhere"


def empty(copy: Path) -> str:
    shutil.rmtree(copy / "global_step4")
    (copy / "latest").unlink()
    return str(copy)


@pytest.mark.parametrize(
    "damage", [cut_off, truncated, tensor_parallel, out_of_the_folder, empty], ids=lambda f: f.__name__
)
def test_what_cannot_be_imported_is_said(damage: Any, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "zero1", tmp_path / "copy")
    named = damage(tmp_path / "copy")
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path / "copy")
    assert named in str(caught.value.value)


def test_a_folder_that_lost_its_optimizer_says_so(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "zero1", tmp_path / "copy")
    for file in tmp_path.glob("copy/*/*optim_states.pt"):
        file.unlink()
    incoming = read(tmp_path / "copy")
    assert [each.is_needed for each in incoming.left_out] == [True]
    assert {tensor.kind for tensor in incoming.weights().tensors} == {"param", "buffer"}
