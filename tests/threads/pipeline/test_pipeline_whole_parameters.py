"""Optimizers that look at whole parameters, on the stages of a pipeline: bits and checkpoints of one stage."""

from __future__ import annotations

import pytest
import torch
from pipeline_models import batches, pipeline_config, plain_model

import polyaccel
from polyaccel.testkit.ranks.threads import run_threads


def adafactor(groups):
    return torch.optim.Adafactor(groups, lr=1e-2)


def go(stages, data, kind, steps, *, load=None, save=None):
    """The whole model after `steps`."""
    config = pipeline_config(2, zero_optimization={"stage": 1, "reduce_bucket_size": 100})
    config["optimizer"] = {"type": "Muon", "params": {"lr": 0.02}}
    given = {} if kind == "Muon" else {"optimizer": adafactor}

    def run(communicator):
        engine, *_ = polyaccel.initialize(model=plain_model(stages), config=config, **given)
        if load is not None:
            engine.load_checkpoint(str(load))
        for step in steps:
            engine.train_batch(batches(step, communicator.rank % data))
        if save is not None:
            engine.save_checkpoint(str(save))
        values = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return values

    return run_threads(stages * data, run)[0]


@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
@pytest.mark.parametrize(("first", "second"), [((1, 2), (2, 2)), ((2, 1), (1, 1))], ids=str)
def test_stages_change_nothing_and_resume_from_each_other(kind, first, second, tmp_path):
    wanted = go(*first, kind, range(4), save=None)
    found = go(*second, kind, range(4))
    assert {name for name, value in wanted.items() if not torch.equal(found[name], value)} == set()
    go(*first, kind, range(2), save=tmp_path)
    found = go(*second, kind, range(2, 4), load=tmp_path)
    assert {name for name, value in wanted.items() if not torch.equal(found[name], value)} == set()
