"""Replica groups of processes over gloo: a delayed exchange of two fragments, and memory that a group shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replica_models import Model, Outer, make_config, run_steps, train_plainly, weights_of
from torch import Tensor

import polyaccel

PATIENCE_S = 240.0


def train(communicator: Any, stage: int, section: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of this rank's group after seven steps."""
    torch.manual_seed(3 if communicator.rank == 0 else 50 + communicator.rank)
    engine, *_ = polyaccel.initialize(model=Model(), config=make_config(stage, 2, section))
    run_steps(engine, 1, 7)
    state = weights_of(engine)
    engine.destroy()
    return state


@pytest.mark.parametrize(("backend", "stage", "outer"), [("gloo", 3, Outer(every=3, delay=2)), ("shm", 2, Outer())])
def test_outer_steps_of_processes(rank_pool, backend, stage, outer):
    found = rank_pool(4, backend).run(train, stage, outer.section, timeout_s=PATIENCE_S)
    expected = train_plainly(2, 2, 7, outer)
    for rank, weights in enumerate(found):
        for name, value in expected[rank // 2].items():
            torch.testing.assert_close(weights[name], value, rtol=2e-5, atol=2e-6)
