"""The drop-in: scripts that ask DeepSpeed for tensor parallelism in code, or by the config that it reads."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import pytest
import torch
from transformer_models import transformer_batch, transformer_model

from polyaccel.comm.base import Communicator
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.sharding.tensor_shard import cuts_of

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}


@pytest.mark.parametrize("by", ["call", "config"])
def test_a_model_is_cut_as_a_script_for_deepspeed_asks(by: str) -> None:
    model = transformer_model("qwen2")
    copies = [copy.deepcopy(model) for _ in range(4)]
    batch = transformer_batch("qwen2")
    wanted = model(**batch).loss.item()
    deepspeed.set_autotp_mode(training=True)

    def body(communicator: Communicator) -> tuple[int, ...]:
        mine = copies[communicator.rank]
        config = CONFIG
        if by == "call":
            assert deepspeed.tp_model_init(mine, tp_size=2, dtype=torch.float32) is mine
        else:
            config = {**CONFIG, "tensor_parallel": {"autotp_size": 2}}
        engine, *_ = deepspeed.initialize(model=mine, config=config)
        assert cuts_of(mine)
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(wanted, rel=1e-5)
        facts = (engine.get_data_parallel_rank(), engine.get_tensor_parallel_rank(), engine.dp_world_size)
        assert engine.mp_world_size == engine.autotp_size() == 2
        engine.destroy()
        return facts

    assert run_threads(4, body) == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]


def test_two_numbers_of_ranks_are_refused() -> None:
    model = transformer_model("qwen2")
    config = {**CONFIG, "tensor_parallel": {"autotp_size": 4}}
    with pytest.raises(ConfigError) as caught:
        deepspeed.tp_model_init(model, 2, torch.float32, config)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("tensor_parallel.autotp_size", 4)]
    assert "tp_model_init" in str(caught.value)
    deepspeed.tp_model_init(model, 2, torch.float32)
    with pytest.raises(ConfigError) as caught:
        deepspeed.tp_model_init(model, 3, torch.float32)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("tensor_parallel.autotp_size", 2)]
    assert "tp_model_init" in str(caught.value)

    def body(communicator: Communicator) -> None:
        with pytest.raises(ConfigError) as caught:
            deepspeed.initialize(model=model, config=config)
        assert [(problem.key, problem.value) for problem in caught.value.problems] == [
            ("tensor_parallel.autotp_size", 4)
        ]
        assert "tp_model_init" in str(caught.value)

    run_threads(1, body)
