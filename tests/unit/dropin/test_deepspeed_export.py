"""Universal checkpoints for DeepSpeed, as polyaccel writes them: the layout that a real one reads (which
`tests/builds/dropin/test_real_deepspeed.py` shows), beside one that DeepSpeed's own converter wrote."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_runs import GOLDEN, exported
from polyaccel_deepspeed import universal
from polyaccel_deepspeed.exchange.exporting import write
from polyaccel_deepspeed.exchange.importing import read

from polyaccel.checkpoint import open_checkpoint
from polyaccel.checkpoint.convert.exporting import chosen
from polyaccel.cli.main import main
from polyaccel.errors import CheckpointError

TRAINED = ("embed.weight", "up.weight", "down.weight", "up.bias", "norm.weight", "norm.bias", "down.bias")


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our own save right after DeepSpeed's run was taken over, as a universal checkpoint."""
    return exported("zero1", tmp_path_factory.mktemp("exported"))[0]


def test_the_layout_is_that_of_deepspeeds_own_converter(out: Path) -> None:
    theirs, ours = GOLDEN / "universal", out
    for_stage_3 = {"global_step4/zero_pp_rank_0_mp_rank_00_model_states.pt"}
    assert files_of(ours) == files_of(theirs) | for_stage_3
    for fqn in ("head.weight", "scale"):
        mine, wanted = (loaded(where / f"global_step4/zero/{fqn}/fp32.pt") for where in (ours, theirs))
        assert mine.keys() == wanted.keys()
        assert torch.equal(mine["param"], wanted["param"])
    assert (ours / "latest_universal").read_text() == (theirs / "latest_universal").read_text()
    for fqn in TRAINED:
        for kind in ("fp32", "exp_avg", "exp_avg_sq", "step"):
            place = f"global_step4/zero/{fqn}/{kind}.pt"
            mine, wanted = loaded(ours / place), loaded(theirs / place)
            if kind == "step":
                assert torch.equal(mine, wanted)
            else:
                assert mine["cat_dim"] == wanted["cat_dim"]
                assert torch.equal(mine["param"], wanted["param"])
                assert mine["param"].dtype is torch.float32
                assert mine["param"].untyped_storage().nbytes() == mine["param"].nbytes


def test_what_all_parameters_share_is_there_for_every_stage(out: Path) -> None:
    common = loaded(out / "global_step4" / "zero" / "optimizer_state.pt")
    assert [group["weight_decay"] for group in common["param_groups"]] == [0.1, 0.0]
    assert [group["betas"] for group in common["param_groups"]] == [(0.9, 0.95)] * 2
    (of_stage_3,) = common["optimizer_state_dict"]["param_groups"]
    assert "weight_decay" not in of_stage_3  # stage 3 would give it to both groups
    assert of_stage_3["lr"] == common["param_groups"][0]["lr"]
    assert common["optimizer_state_dict"]["state"][0]["step"] == 4
    assert "loss_scaler" not in common
    states = loaded(out / "global_step4" / "mp_rank_00_model_states.pt")
    assert {key: states[key] for key in ("global_steps", "global_samples", "skipped_steps", "epoch")} == {
        "global_steps": 4,
        "global_samples": 24,
        "skipped_steps": 0,
        "epoch": 3,
    }
    assert states["lr_scheduler"] == {"last_batch_iteration": 3}
    assert states["buffer_names"] == ["scale"]
    assert states["shared_params"] == {"head.weight": "embed.weight"}
    assert states["module"]["scale"].tolist() == [0.5]


def contents(tensors: Any) -> dict[tuple[str, str], str]:
    return {
        (each.fqn, each.kind): hashlib.sha256(each.read(0, torch.Size(each.shape).numel())).hexdigest()
        for each in tensors
    }


@pytest.mark.parametrize("name", ["zero3", "fp16", "bf16"])
def test_it_comes_back_as_it_went_out(name: str, tmp_path: Path) -> None:
    """The loss scale too, as an object of DeepSpeed's class."""
    out, _ = exported(name, tmp_path)
    there, back = read(GOLDEN / name), read(out)
    wanted, found = contents(there.tensors), contents(back.tensors)
    frozen = {key for key in wanted if key[0].startswith("frozen")}  # in full precision now
    assert found.keys() == wanted.keys()
    assert {key: found[key] for key in found.keys() - frozen} == {key: wanted[key] for key in wanted.keys() - frozen}
    assert back.steps == there.steps
    assert back.counters == there.counters
    assert back.loss_scaler == there.loss_scaler
    assert back.client_state == there.client_state
    assert bool(back.loss_scaler) is (name == "fp16")


def test_what_deepspeed_could_not_count_is_refused(tmp_path: Path) -> None:
    exported("zero1", tmp_path)
    reader = open_checkpoint(tmp_path / "ours")
    reader.scalars["param_steps"]["up.bias"] = 1
    tensors = chosen(reader, ["param"], None)
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path / "other", reader, tensors, lambda nbytes: None)
    assert caught.value.value == [1, 4]
    assert "up.bias" in str(caught.value)
    assert caught.value.hint
    assert not (tmp_path / "other").exists()


def test_a_format_that_nobody_writes_is_named(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ckpt", "export", str(out.parent / "ours"), str(tmp_path / "x"), "--format", "deepspeed-uni"]
    assert main(arguments) == 1
    assert "expected one of safetensors, bin, dcp, orbax" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "digest"), [("zero1", "34e2506da5ededaf"), ("zero2", "34e2506da5ededaf"), ("zero3", "eb620e93d6514839")]
)
def test_a_checkpoint_of_deepspeeds_is_converted_as_its_own_converter_does(
    name: str, digest: str, tmp_path: Path
) -> None:
    """Digests are of the values that `ds_to_universal` of DeepSpeed 0.19.8 wrote, its flat ones of stage 3 too."""
    places = ["--input_folder", str(GOLDEN / name / "global_step4"), "--output_folder", str(tmp_path / "step4")]
    assert universal.main(universal.parse_arguments(places)) == 0
    found = hashlib.sha256()
    for fqn in TRAINED:
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            value = loaded(tmp_path / "step4" / "zero" / fqn / f"{kind}.pt")["param"]
            found.update(value.detach().contiguous().numpy().tobytes())
    assert found.hexdigest()[:16] == digest
    for fqn in ("head.weight", "scale"):
        mine = loaded(tmp_path / "step4" / "zero" / fqn / "fp32.pt")["param"]
        first = "embed.weight" if fqn == "head.weight" else fqn
        assert torch.equal(mine, loaded(tmp_path / "step4" / "zero" / first / "fp32.pt")["param"])
