"""Ranks that are processes, joined by every backend, share a model of transformers by the config alone: its layers, its
layers and the tokens between them, or its sequences. They train what plain torch trains in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from backend_marks import over
from parity_models import make_config
from transformer_models import transformer_batch, transformer_model

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.procs import RankPool

STEPS, LR = 3, 2e-3
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (3, {"tensor_parallel": {"autotp_size": 2}}),
    "tensor and tokens": (1, {"tensor_parallel": {"autotp_size": 2, "sequence_sharded": True}}),
    "ulysses": (3, {"sequence_parallel_size": 2, "sequence_parallel": {"method": "ulysses"}}),
    "ring": (2, {"sequence_parallel_size": 2, "sequence_parallel": {"method": "ring"}}),
}


def batch_of(step: int) -> dict[str, Any]:
    return transformer_batch("llama", seed=step, length=11) | {"use_cache": False}


@cache
def plainly() -> tuple[list[float], list[float]]:
    """Losses and norms of plain torch."""
    model = transformer_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch_of(step)).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return losses, norms


def trained(communicator: Communicator, way: str) -> tuple[str, list[float], list[float]]:
    """One rank's backend, losses and norms."""
    stage, shared = WAYS[way]
    config = make_config(stage, optimizer={"type": "AdamW", "params": {"lr": LR}}, gradient_clipping=1.0, **shared)
    engine, *_ = polyaccel.initialize(model=transformer_model("llama"), config=config)
    losses, norms = [], []
    for step in range(STEPS):
        loss = engine(**batch_of(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return communicator.backend, losses, norms


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", over("gloo", "shm", "mpi"))
def test_ranks_share_a_model_over_every_backend(rank_pool: Callable[..., RankPool], backend: str, way: str) -> None:
    losses, norms = plainly()
    results = rank_pool(2, backend).run(trained, way)
    assert {name for name, _, _ in results} == {backend}
    for _, _, found in results:
        assert found == pytest.approx(norms, rel=1e-4)
    means = [sum(values) / 2 for values in zip(*(found for _, found, _ in results), strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
