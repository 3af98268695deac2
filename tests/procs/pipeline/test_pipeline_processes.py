"""Stages of a pipeline as processes, over backends whose messages take other ways: the losses of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from backend_marks import over
from pipeline_models import batches, pipeline_config, plain_model, trained

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.procs import RankPool


def losses_of(communicator: Communicator, steps: int) -> tuple[list[float], list[float | None]]:
    engine: Any
    engine, *_ = polyaccel.initialize(model=plain_model(2), config=pipeline_config(2))
    try:
        losses, norms = [], []
        for step in range(steps):
            losses.append(float(engine.train_batch(batches(step, 0))))
            norms.append(engine.get_global_grad_norm())
        return losses, norms
    finally:
        engine.destroy()


@pytest.mark.parametrize("backend", over("gloo", "shm", "mpi", "ccl"))
def test_stages_are_processes(rank_pool: Callable[..., RankPool], backend: str) -> None:
    expected = trained(1, 1, pipeline_config(2))
    found = rank_pool(2, backend).run(losses_of, 3)
    assert found == [(expected.losses[0], expected.norms)] * 2
