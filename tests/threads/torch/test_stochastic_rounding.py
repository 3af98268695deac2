"""Parameters of 16 bits rounded stochastically: on average the master weights, and at every stage the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import (
    SMALL_BUCKET,
    assert_bitwise,
    batch,
    grouped,
    grouped_engine,
    make_config,
    on_threads,
    parity_model,
    snapshot,
    train_on_threads,
)
from stage3_models import assert_same_run
from torch import nn

import polyaccel

STEPS = 2
NEAREST = {"bf16": {"enabled": True}}
STOCHASTIC = {"bf16": {"enabled": True, "stochastic_rounding": True}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2},
    "SGD": {"lr": 1e-1, "momentum": 0.9},
    "Adagrad": {"lr": 1e-2},
    "Lion": {"lr": 1e-3},
    "Lamb": {"lr": 1e-2},
}
SMALL: dict[str, Any] = {"reduce_bucket_size": SMALL_BUCKET}
SHARDED: dict[str, Any] = {**SMALL, "stage3_param_persistence_threshold": 0}


def optimizer(name: str) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": OPTIMIZERS[name]}}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 3])
def test_stages_and_buckets_round_alike(world: int, name: str) -> None:
    changes = {**STOCHASTIC, **optimizer(name), "gradient_clipping": 0.5}
    wanted = train_on_threads(world, make_config(0, zero=SMALL, **changes), STEPS)
    for stage, zero in ((0, {"reduce_bucket_size": 10**9}), (1, SMALL), (2, SMALL), (3, SHARDED), (3, {})):
        assert_same_run(train_on_threads(world, make_config(stage, zero=zero, **changes), STEPS), wanted)
    nearest = train_on_threads(world, make_config(0, zero=SMALL, **{**changes, **NEAREST}), STEPS)
    assert not torch.equal(nearest.params["wide.weight"], wanted.params["wide.weight"])


def test_float16_and_accumulation_and_late_publishing_too() -> None:
    scaled = {"enabled": True, "stochastic_rounding": True, "loss_scale": 64.0}
    for changes in ({"fp16": scaled}, {**STOCHASTIC, "accumulation": 3}):
        for pair in ((0, 1), (2, 3)):
            runs = [
                train_on_threads(
                    2, make_config(stage, zero={**SHARDED, "overlap_param_gather": late}, **changes), STEPS
                )
                for stage in pair
                for late in ((False, True) if stage in (1, 2) else (False,))
            ]
            for run in runs[1:]:
                assert_same_run(run, runs[0])


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offloaded_states_round_alike(device: str, stage: int, tmp_path: Path) -> None:
    wanted = train_on_threads(2, make_config(2, zero=SMALL, **STOCHASTIC), STEPS)
    offload = {"offload_optimizer": {"device": device, "nvme_path": str(tmp_path)}}
    assert_same_run(train_on_threads(2, make_config(stage, zero={**SHARDED, **offload}, **STOCHASTIC), STEPS), wanted)


@pytest.mark.parametrize("stage", [0, 2])
def test_an_optimizer_of_torch_has_its_weights_rounded_too(stage: int) -> None:
    def train(communicator: Any, model: nn.Module) -> dict[str, torch.Tensor]:
        client = torch.optim.SGD(grouped(model), lr=0.1, momentum=0.9)
        config = make_config(stage, zero=SMALL, **STOCHASTIC)
        del config["optimizer"]
        engine, *_ = polyaccel.initialize(model=model, optimizer=client, config=config)
        for step in range(STEPS):
            engine.backward(engine(*batch(step, 0, communicator.rank)))
            engine.step()
        return snapshot(engine.module)

    ours = train_on_threads(2, make_config(1, zero=SMALL, **STOCHASTIC, **optimizer("SGD")), STEPS)
    for params in on_threads(2, train, parity_model):
        # torch rounds sums otherwise in the last place, which seldom changes where a weight goes.
        differ = torch.cat([(params[name] != value).flatten() for name, value in ours.params.items()])
        assert differ.double().mean() < 0.02


def test_updates_below_half_the_spacing_show_on_average() -> None:
    """1 - 2**-12 is 1 in bfloat16, whose spacing is 2**-8 below 1; one weight in sixteen has to go down."""

    def step(communicator: Any, model: nn.Linear, precision: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            model.weight.fill_(1.0)
        config = make_config(2, optimizer={"type": "SGD", "params": {"lr": 2.0**-12}}, **precision)
        engine, *_ = polyaccel.initialize(model=model, config=config)
        engine.backward(engine(torch.ones(1, 64, dtype=torch.bfloat16)).sum())
        engine.step()
        return snapshot(engine.module)["weight"]

    def build() -> nn.Linear:
        return nn.Linear(64, 1000, bias=False)

    assert (on_threads(2, step, build, NEAREST)[0] == 1).all()
    (found, other) = on_threads(2, step, build, STOCHASTIC)
    assert torch.equal(found, other)
    assert set(found.unique().tolist()) == {1 - 2.0**-8, 1.0}
    share = (found != 1).double().mean().item()
    assert abs(share - 1 / 16) < 5 * (1 / 16 / 64000) ** 0.5


@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 3), (3, 0)])
def test_a_resumed_run_is_the_uninterrupted_one(before: int, after: int, tmp_path: Path) -> None:
    def steps_of(engine: Any, communicator: Any, numbers: range) -> dict[str, torch.Tensor]:
        for number in numbers:
            engine.backward(engine(*batch(number, 0, communicator.rank)))
            engine.step()
        with polyaccel.zero.GatheredParameters(list(engine.module.parameters())):
            return snapshot(engine.module)

    def first(communicator: Any, model: nn.Module) -> list[dict[str, torch.Tensor]]:
        config = make_config(before, zero=SHARDED, **STOCHASTIC)
        engine = grouped_engine(model, config)
        middle = steps_of(engine, communicator, range(2))
        engine.save_checkpoint(str(tmp_path))
        return [middle, steps_of(engine, communicator, range(2, 4))]

    def second(communicator: Any, model: nn.Module) -> list[dict[str, torch.Tensor]]:
        config = make_config(after, zero=SHARDED, **STOCHASTIC)
        engine = grouped_engine(model, config)
        engine.load_checkpoint(str(tmp_path))
        return [steps_of(engine, communicator, range(0)), steps_of(engine, communicator, range(2, 4))]

    wanted = on_threads(2, first, parity_model)
    for found in on_threads(2, second, parity_model):
        for one, other in zip(found, wanted[0], strict=True):
            assert_bitwise(one, other)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_look_at_parameters_does_not_touch_their_master_weights(stage: int) -> None:
    """That a parameter is not its master weight to nearest is no sign that somebody changed it."""

    def train(communicator: Any, model: nn.Module, looks: bool) -> dict[str, torch.Tensor]:
        config = make_config(stage, zero=SHARDED, **STOCHASTIC)
        engine = grouped_engine(model, config)
        for number in range(3):
            engine.backward(engine(*batch(number, 0, communicator.rank)))
            engine.step()
            if looks:
                with polyaccel.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
                    pass
        with polyaccel.zero.GatheredParameters(list(model.parameters())):
            return snapshot(engine.module)

    wanted = on_threads(2, train, parity_model, False)
    for found in on_threads(2, train, parity_model, True):
        assert_bitwise(found, wanted[0])
