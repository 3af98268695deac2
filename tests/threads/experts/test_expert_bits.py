"""How many ranks share experts changes no bit of a training in float32: losses, norms and values, at every stage."""

from __future__ import annotations

import copy
import os
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from pairwise import FULL, VARIABLE
from parity_models import make_config
from transformer_models import transformer_batch, transformer_model

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.ops import matmul_autotune
from polyaccel.ops.native import native
from polyaccel.testkit.ranks.threads import run_threads

STEPS = 3
CHANGES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "intermediate_size": 32},
    "qwen3_moe": {"moe_intermediate_size": 32},
    "deepseek_v3": {"moe_intermediate_size": 32},
    "olmoe": {"intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 6, "intermediate_size": 32},
}
"""torch computes a tensor's elements past a multiple of 32 otherwise than the others, and rounds them otherwise."""
KINDS = tuple(CHANGES)
SAMPLE = [("mixtral", 4, 3), ("gpt_oss", 4, 1), ("mixtral", 2, 2), ("deepseek_v3", 4, 2)]
"""Kind, ranks that share experts (all there are), stage: `make test` runs these, `make test-parity` all."""
ROWS = list(product(KINDS, (2, 4), range(4))) if os.environ.get(VARIABLE) == FULL else SAMPLE

pytestmark = pytest.mark.skipif(native().library is None, reason="csrc was not compiled")


@pytest.fixture(autouse=True)
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(matmul_autotune.VARIABLE, "on")


class Trained(NamedTuple):
    """What a rank's training left: losses, norms, and values of whole parameters."""

    losses: list[float]
    norms: list[float]
    values: dict[str, torch.Tensor]


def trained(
    kind: str, ranks: int, experts: int, stage: int, *, steps: int = STEPS, clipping: float = 1.0
) -> list[Trained]:
    model = transformer_model(kind, **CHANGES[kind])
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def train(communicator: Communicator) -> Trained:
        config = make_config(
            stage,
            zero={"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30},
            gradient_clipping=clipping,
            expert_parallel={"enabled": True, "autoep_size": experts},
        )
        engine, *_ = polyaccel.initialize(model=copies[communicator.rank], config=config)
        losses, norms = [], []
        for step in range(steps):
            loss = engine(**transformer_batch(kind, seed=10 * step + communicator.rank)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(engine.get_global_grad_norm())
        values = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return Trained(losses, norms, values)

    return run_threads(ranks, train)


@cache
def alone(kind: str, ranks: int) -> list[Trained]:
    """Every rank has all experts."""
    return trained(kind, ranks, 1, 2)


@pytest.mark.parametrize(("kind", "experts", "stage"), ROWS)
def test_ranks_that_share_experts_have_the_bits_of_ranks_that_do_not(kind: str, experts: int, stage: int) -> None:
    wanted = alone(kind, experts)
    for found, other in zip(trained(kind, experts, experts, stage), wanted, strict=True):
        assert found.losses == other.losses
        assert found.norms == other.norms
        assert all(torch.equal(value, other.values[name]) for name, value in found.values.items())


def test_where_several_ranks_have_the_same_experts_their_gradients_alone_round_otherwise() -> None:
    """Two of four ranks share: what these two add to an expert's gradient is added before what the other two add."""
    shared, alone = (trained("mixtral", 4, experts, 1, steps=1, clipping=0.0)[0] for experts in (2, 1))
    assert shared.losses == alone.losses
    differing = [name for name, value in shared.values.items() if not torch.equal(value, alone.values[name])]
    assert differing
    for name in differing:
        assert ".experts." in name
        torch.testing.assert_close(shared.values[name], alone.values[name], rtol=1e-6, atol=1e-7)
