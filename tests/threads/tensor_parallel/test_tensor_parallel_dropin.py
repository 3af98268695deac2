"""The drop-in: scripts that ask DeepSpeed for tensor parallelism in code, or by the config that it reads."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import pytest
import torch
from transformer_models import transformer_batch, transformer_model

from polyaccel.comm.base import Communicator
from polyaccel.errors import ConfigError, ShardingError
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


@pytest.mark.parametrize(("key", "dtype"), [("bf16", torch.float16), ("fp16", torch.bfloat16)])
def test_another_type_than_the_configs_is_refused(key: str, dtype: torch.dtype) -> None:
    model = transformer_model("qwen2")
    deepspeed.tp_model_init(model, 2, dtype)
    config = {**CONFIG, key: {"enabled": True}}
    with pytest.raises(ConfigError) as caught:
        deepspeed.initialize(model=model, config=config)
    assert [problem.key for problem in caught.value.problems] == [f"{key}.enabled"]


SKIPS = {"use_default_specs": False, "layer_specs": [{"patterns": [r".*\.weight$"], "partition_type": "skip"}]}


@pytest.mark.parametrize("stage", [0, 3])
def test_tensor_ranks_may_have_all_layers_whole(stage: int) -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)) for _ in range(4)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    plain = copy.deepcopy(models[0])
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    batches = [torch.arange(8.0).view(2, 4) * factor for factor in (0.1, 0.3)]
    wanted = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = [plain(batch).square().mean() for batch in batches]
        wanted.append([loss.item() for loss in losses])
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()

    def body(communicator: Communicator) -> None:
        config = {**CONFIG, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
        config["tensor_parallel"] = {"autotp_size": 2, "partition_config": SKIPS}
        engine = deepspeed.initialize(model=models[communicator.rank], config=config)[0]
        assert (engine.autotp_size(), engine.dp_world_size) == (2, 2)
        assert not cuts_of(models[communicator.rank])
        mine = engine.get_data_parallel_rank()
        for losses in wanted:
            loss = engine(batches[mine]).square().mean()
            engine.backward(loss)
            engine.step()
            assert loss.item() == pytest.approx(losses[mine], rel=1e-6)
        engine.destroy()

    run_threads(4, body)


def test_tensor_ranks_with_other_batches_are_an_error() -> None:
    models = [transformer_model("qwen2") for _ in range(2)]
    batch = transformer_batch("qwen2")

    def body(communicator: Communicator) -> None:
        config = {**CONFIG, "tensor_parallel": {"autotp_size": 2}}
        engine = deepspeed.initialize(model=models[communicator.rank], config=config)[0]
        tokens = batch["input_ids"].roll(communicator.rank, 1)
        with pytest.raises(ShardingError) as caught:
            engine(input_ids=tokens, labels=batch["labels"])
        assert caught.value.value == [1]

    run_threads(2, body)
