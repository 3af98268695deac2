"""Processes that share experts have the bits of processes that do not, whether they read rows from one another's memory
or send them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend_marks import over
from parity_models import make_config
from torch import Tensor, nn

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.ops import matmul_autotune
from polyaccel.ops.native import native
from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.torch.experts import Mixture

WIDTH, STEPS = 12, 3

pytestmark = pytest.mark.skipif(native().library is None, reason="csrc was not compiled")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (Mixture(WIDTH, self.expert, 5, k=2) for _ in range(2))

    @staticmethod
    def expert() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(x + first.output)
        loss: Tensor = second.output.square().mean() + first.loss + second.loss
        return loss


def trained(communicator: Communicator, experts: int, most: int) -> Any:
    """One rank's backend, losses, norms and values; batches have sizes of their own."""
    torch.manual_seed(1)
    config: dict[str, Any] = make_config(
        2,
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        expert_parallel={"enabled": True, "autoep_size": experts},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(matmul_autotune.VARIABLE, "on")
        engine, *_ = polyaccel.initialize(model=Model(), config=config)
    losses, norms = [], []
    rank, last = communicator.rank, communicator.world_size - 1
    for step in range(STEPS):
        tokens = 1 if step == 1 and rank == last else most + rank
        x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    values = {name: value.numpy().tobytes() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return communicator.backend, losses, norms, values


@pytest.mark.parametrize("backend", over("gloo", "shm"))
def test_processes_that_share_experts_have_the_bits_of_those_that_do_not(
    rank_pool: Callable[..., RankPool], backend: str
) -> None:
    pool = rank_pool(2, backend)
    shared, alone = pool.run(trained, 2, 40), pool.run(trained, 1, 40)
    assert {name for name, *_ in shared} == {backend}
    assert shared == alone
