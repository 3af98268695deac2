"""The drop-in's engine in longer runs, and with other users of logging: batch sizes, norms, lines, leaf modules."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from math import inf
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    deepspeed.init_distributed()
    yield
    deepspeed.comm.destroy_process_group()


def config(**more: Any) -> dict[str, Any]:
    optimizer = {"type": "SGD", "params": {"lr": 0.05}}
    return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "optimizer": optimizer} | more


@pytest.mark.parametrize("windows", [(2, 4, 4, 2, 3), (1, 3, 2)])
def test_a_ramp_of_batch_sizes_trains_as_plain_torch(windows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    engine = deepspeed.initialize(model=model, config=config(gradient_accumulation_steps=2))[0]
    optimizer, found, want = torch.optim.SGD(plain.parameters(), lr=0.05), [], []
    for micro_batches in windows:
        engine.set_train_batch_size(4 * micro_batches)
        optimizer.zero_grad()
        for index in range(micro_batches):
            x, y = torch.full((4, 8), float(index + 1)), torch.zeros(4, 1)
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
            (nn.functional.mse_loss(plain(x), y) / micro_batches).backward()
        want.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0)))
        optimizer.step()
        found.append(float(engine.get_global_grad_norm()))
    assert found == pytest.approx(want, rel=1e-4)
    engine.destroy()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_norm_of_a_skipped_step_is_infinite(bad: float) -> None:
    fp16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 4}
    engine = deepspeed.initialize(model=nn.Linear(2, 1), config=config(fp16=fp16))[0]
    engine.backward((engine(torch.ones(4, 2)) * bad).mean())
    engine.step()
    assert not engine.was_step_applied()
    assert engine.get_global_grad_norm() == inf
    engine.backward(engine(torch.ones(4, 2)).mean())
    engine.step()
    assert 0.0 < engine.get_global_grad_norm() < inf
    engine.destroy()


def test_lines_of_ours_do_not_reach_the_root_logger() -> None:
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        engine = deepspeed.initialize(model=nn.Linear(2, 1), config=config())[0]
        logging.getLogger("polyaccel.engine").warning("ours")
        deepspeed.utils.logger.warning("DeepSpeed's")
        engine.destroy()
    finally:
        logging.getLogger().removeHandler(handler)
    assert not [record for record in seen if record.name.startswith(("polyaccel", "DeepSpeed"))]


def test_leaf_modules_have_deepspeeds_mark() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    deepspeed.utils.set_z3_leaf_modules(model, [nn.Linear])
    assert model[0]._z3_leaf is True
    assert not hasattr(model[1], "_z3_leaf")
    model[1]._z3_leaf = True  # as scripts set it themselves
    assert deepspeed.utils.z3_leaf_module(model[1])


def test_a_loader_in_the_place_of_a_dataset_is_refused() -> None:
    data = TensorDataset(torch.ones(8, 2))
    with pytest.raises(deepspeed.DeepSpeedConfigError) as refused:
        deepspeed.initialize(model=nn.Linear(2, 1), config=config(), training_data=DataLoader(data, 4))
    assert refused.value.problems[0].value == "DataLoader"


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).sum()


def test_parameters_without_a_gradient_are_an_assertion_error_where_they_may_not_be() -> None:
    zero = {"stage": 2, "ignore_unused_parameters": False}
    engine = deepspeed.initialize(model=Unused(), config=config(zero_optimization=zero))[0]
    engine.backward(engine(torch.ones(4, 2)))
    with pytest.raises(AssertionError) as refused:
        engine.step()
    assert "ignore_unused_parameters" in refused.value.args[0]
    assert sorted(refused.value.value) == ["unused.bias", "unused.weight"]
    engine.destroy()


def test_leaf_modules_of_a_config_stay_marked_after_the_engine() -> None:
    model = Unused()
    zero = {"stage": 3, "leaf_module": {"classes": ["Unused"]}}
    engine = deepspeed.initialize(model=model, config=config(zero_optimization=zero))[0]
    engine.destroy()
    engine.destroy()
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_replaced_by_what_a_function_makes_of_them_and_of_their_parameters(stage: int) -> None:
    model = Unused()
    engine = deepspeed.initialize(model=model, config=config(zero_optimization={"stage": stage}))[0]
    engine.backward(engine(torch.ones(4, 2)))
    wanted = {model.used.weight: 2.0, model.used.bias: 3.0}
    deepspeed.utils.safe_update_full_grad_vectorized(
        [*wanted], lambda gradient, parameter: torch.full_like(gradient, wanted[parameter])
    )
    for parameter, value in wanted.items():
        found = deepspeed.utils.safe_get_full_grad(parameter)
        assert torch.equal(found, torch.full_like(found, value))
    engine.step()
    engine.destroy()
