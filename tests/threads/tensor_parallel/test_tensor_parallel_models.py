"""Models of transformers cut over ranks: losses, logits and every gradient are those of one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pairwise import combinations
from torch import Tensor, nn
from transformer_models import KINDS, transformer_batch, transformer_model

from polyaccel.comm.base import Communicator
from polyaccel.core.block import are_disjoint
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.sharding.tensor_shard import cuts_of
from polyaccel.torch.tensor_parallel.make_plan import make_plan
from polyaccel.torch.tensor_parallel.parallelize import local_slice, parallelize_module

Result = dict[str, Any]


def run(model: nn.Module, kind: str) -> Result:
    """A forward and a backward pass: loss, logits, gradients by name."""
    out = model(**transformer_batch(kind))
    out.loss.backward()
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), "grads": gradients(model)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def on_ranks(model: nn.Module, ranks: int, body: Any) -> list[Any]:
    """`body(copy of the model, cut; communicator)` on every rank."""
    plan = make_plan(model, ranks)
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def cut(communicator: Communicator) -> Any:
        mine = copies[communicator.rank]
        parallelize_module(mine, communicator, plan)
        return body(mine, communicator)

    return run_threads(ranks, cut)


def assert_same(found: list[Result], wanted: Result, cuts: list[dict[str, Any]]) -> None:
    """Each rank has the whole loss and logits; its gradient of a block is that block of the whole gradient, and what
    several ranks hold is the mean of theirs."""
    for result in found:
        torch.testing.assert_close(result["loss"], wanted["loss"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(result["logits"], wanted["logits"], rtol=1e-5, atol=2e-5)
        assert result["grads"].keys() == wanted["grads"].keys()
    for name, whole in wanted["grads"].items():
        if name in cuts[0]:
            assert are_disjoint([each[name].block for each in cuts])
            assert sum(each[name].block.numel for each in cuts) == whole.numel()
            for result, each in zip(found, cuts, strict=True):
                assert_close(name, result["grads"][name], local_slice(whole, each[name].block))
        else:
            assert_close(name, torch.stack([result["grads"][name] for result in found]).mean(0), whole)


def assert_close(name: str, found: Tensor, wanted: Tensor) -> None:
    bound = 1e-5 * max(float(wanted.abs().max()), 1.0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=bound, msg=lambda text: f"{name}: {text}")


@combinations(ranks=[2, 3, 4], kind=list(KINDS))
def test_a_cut_model_is_the_whole_one(kind: str, ranks: int) -> None:
    check(transformer_model(kind), kind, ranks)


@pytest.mark.parametrize(
    "changes",
    [
        {"alibi": True},
        {"alibi": True, "multi_query": False},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_attention_heads": 6},
    ],
    ids=["alibi", "alibi-all-keys", "grouped"],
)
def test_the_forms_of_one_architecture_are_told_apart(changes: dict[str, Any]) -> None:
    check(transformer_model("falcon", **changes), "falcon", 2)


def check(model: nn.Module, kind: str, ranks: int) -> None:
    wanted = run(copy.deepcopy(model), kind)

    def body(mine: nn.Module, communicator: Communicator) -> Any:
        found = cuts_of(mine)
        named = {name: found[p] for name, p in mine.named_parameters(remove_duplicate=False) if p in found}
        assert all(p.shape == each.block.local_shape for p, each in found.items())
        return run(mine, kind), named

    results = on_ranks(model, ranks, body)
    assert_same([result for result, _ in results], wanted, [cuts for _, cuts in results])
