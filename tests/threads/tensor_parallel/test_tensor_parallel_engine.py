"""Models of transformers under the engine, by config alone: tensor ranks beside every stage of ZeRO train what one rank
trains, and checkpoints go from any number of them to any other."""

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
from transformers import LlamaForCausalLM

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.errors import ShardingError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.sharding.tensor_shard import cuts_of
from polyaccel.torch.tensor_parallel.parallelize import local_slice
from polyaccel.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

STEPS = 3
LR = 2e-3
KINDS = ("llama", "qwen3", "gpt2", "bert", "t5", "mixtral")
SAMPLE = [
    ("llama", 2, 2, 3),
    ("llama_two_keys", 3, 1, 1),
    ("qwen3", 4, 1, 2),
    ("gpt2", 3, 2, 0),
    ("bert", 2, 1, 3),
    ("t5", 2, 2, 1),
    ("mixtral", 4, 1, 3),
]
"""Kind, tensor ranks, data ranks, stage: `make test` runs these, `make test-parity` all."""
ROWS = list(product(KINDS, (2, 3, 4), (1, 2), range(4))) if os.environ.get(VARIABLE) == FULL else SAMPLE


def config_of(stage: int, tensor: int, **changes: Any) -> dict[str, Any]:
    return make_config(
        stage,
        zero={"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30},
        optimizer={"type": "AdamW", "params": {"lr": LR}},
        gradient_clipping=1.0,
        tensor_parallel={"autotp_size": tensor, **changes},
    )


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)


@pytest.mark.parametrize(("kind", "tensor", "data", "stage"), ROWS)
def test_tensor_ranks_train_what_one_rank_trains(kind: str, tensor: int, data: int, stage: int) -> None:
    model = transformer_model(kind)
    losses, norms, _ = trained_plainly(model, kind, data, optimizer_of)
    copies = [copy.deepcopy(model) for _ in range(tensor * data)]

    def train(communicator: Communicator) -> tuple[list[float], list[float]]:
        engine, *_ = polyaccel.initialize(model=copies[communicator.rank], config=config_of(stage, tensor))
        found = trained_by(engine, kind, communicator.rank // tensor)
        engine.destroy()
        return found

    for rank, (found, of_norms) in enumerate(run_threads(tensor * data, train)):
        assert found == pytest.approx(losses[rank // tensor], rel=1e-5)
        assert of_norms == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("kind", ["llama_two_keys", "t5"])
def test_checkpoints_move_between_numbers_of_tensor_ranks(kind: str, tmp_path: Any) -> None:
    """Trained by two, loaded and saved by four, loaded by one: every value and state of AdamW as it was, bit by bit."""
    model = transformer_model(kind)

    def run(tensor: int, stage: int, load: str | None, save: str | None) -> list[Any]:
        copies = [copy.deepcopy(model) for _ in range(tensor)]

        def body(communicator: Communicator) -> Any:
            mine = copies[communicator.rank]
            engine, *_ = polyaccel.initialize(model=mine, config=config_of(stage, tensor))
            if load is not None:
                engine.load_checkpoint(str(tmp_path), load)
            else:
                step_once(engine, kind, 0, 0)
            if save is not None:
                engine.save_checkpoint(str(tmp_path), save)
            cuts = {name: cut for name, p in mine.named_parameters() for q, cut in cuts_of(mine).items() if p is q}
            states: dict[str, dict[str, torch.Tensor]] = {}
            for name, parameter in mine.named_parameters():
                states[name] = {
                    "param": safe_get_full_fp32_param(parameter).clone(),
                    "exp_avg": safe_get_full_optimizer_state(parameter, "exp_avg").clone(),
                    "exp_avg_sq": safe_get_full_optimizer_state(parameter, "exp_avg_sq").clone(),
                }
            engine.destroy()
            return states, cuts

        return run_threads(tensor, body)

    first = run(2, 2, None, "two")
    run(4, 3, "two", "four")
    ((whole, _),) = run(1, 0, "four", None)
    for states, cuts in first:
        assert states.keys() == whole.keys()
        for name, kinds in states.items():
            for state, value in kinds.items():
                wanted = whole[name][state]
                wanted = local_slice(wanted, cuts[name].block) if name in cuts else wanted
                assert torch.equal(value, wanted), (name, state)


def test_layers_that_a_config_names_are_cut_and_no_others() -> None:
    specs = [
        {"patterns": [r".*mlp\.(gate|up)_proj\.weight"]},
        {"patterns": [r".*mlp\.down_proj\.weight"], "partition_type": "row"},
    ]
    model = transformer_model("llama")
    copies = [copy.deepcopy(model) for _ in range(2)]
    wanted = model(**transformer_batch("llama")).loss.item()

    def body(communicator: Communicator) -> tuple[float, set[str]]:
        mine = copies[communicator.rank]
        config = config_of(1, 2, partition_config={"layer_specs": specs}, preset_model="llama")
        engine, *_ = polyaccel.initialize(model=mine, config=config)
        found = cuts_of(mine)
        loss = step_once(engine, "llama", 0, 0)
        engine.destroy()
        return loss, {name.split(".")[-2] for name, p in mine.named_parameters() if p in found}

    for loss, names in run_threads(2, body):
        assert names == {"gate_proj", "up_proj", "down_proj"}
        assert loss == pytest.approx(wanted, rel=1e-5)


def test_logits_stay_cut_where_the_config_says_so() -> None:
    model = transformer_model("llama")
    copies = [copy.deepcopy(model) for _ in range(2)]
    losses, _, _ = trained_plainly(model, "llama", 1, optimizer_of)

    def body(communicator: Communicator) -> list[float]:
        config = config_of(3, 2, vocab_parallel_lm_head=True)
        engine, *_ = polyaccel.initialize(model=copies[communicator.rank], config=config)
        assert engine(**transformer_batch("llama")).logits.shape[-1] == 34 - communicator.rank
        found = [step_once(engine, "llama", step, 0) for step in range(STEPS)]
        engine.destroy()
        return found

    for found in run_threads(2, body):
        assert found == pytest.approx(losses[0], rel=1e-5)


def test_a_model_whose_values_are_deferred_is_cut_weight_by_weight() -> None:
    config = transformer_model("llama").config

    def build() -> nn.Module:
        torch.manual_seed(5)
        return LlamaForCausalLM(config)

    plain = build()
    with polyaccel.zero.Init():
        copies = [build() for _ in range(2)]
    losses, _, _ = trained_plainly(plain, "llama", 1, optimizer_of)

    def body(communicator: Communicator) -> list[float]:
        mine = copies[communicator.rank]
        engine, *_ = polyaccel.initialize(model=mine, config=config_of(3, 2))
        assert cuts_of(mine)
        found = [step_once(engine, "llama", step, 0) for step in range(STEPS)]
        engine.destroy()
        return found

    for found in run_threads(2, body):
        assert found == pytest.approx(losses[0], rel=1e-5)


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    def body(communicator: Communicator) -> str:
        with pytest.raises(ShardingError) as caught:
            polyaccel.initialize(model=nn.Linear(4, 4), config=config_of(0, 2))
        assert caught.value.value == "Linear"
        return caught.value.hint

    for hint in run_threads(2, body):
        assert "tensor_parallel.partition_config.layer_specs" in hint
