"""`deepspeed.initialize`: where callers put the config, and the errors of calls that lack something."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
from polyaccel_deepspeed.config import normalise
from torch import nn

from polyaccel import PolyaccelError

CONFIG: dict[str, Any] = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@pytest.fixture
def ranks() -> Iterator[None]:
    deepspeed.init_distributed()
    yield
    deepspeed.comm.destroy_process_group()


@pytest.mark.parametrize("name", ["deepspeed_config", "deepscale_config"])
def test_a_config_stands_in_the_arguments_by_each_name(ranks: None, name: str) -> None:
    args = Namespace(local_rank=0, **{name: CONFIG})
    engine = deepspeed.initialize(args=args, model=nn.Linear(2, 2))[0]
    assert engine.train_batch_size() == 2


@pytest.mark.parametrize(
    "arguments",
    [
        {"model": None, "config": CONFIG},
        {"args": nn.Linear(2, 2), "config": CONFIG},
        {"model": nn.Linear(2, 2)},
        {"model": nn.Linear(2, 2), "config": CONFIG, "args": Namespace(deepspeed_config=CONFIG)},
        {"model": nn.Linear(2, 2), "args": Namespace(deepspeed_config=CONFIG, deepscale_config=CONFIG)},
    ],
)
def test_a_call_without_a_model_or_one_config_is_an_assertion_error_too(arguments: dict[str, Any]) -> None:
    with pytest.raises(AssertionError) as caught:
        deepspeed.initialize(**arguments)
    assert isinstance(caught.value, PolyaccelError)


def called_from(module: str, **arguments: Any) -> Any:
    """What `deepspeed.initialize` gives to a function of a module of this name."""
    space: dict[str, Any] = {"__name__": module, "deepspeed": deepspeed}
    exec("def prepare(**arguments): return deepspeed.initialize(**arguments)", space)
    return space["prepare"](**arguments)


@pytest.mark.parametrize("module", ["accelerate.accelerator", "lightning.pytorch.strategies.deepspeed"])
@pytest.mark.parametrize("section", [{"pipeline": {"stages": 2}}, {"mesh": {"pipe": 2}}])
def test_trainers_whose_loops_run_forward_passes_are_refused_stages(
    ranks: None, module: str, section: dict[str, Any]
) -> None:
    with pytest.raises(PolyaccelError) as caught:
        called_from(module, model=nn.Linear(2, 2), config={**CONFIG, **section})
    assert caught.value.value == 2
    engine = called_from(module, model=nn.Linear(2, 2), config={**CONFIG, "pipeline": {"stages": 1}})[0]
    assert engine.train_batch_size() == 2


def test_a_block_of_init_joins_all_ranks() -> None:
    assert not deepspeed.comm.is_initialized()
    with deepspeed.zero.Init(enabled=False):
        assert not deepspeed.comm.is_initialized()
    with deepspeed.zero.Init():
        assert deepspeed.comm.is_initialized()
        assert deepspeed.utils.groups.get_data_parallel_world_size() == 1
    deepspeed.comm.destroy_process_group()


@pytest.mark.parametrize("written", ["SUM", "Sum", "sum"])
def test_the_operation_on_gradients_is_read_in_any_case(written: str) -> None:
    assert normalise(CONFIG | {"gradient_allreduce_op": written})[0]["gradient_allreduce_op"] == "sum"
