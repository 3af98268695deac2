"""Mixtures of transformers whose experts are spread over ranks, by config alone: they train what plain torch trains."""

from __future__ import annotations

import copy
import os
from itertools import product
from typing import Any

import pytest
import torch
from pairwise import FULL, VARIABLE
from parity_models import make_config
from torch import nn
from transformer_models import step_once, trained_by, trained_plainly, transformer_batch, transformer_model
from transformers import MixtralForCausalLM

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.errors import ConfigError, ShardingError
from polyaccel.ops import matmul_autotune
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.sharding.tensor_shard import cuts_of, local_slice
from polyaccel.utils import safe_get_full_optimizer_state

STEPS = 3
LR = 0.2
KINDS = ("mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss")
SAMPLE = [
    ("mixtral", 2, 1, 0),
    ("qwen3_moe", 4, 1, 1),
    ("deepseek_v3", 2, 2, 3),
    ("olmoe", 3, 1, 2),
    ("gpt_oss", 2, 2, 3),
]
"""Kind, ranks that share experts, ranks with the same ones, stage: `make test` runs these, `make test-parity` all."""
ROWS = list(product(KINDS, (2, 3), (1, 2), range(4))) if os.environ.get(VARIABLE) == FULL else SAMPLE


@pytest.fixture(autouse=True)
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts by grouped products. Those of other tests are left to their modules."""
    monkeypatch.setenv(matmul_autotune.VARIABLE, "on")


def config_of(stage: int, experts: int, **changes: Any) -> dict[str, Any]:
    return make_config(
        stage,
        zero={"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30},
        optimizer={"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        gradient_clipping=1.0,
        expert_parallel={"enabled": True, "autoep_size": experts},
        **changes,
    )


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


@pytest.mark.parametrize(("kind", "experts", "data", "stage"), ROWS)
def test_expert_ranks_train_what_plain_torch_trains(kind: str, experts: int, data: int, stage: int) -> None:
    model = transformer_model(kind)
    ranks = experts * data
    losses, norms, values = trained_plainly(model, kind, ranks, optimizer_of)
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def train(communicator: Communicator) -> tuple[list[float], list[float], dict[str, Any]]:
        engine, *_ = polyaccel.initialize(model=copies[communicator.rank], config=config_of(stage, experts))
        found, of_norms = trained_by(engine, kind, communicator.rank)
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return found, of_norms, state

    for rank, (found, of_norms, state) in enumerate(run_threads(ranks, train)):
        assert found == pytest.approx(losses[rank], rel=1e-5)
        assert of_norms == pytest.approx(norms, rel=1e-4)
        assert state.keys() == values.keys()
        for name, value in values.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5)


def test_tensor_ranks_share_each_expert_too() -> None:
    model = transformer_model("mixtral")
    losses, norms, _ = trained_plainly(model, "mixtral", 2, optimizer_of)
    copies = [copy.deepcopy(model) for _ in range(4)]

    def train(communicator: Communicator) -> tuple[list[float], list[float]]:
        config = config_of(3, 2, tensor_parallel={"autotp_size": 2})
        engine, *_ = polyaccel.initialize(model=copies[communicator.rank], config=config)
        found, of_norms = [], []
        for step in range(STEPS):
            found.append(step_once(engine, "mixtral", step, communicator.rank // 2))
            of_norms.append(engine.get_global_grad_norm())
        engine.destroy()
        return found, of_norms

    for rank, (found, of_norms) in enumerate(run_threads(4, train)):
        assert found == pytest.approx(losses[rank // 2], rel=1e-5)
        assert of_norms == pytest.approx(norms, rel=1e-4)


def test_sequences_are_shared_beside_experts() -> None:
    """Norms and values; losses are each rank's part of a sequence's."""
    model = transformer_model("qwen3_moe")
    batches = [{**transformer_batch("qwen3_moe", seed=step), "use_cache": False} for step in range(2 * STEPS)]
    for batch in batches:
        del batch["attention_mask"]
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (plain(**batches[2 * step + rank]).loss / 2).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item())
        optimizer.step()
    copies = [copy.deepcopy(model) for _ in range(4)]

    def train(communicator: Communicator) -> tuple[list[float], dict[str, Any]]:
        config = config_of(3, 2, sequence_parallel_size=2)
        engine, *_ = polyaccel.initialize(model=copies[communicator.rank], config=config)
        of_norms = []
        for step in range(STEPS):
            loss = engine(**batches[2 * step + communicator.rank // 2]).loss
            engine.backward(loss)
            engine.step()
            of_norms.append(engine.get_global_grad_norm())
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return of_norms, state

    for of_norms, state in run_threads(4, train):
        assert of_norms == pytest.approx(norms, rel=1e-4)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=2e-5)


def test_models_made_in_init_with_everything_in_host_memory() -> None:
    """Weights are computed when they are spread, and have the values of an ordinary model."""

    config_of_model = transformer_model("mixtral").config

    def build() -> nn.Module:
        torch.manual_seed(11)
        return MixtralForCausalLM(config_of_model).train()

    losses, _, _ = trained_plainly(build(), "mixtral", 2, optimizer_of)
    with polyaccel.zero.Init():
        copies = [build() for _ in range(2)]
    config = config_of(3, 2)
    config["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}

    def train(communicator: Communicator) -> list[float]:
        engine, *_ = polyaccel.initialize(model=copies[communicator.rank], config=config)
        found = [step_once(engine, "mixtral", step, communicator.rank) for step in range(STEPS)]
        engine.destroy()
        return found

    assert run_threads(2, train) == [pytest.approx(each, rel=1e-4) for each in losses]


def test_checkpoints_move_between_numbers_of_expert_ranks(tmp_path: Any) -> None:
    """Trained by two that share experts, loaded and saved by three, loaded by one: every value and state as it was."""
    model = transformer_model("olmoe")

    def run(experts: int, stage: int, load: str | None, save: str | None) -> Any:
        copies = [copy.deepcopy(model) for _ in range(experts)]

        def body(communicator: Communicator) -> Any:
            mine = copies[communicator.rank]
            engine, *_ = polyaccel.initialize(model=mine, config=config_of(stage, experts))
            if load is not None:
                engine.load_checkpoint(str(tmp_path), load)
            else:
                step_once(engine, "olmoe", 0, 0)
            if save is not None:
                engine.save_checkpoint(str(tmp_path), save)
            values = {name: value.clone() for name, value in engine.module_state_dict().items()}
            states = {
                name: safe_get_full_optimizer_state(parameter, "momentum_buffer").clone()
                for name, parameter in mine.named_parameters()
            }
            engine.destroy()
            return (
                values,
                states,
                {name: cut for name, p in mine.named_parameters() for q, cut in cuts_of(mine).items() if p is q},
            )

        return run_threads(experts, body)

    first = run(2, 2, None, "two")
    run(3, 3, "two", "three")
    ((values, states, _),) = run(1, 0, "three", None)
    for of_rank, states_of_rank, cuts in first:
        assert of_rank.keys() == values.keys()
        assert all(torch.equal(value, values[name]) for name, value in of_rank.items())
        assert set(cuts) == {name for name in states if ".experts." in name}
        for name, state in states_of_rank.items():
            whole = states[name]
            assert torch.equal(state, local_slice(whole, cuts[name].block) if name in cuts else whole), name


def test_16_bits_and_a_loss_scale_that_overflows_on_one_rank() -> None:
    model = transformer_model("mixtral")
    copies = [copy.deepcopy(model) for _ in range(2)]
    fp16 = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 100}

    def train(communicator: Communicator) -> list[tuple[float, bool, float]]:
        engine, *_ = polyaccel.initialize(model=copies[communicator.rank], config=config_of(2, 2, fp16=fp16))
        found = []
        for step in range(8):
            loss = step_once(engine, "mixtral", step, communicator.rank)
            found.append((engine.get_loss_scale(), engine.was_step_applied(), loss))
        engine.destroy()
        return found

    one, other = run_threads(2, train)
    assert [each[:2] for each in one] == [each[:2] for each in other]
    assert {applied for _, applied, _ in one} == {True, False}
    assert all(loss == loss for _, _, loss in [*one, *other])


@pytest.mark.parametrize(
    ("kind", "ranks", "section", "error", "named"),
    [
        (
            "llama",
            2,
            {"autoep_size": 2},
            ShardingError,
            "LlamaForCausalLM",
        ),
        ("mixtral", 4, {"autoep_size": 4}, ShardingError, "3"),
        (
            "mixtral",
            3,
            {"autoep_size": 2},
            ConfigError,
            "expert_parallel.autoep_size",
        ),
    ],
)
def test_what_cannot_be_spread_is_said(kind: str, ranks: int, section: dict[str, Any], error: type, named: str) -> None:
    model = transformer_model(kind)
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    config = make_config(1, expert_parallel={"enabled": True, **section})

    def body(communicator: Communicator) -> None:
        with pytest.raises(error) as caught:
            polyaccel.initialize(model=copies[communicator.rank], config=config)
        assert named in str(caught.value)

    run_threads(ranks, body)
