"""Ranks that train different things exchanged weights unnoticed; now the first difference is named at the start."""

from __future__ import annotations

from collections.abc import Callable
from threading import local
from typing import Any

import pytest
import torch
from parity_models import ParityModel, grouped, make_config, on_threads, parity_model
from torch import nn

import polyaccel
from polyaccel.comm.init.threads import run_threads
from polyaccel.config.resolve import load_resolved
from polyaccel.engine import rank_consistency
from polyaccel.engine.policies.engines import common_settings_of
from polyaccel.engine.rank_consistency import require_same_training, training_facts
from polyaccel.errors import ShardingError

Deviation = Callable[[ParityModel, dict[str, Any]], Any]
"""What rank 1 does to its model and config before `initialize`; returns other arguments for that."""


def another_order(model: ParityModel, config: dict[str, Any]) -> None:
    model.wide = model._modules.pop("wide")


def another_frozen_layer(model: ParityModel, config: dict[str, Any]) -> None:
    model.wide.weight.requires_grad_(False)


def another_shape(model: ParityModel, config: dict[str, Any]) -> None:
    model.unused = nn.Parameter(torch.zeros(7))


def one_parameter_more(model: ParityModel, config: dict[str, Any]) -> None:
    model.more = nn.Parameter(torch.zeros(7))


def another_clipping(model: ParityModel, config: dict[str, Any]) -> None:
    config["gradient_clipping"] = 0.5


def another_rate(model: ParityModel, config: dict[str, Any]) -> None:
    config["optimizer"]["params"]["lr"] = 0.5


def another_rate_of_a_group(model: ParityModel, config: dict[str, Any]) -> dict[str, Any]:
    groups = grouped(model)
    groups[1]["lr"] = 0.5
    return {"model_parameters": groups}


def another_optimizer(model: ParityModel, config: dict[str, Any]) -> None:
    config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-2}}


def another_warm_up(model: ParityModel, config: dict[str, Any]) -> None:
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}


def fewer_samples(model: ParityModel, config: dict[str, Any]) -> dict[str, Any]:
    return {"model_parameters": grouped(model), "training_data": [0] * 99}


def another_stage(model: ParityModel, config: dict[str, Any]) -> None:
    config["zero_optimization"]["stage"] = 1


DEVIATIONS: dict[Deviation, str] = {
    another_order: "'wide.bias'",
    another_frozen_layer: "'wide.weight'",
    another_shape: "'unused'",
    one_parameter_more: "'more'",
    another_clipping: '"gradient_clipping"',
    another_rate: "'lr'",
    another_rate_of_a_group: "0.02",
    another_optimizer: "polyaccel.initialize",
    another_warm_up: "polyaccel.initialize",
    fewer_samples: "100",
    another_stage: '"zero_optimization.stage"',
}


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_a_rank_that_trains_something_else_is_named(deviation: Deviation) -> None:
    def work(communicator: Any, model: ParityModel) -> None:
        config = make_config(2)
        arguments = {"model_parameters": grouped(model)}
        if communicator.rank == 1:
            arguments = deviation(model, config) or {"model_parameters": grouped(model)}
        polyaccel.initialize(model=model, config=config, **{"training_data": [0] * 100, **arguments})

    with pytest.raises(ShardingError) as caught:
        on_threads(3, work, parity_model)
    assert DEVIATIONS[deviation] in str(caught.value)
    assert "the ranks do not train the same" in str(caught.value)
    assert "in one order on all ranks" in str(caught.value)


def test_a_rank_with_another_version_of_a_package_is_named_with_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"packages": {"torch": "2.13.0"}, "plugins": {"accelerator": "cpu (polyaccel 0.1.0)"}}
    hosts = local()

    def work(communicator: Any) -> None:
        hosts.name = f"host{communicator.rank // 2}"
        told = about if communicator.rank < 2 else {**about, "packages": {"torch": "2.8.0"}}
        require_same_training(communicator, training_facts((), None, (), {}, told))

    monkeypatch.setattr(rank_consistency.socket, "gethostname", lambda: hosts.name)
    with pytest.raises(ShardingError) as caught:
        run_threads(3, work)
    assert all(part in str(caught.value) for part in ("ranks [0, 1]", "host0", "2.13.0", "ranks [2]", "host1", "2.8.0"))


def test_where_files_lie_may_differ() -> None:
    trees = []
    for path in ("/first", "/second"):
        zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": path}}
        config = {"train_batch_size": 4, "zero_optimization": zero, "log_level": "info" if path == "/first" else None}
        trees.append(common_settings_of(load_resolved(config, world_size=2)))
    assert trees[0] == trees[1]
    assert trees[0]["zero_optimization"]["offload_optimizer"]["device"] == "nvme"
