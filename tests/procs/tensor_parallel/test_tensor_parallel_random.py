"""Random numbers under tensor parallelism: alike where ranks compute the same, other ones where each has features of
its own. In processes, for threads share torch's default generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformer_models import transformer_batch, transformer_model

from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.torch.tensor_parallel.make_plan import make_plan
from polyaccel.torch.tensor_parallel.parallelize import parallelize_module
from polyaccel.torch.tensor_parallel.ranks import TensorRanks
from polyaccel.torch.tensor_parallel.regions import Regions

Pools = Callable[..., RankPool]
RESIDUAL = {"gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.2}, "bert": {"hidden_dropout_prob": 0.3}}
INSIDE = {
    "gpt2": {"attn_pdrop": 0.3, "resid_pdrop": 0.2},
    "t5": {"dropout_rate": 0.2},
    "llama": {"attention_dropout": 0.3},
}


def loss_and_gradients(model: nn.Module, kind: str) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(**transformer_batch(kind)).loss
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters()]


def cut(kind: str, communicator: Communicator, changes: dict[str, Any]) -> nn.Module:
    model = transformer_model(kind, **changes)
    parallelize_module(model, communicator, make_plan(model, communicator.world_size))
    return model


def regions_drawn(communicator: Communicator) -> dict[str, list[float]]:
    """What is drawn before, in, between and after three regions, of which the second draws nothing."""
    regions = Regions(TensorRanks(communicator))
    torch.manual_seed(11)
    here = torch.zeros(())
    found: dict[str, list[float]] = {"outside": [], "inside": []}

    def draw(where: str) -> None:
        found[where].append(torch.rand(()).item())

    draw("outside")
    regions.enter(here)
    regions.enter(here)  # another layer that reads the same input
    draw("inside")
    regions.leave()
    draw("outside")
    regions.enter(here)
    regions.leave()
    draw("outside")
    regions.enter(here)
    draw("inside")
    regions.leave()
    regions.leave()
    draw("outside")
    return found


def unmoved(communicator: Communicator) -> bool:
    """Whether a region that draws nothing leaves the numbers as they were."""
    regions = Regions(TensorRanks(communicator))
    torch.manual_seed(11)
    wanted = torch.rand(4)
    torch.manual_seed(11)
    regions.enter(wanted)
    regions.leave()
    return torch.equal(torch.rand(4), wanted)


def trained(communicator: Communicator, kind: str, changes: dict[str, Any]) -> float:
    return loss_and_gradients(cut(kind, communicator, changes), kind)[0]


def recomputed(communicator: Communicator, kind: str, changes: dict[str, Any]) -> tuple[float, bool]:
    """The loss, and whether gradients are the same, bit by bit, where activations are computed anew."""
    model = cut(kind, communicator, changes)
    loss, wanted = loss_and_gradients(model, kind)
    model.activation_checkpointing_enable()
    model.config.use_cache = False
    again, found = loss_and_gradients(model, kind)
    same = loss == again and all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    return loss, same


def test_regions_draw_apart_and_everything_else_alike(rank_pool: Pools) -> None:
    first, second = rank_pool(2).run(regions_drawn)
    assert first["outside"] == second["outside"]
    inside = first["inside"] + second["inside"]
    assert len(set(inside + first["outside"])) == len(inside) + len(first["outside"])
    assert rank_pool(2).run(unmoved) == [True, True]


@pytest.mark.parametrize("kind", list(RESIDUAL))
def test_dropout_outside_of_regions_is_that_of_one_rank(kind: str, rank_pool: Pools) -> None:
    wanted, _ = loss_and_gradients(transformer_model(kind, **RESIDUAL[kind]), kind)
    plain, _ = loss_and_gradients(transformer_model(kind), kind)
    assert wanted != pytest.approx(plain, rel=1e-3)
    for found in rank_pool(2).run(trained, kind, RESIDUAL[kind]):
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind", list(INSIDE))
def test_dropout_inside_of_regions_comes_back_where_activations_are_recomputed(kind: str, rank_pool: Pools) -> None:
    (first, first_same), (second, second_same) = rank_pool(2).run(recomputed, kind, INSIDE[kind])
    assert first == second  # what leaves the regions is added up
    assert first_same
    assert second_same
