"""Optimizers of bitsandbytes and torchao whose states have 8 bits or 4, passed by a script: plain torch's numbers.

Their blocks begin where a parameter begins, so each parameter stays whole on one rank. `make test-quantized` turns
compilation off: both packages compile their updates, which takes minutes, and bitsandbytes falls back where that fails,
as it may where ranks are threads.
"""

from __future__ import annotations

from threading import Lock

import pytest
import torch
from torch import nn

import polyaccel
from polyaccel.testkit.ranks.threads import run_threads

bnb = pytest.importorskip("bitsandbytes", reason="make test-quantized has it")
torchao = pytest.importorskip("torchao.optim", reason="make test-quantized has it")

STEPS = 3
SMALL = {"min_8bit_size": 1}
OPTIMIZERS = {
    "torchao AdamW8bit": (torchao.AdamW8bit, {}),
    "torchao AdamW4bit": (torchao.AdamW4bit, {}),
    "torchao Adam8bit": (torchao.Adam8bit, {}),
    "bitsandbytes AdamW8bit": (bnb.optim.AdamW8bit, SMALL),
    "bitsandbytes Lion8bit": (bnb.optim.Lion8bit, SMALL),
    "bitsandbytes Adagrad8bit": (bnb.optim.Adagrad8bit, SMALL),
    "bitsandbytes SGD8bit": (bnb.optim.SGD8bit, SMALL | {"momentum": 0.9}),
    "bitsandbytes LAMB8bit": (bnb.optim.LAMB8bit, {}),
    "bitsandbytes AdEMAMix8bit": (bnb.optim.AdEMAMix8bit, SMALL),
    "bitsandbytes AdamW": (bnb.optim.AdamW, {}),
}
_BUILDING = Lock()


def built(name):
    """The same model on all ranks, which are threads with one generator, and its optimizer."""
    kind, settings = OPTIMIZERS[name]
    with _BUILDING:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 130), nn.GELU(), nn.Linear(130, 64))
        return model, kind(model.parameters(), lr=1e-3, **settings)


def inputs(step, rank):
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def plain(name):
    model, optimizer = built(name)
    for at in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (model(inputs(at, rank)).square().mean() / 2).backward()
        optimizer.step()
    return model.state_dict()


def trained(name, stage):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 6000, "stage3_param_persistence_threshold": 10},
        "zero_allow_untested_optimizer": True,
    }

    def go(communicator):
        model, optimizer = built(name)
        engine = polyaccel.initialize(model=model, optimizer=optimizer, config=config)[0]
        for at in range(STEPS):
            engine.backward(engine(inputs(at, communicator.rank)).square().mean())
            engine.step()
        found = {key: value.detach().clone() for key, value in engine.module_state_dict().items()}
        engine.destroy()
        return found

    return run_threads(2, go)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_have_the_bits_of_plain_torch(name, stage):
    wanted = plain(name)
    for found in trained(name, stage):
        assert {key for key, value in wanted.items() if not torch.equal(found[key], value)} == set()
