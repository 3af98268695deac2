"""A checkpoint of experts that a real DeepSpeed 0.19.8 wrote loads here, and training goes on with DeepSpeed's losses.

`tests/golden/deepspeed/experts` was made by `make_experts.py` there: four ranks at ZeRO 2, of which two share experts.
"""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed_runs import GOLDEN, taken_over
from dropin_mixtures import batch, built
from polyaccel_deepspeed.exchange.experts import owners
from polyaccel_deepspeed.exchange.exporting import write
from polyaccel_deepspeed.exchange.importing import read
from safetensors.torch import load_file
from torch import nn

from polyaccel.checkpoint import open_checkpoint
from polyaccel.checkpoint.convert.exporting import chosen
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError
from polyaccel.testkit.ranks.threads import run_threads

CASE = "top 1 in order of nothing dropped"
LOSSES = json.loads((GOLDEN / "experts.json").read_text())
"""By rank, DeepSpeed's losses of eight steps."""
STACK = "mixtures.1.deepspeed_moe.experts.2_weight"


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSpeed's checkpoint, as one of ours."""
    return taken_over("experts", tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize(("ep_size", "stage"), [(2, 3), (4, 1)])
def test_training_goes_on_with_the_losses_of_deepspeed(taken: Path, ep_size: int, stage: int) -> None:
    torch.manual_seed(7)
    models = [built(CASE, (ep_size, ep_size)) for _ in range(4)]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
    }

    def go_on(communicator: Communicator) -> list[float]:
        model = models[communicator.rank]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        named = {"params": [*model.parameters()], "name": "all"}
        groups = split_params_into_different_moe_groups_for_optimizer(named)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config, dist_init_required=False)
        engine.load_checkpoint(str(taken))
        losses = []
        for step in range(4, 8):
            loss, _ = engine(batch(step, communicator.rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses

    for rank, losses in enumerate(run_threads(4, go_on)):
        assert losses == pytest.approx(LOSSES[rank][4:], rel=1e-5)


def test_stacks_have_the_weights_of_files_of_experts() -> None:
    found = {tensor.kind: tensor for tensor in read(GOLDEN / "experts").tensors if tensor.fqn == STACK}
    assert found.keys() == {"param", "exp_avg", "exp_avg_sq"}
    data = bytearray(found["param"].read(0, 4 * 12 * 16))
    whole = torch.frombuffer(data, dtype=torch.float32).view(4, 12, 16)
    for expert in range(4):
        file = GOLDEN / "experts" / "global_step4" / f"layer_1_expert_{expert}_mp_rank_00_model_states.pt"
        saved = torch.load(file, weights_only=True)
        assert torch.equal(
            whole[expert], saved[f"mixtures.1.deepspeed_moe.experts.deepspeed_experts.{expert}.2.weight"]
        )


def test_universal_checkpoints_have_no_place_for_experts(taken: Path, tmp_path: Path) -> None:
    reader = open_checkpoint(taken)
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path, reader, tuple(chosen(reader, ["param"], None)), lambda nbytes: None)
    assert all(part in str(caught.value) for part in ("DeepSpeed", "MoE"))
    assert not list(tmp_path.iterdir())


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "experts", tmp_path / "copy")
    folder = tmp_path / "copy" / "global_step4"
    model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    for group in model["param_shapes"]:  # as where the optimizer has no experts: they are frozen
        for name in [name for name in group if ".experts." in name]:
            del group[name]
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    stacks = {tensor.fqn: tensor.shape for tensor in read(tmp_path / "copy").tensors if ".experts." in tensor.fqn}
    assert stacks[STACK] == (4, 12, 16)
    (folder / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path / "copy")
    assert caught.value.value == "mixtures.1.deepspeed_moe.experts.0_weight"
    assert "[0, 1, 3]" in str(caught.value)


def test_which_ranks_have_which_experts() -> None:
    shapes = ["layer.deepspeed_moe.experts.deepspeed_experts.0.weight"]
    states: list[dict[str, Any]] = [{"partition_count": [8, 2]}] * 8
    assert owners(["layer.weight"], states, 0, {}) == [[*range(8)]]
    assert owners(shapes, states, 1, {}) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    data_first = {"use_data_before_expert_parallelism": True}
    assert owners(shapes, states, 1, data_first) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(CheckpointError) as caught:
        owners(shapes, states[:7], 1, {})
    assert caught.value.value == 2


def test_state_dicts_of_single_experts_are_loaded() -> None:
    """As DeepSpeed names them, by torch's own call and by an engine's; a layer with other names says so."""
    source, model = (MoE(4, nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), num_experts=3) for _ in range(2))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_()
    theirs = source.state_dict()
    assert "deepspeed_moe.experts.deepspeed_experts.2.1.bias" in theirs
    model.load_state_dict(theirs)
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in model.state_dict().items())
    engine, *_ = deepspeed.initialize(
        model=MoE(4, nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), num_experts=3),
        config={"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )
    engine.load_module_state_dict({"module": theirs})
    found = engine.module_state_dict()
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in found.items())
    theirs.pop("deepspeed_moe.experts.deepspeed_experts.1.1.bias")
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(theirs)
    assert "deepspeed_experts.0.1.bias" in str(caught.value)
    with pytest.raises(CheckpointError):
        engine.load_module_state_dict(theirs)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_state_dicts_have_single_experts(stage: int, tmp_path: Path) -> None:
    """Under DeepSpeed's names, of a layer by itself, of an engine whose ranks share experts, and in its file."""
    torch.manual_seed(5)
    models = [_residual_layer()]
    models.append(deepcopy(models[0]))
    source = {name: value.clone() for name, value in models[0].state_dict().items()}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }

    def save(communicator: Communicator) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
        model = models[communicator.rank]
        engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
        engine.save_16bit_model(str(tmp_path), "model.bin")
        engine.save_16bit_model(str(tmp_path), "model.safetensors")
        own = {name: value.clone() for name, value in model.state_dict().items()}
        found = engine.module_state_dict(), own, engine._zero3_consolidated_16bit_state_dict()
        engine.destroy()
        return found

    (whole, first, consolidated), (_, second, nothing) = run_threads(2, save)
    assert nothing is None
    names = {name for name in source if ".experts." in name}
    assert names == {
        f"deepspeed_moe.experts.deepspeed_experts.{number}.{layer}.{kind}"
        for number in (0, 1)
        for layer in (0, 1)
        for kind in ("weight", "bias")
    }
    files = torch.load(tmp_path / "model.bin"), load_file(tmp_path / "model.safetensors")
    for state in (whole, consolidated, *files):
        assert state.keys() == source.keys()
        assert all(torch.equal(value, source[name]) for name, value in state.items())
    for rank, state in enumerate((first, second)):  # of one of two experts, whose number there is 0
        assert {name for name in state if ".experts." in name} == {name for name in names if "_experts.0." in name}
        for name in (name for name in state if ".experts." in name):
            assert torch.equal(state[name], source[name.replace("_experts.0.", f"_experts.{rank}.")])
    plain = _residual_layer()
    plain.load_state_dict(files[0])
    assert all(torch.equal(value, source[name]) for name, value in plain.state_dict().items())


def _residual_layer() -> MoE:
    expert = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    return MoE(4, expert, num_experts=2, ep_size=2, use_residual=True)
