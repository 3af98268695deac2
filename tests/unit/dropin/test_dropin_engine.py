"""The drop-in's engine on one rank: what scripts call beside forward, backward and step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_optim_files
from torch import nn

from polyaccel import PolyaccelError


@pytest.fixture
def engine() -> Iterator[Any]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.25}},
        "zero_optimization": {"stage": 2, "round_robin_gradients": True},
        "gradient_clipping": 0.0,
    }
    torch.manual_seed(0)
    made, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=config)
    yield made
    made.destroy()
    deepspeed.comm.destroy_process_group()


def test_a_block_of_backwards_is_reduced_once(engine: Any) -> None:
    before = engine.module.weight.detach().clone()
    inputs = torch.ones(4, 3)
    passes = engine.zero.reducer.passes
    with engine.coalesce_grad_reduction():
        for factor in (1.0, 2.0, 3.0):
            engine.backward(engine(inputs).sum() * factor)
    assert engine.zero.reducer.passes == passes + 4
    engine.step()
    assert torch.equal(engine.module.weight, before - 0.5 * 6 * 4)


def test_batch_sizes_are_set_between_steps(engine: Any) -> None:
    engine.set_train_batch_size(12)
    assert engine.get_batch_info() == (12, 4, 3)
    with pytest.raises(deepspeed.DeepSpeedConfigError) as caught:
        engine.set_train_batch_size(13)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("train_batch_size", 13)]
    engine.set_train_micro_batch_size(2)
    assert engine.get_batch_info() == (6, 2, 3)


def test_questions_about_the_config_have_answers(engine: Any) -> None:
    assert engine.get_mom() == [0.25]
    assert engine.zero_round_robin_gradients() is True
    assert engine.zero_sub_group_size() == 1_000_000_000
    assert engine.zero_hpz_partition_size() == 1
    assert engine.communication_data_type is torch.float32
    assert engine.dynamic_loss_scale_args() == {
        "init_scale": 65536, "scale_window": 1000, "delayed_shift": 2, "consecutive_hysteresis": False, "min_scale": 1,
    }  # fmt: skip
    assert not engine.checkpoint_tag_validation_fail()
    assert engine.managed_gradient_accumulation() is True


def test_whole_states_go_out_and_in_by_deepspeeds_arguments(engine: Any) -> None:
    found = engine.module_state_dict(destination={"a": 1}, prefix="model.")
    assert sorted(found) == ["a", "model.bias", "model.weight"]
    engine.load_module_state_dict({"module": {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}})
    assert torch.equal(engine.module.weight, torch.ones(2, 3))


def test_a_function_of_the_script_loads(engine: Any, tmp_path: Path) -> None:
    """`custom_load_fn` is called with `src` and `dst`, in `load_checkpoint` and in `load_module_state_dict`."""

    def load(src: Any, dst: nn.Module) -> None:
        dst.load_state_dict({name: value + 1 for name, value in src.items()})

    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.save_checkpoint(tmp_path, tag=3)
    engine.load_checkpoint(tmp_path, tag=3, custom_load_fn=load)
    assert all(torch.equal(value, before[name] + 1) for name, value in engine.module_state_dict().items())
    engine.load_module_state_dict({"module": engine.module_state_dict()}, custom_load_fn=load)
    assert all(torch.equal(value, before[name] + 2) for name, value in engine.module_state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_autocast_around_the_engine_stays_in_force_on_a_cpu(engine: Any, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        assert engine(torch.ones(4, 3)).dtype is dtype  # as DeepSpeed 0.19.8's
    assert engine(torch.ones(4, 3)).dtype is torch.float32


def test_loaders_take_a_sampler_or_cut_the_data_themselves(engine: Any) -> None:
    data = list(torch.arange(8.0))
    assert sum(batch.numel() for batch in engine.deepspeed_io(data)) == 8
    (batch,) = engine.deepspeed_io(data, batch_size=2, data_sampler=[5, 3])
    assert batch.tolist() == [5.0, 3.0]


def test_modules_are_built_on_a_device_and_leaves_are_named() -> None:
    with deepspeed.OnDevice(dtype=torch.bfloat16):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert model[0].weight.is_meta
    assert model[0].weight.dtype is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32
    deepspeed.utils.set_z3_leaf_modules_by_name(model, ["1"])
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model[1]]
    deepspeed.utils.set_z3_leaf_modules_by_name(model, ["1"], flag=False)
    assert deepspeed.utils.get_z3_leaf_modules(model) == []


def test_leaves_by_name_are_returned_with_the_names_that_no_module_has() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    found = deepspeed.utils.set_z3_leaf_modules_by_name(model, ["1", "2"], raise_if_not_found=False)
    assert found == ([model[1]], ["2"])
    found = deepspeed.utils.set_z3_leaf_modules_by_suffix(model, ["0", "x"], raise_if_not_found=False)
    assert found == ([model[0], model[1][0]], ["x"])
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model[0], model[1], model[1][0]]
    with pytest.raises(ValueError) as caught:
        deepspeed.utils.set_z3_leaf_modules_by_name(model, ["0", "2"])
    assert isinstance(caught.value, PolyaccelError)


def test_files_of_deepspeeds_optimizer_states_are_listed_in_the_order_of_ranks(tmp_path: Path) -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]
    for name in names:
        (tmp_path / name).touch()
    assert get_optim_files(str(tmp_path)) == [str(tmp_path / name) for name in names]


def test_the_gradient_in_no_sync_is_that_of_this_rank(engine: Any) -> None:
    weight = engine.module.weight
    with engine.no_sync():
        for passes in (1, 2):
            engine.backward(engine(torch.ones(4, 3)).sum())
            assert torch.equal(deepspeed.utils.safe_get_full_grad(weight), torch.full((2, 3), 4.0 * passes))


@pytest.mark.parametrize("stage", [0, 2])
def test_the_optimizers_states_are_torchs(stage: int) -> None:
    torch.manual_seed(4)
    model = torch.nn.Linear(3, 2)
    plain = torch.nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    reference = torch.optim.Adam(plain.parameters(), lr=0.1)
    config = {"train_batch_size": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}}
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)
    assert not optimizer.state
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 3)).sum())
        engine.step()
        reference.zero_grad()
        plain(torch.ones(4, 3)).sum().backward()
        reference.step()
    saved, wanted = optimizer.state_dict(), reference.state_dict()
    assert saved["state"].keys() == wanted["state"].keys()
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1]]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        found, state = optimizer.state[ours], reference.state[theirs]
        assert found["step"] == state["step"] == 2
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(found[name], state[name])
    engine.backward(engine(torch.ones(4, 3)).sum())
    engine.step()
    optimizer.load_state_dict(saved)
    assert optimizer.state[model.weight]["step"] == 2
    assert torch.equal(optimizer.state[model.bias]["exp_avg"], saved["state"][1]["exp_avg"])
    engine.destroy()
