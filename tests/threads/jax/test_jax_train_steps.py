"""Several steps in one call have the numbers of as many calls, bit for bit."""

from __future__ import annotations

import logging

import numpy as np
import pytest

pytest.importorskip("optax")

import jax_steps as steps

from polyaccel.errors import PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads

SCANNED = [
    ("warm-up", 2, 2, (1, 1, 1, 2)),
    ("injected", 0, 1, (1,) * 4),
    ("bf16", 1, 1, (1,) * 4),
    ("fp16", 2, 2, (1,) * 8),
    ("muon", 3, 2, (1,) * 3),
    ("fp16", 3, 1, (1,) * 8),
]
"""fp16 begins with a loss scale that skips steps. At stage 3, and under muon, parameters rest as leaves."""
ALONE = [("aux", 0, 1, (1,) * 3), ("views", 2, 2, (1,) * 3)]


@pytest.mark.parametrize(("name", "stage", "accumulation", "sizes"), SCANNED)
def test_scanned_steps(caplog, name, stage, accumulation, sizes):
    losses = run_threads(1, steps.compare, name, stage, accumulation, 1, sizes)[0]
    assert len(losses) == len(sizes)
    assert all(map(np.isfinite, losses))
    assert not [record for record in caplog.records if record.name == "polyaccel.jax.train_steps"]


@pytest.mark.parametrize(("name", "stage", "accumulation", "sizes"), ALONE)
def test_steps_that_need_the_host(caplog, name, stage, accumulation, sizes):
    with caplog.at_level(logging.WARNING):
        run_threads(1, steps.compare, name, stage, accumulation, 1, sizes)
    assert len([record for record in caplog.records if record.name == "polyaccel.jax.train_steps"]) == 1


def test_calls_between_steps_are_made():
    def go(ranks):
        engine, seen = steps.engine_of("adam", 2, 1), []
        engine.after_step.append(seen.append)
        batches = steps.batches_of(0, 1, 1, (1, 1, 1))
        assert [float(loss) for loss in engine.train_steps(iter(batches))] == seen
        for wrong in ([], batches[0]):
            with pytest.raises(PolyaccelError):
                engine.train_steps(wrong)
        assert engine.global_steps == 3

    run_threads(1, go)
