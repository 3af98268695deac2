"""`torch.inference_mode` around any use of a model under stage 3 leaves training as it would have been without."""

from __future__ import annotations

import pytest
import torch
from parity_models import assert_bitwise, make_config, on_threads, snapshot
from stage3_models import Gpt, seeded, token_loss

import polyaccel
from polyaccel import zero

FREES = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 64}
KEEPS = {
    **FREES,
    "stage3_max_reuse_distance": 10**9,
    "stage3_prefetch_bucket_size": 10**9,
    "stage3_max_live_parameters": 10**9,
}
gpt = seeded(Gpt)


def train(engine, step, rank, between=lambda: None):
    loss = token_loss(engine, step, 0, rank)
    between()
    engine.backward(loss)
    engine.step()


@torch.inference_mode()
def evaluate(engine, rank):
    assert token_loss(engine, 9, 0, rank).is_inference()


@torch.inference_mode()
def read(engine, rank):
    with zero.GatheredParameters(list(engine.module.parameters())):
        assert engine.module.head.weight.sum().isfinite()


@torch.inference_mode()
def save(engine, rank):
    assert engine.module_state_dict()["head.weight"].isfinite().all()


@torch.inference_mode()
def load(engine, rank):
    engine.load_module_state_dict(engine.module_state_dict())


@torch.inference_mode()
def load_into_module(engine, rank):
    engine.module.load_state_dict(engine.module_state_dict())


@pytest.mark.parametrize("keys", [FREES, KEEPS], ids=["freed", "kept"])
@pytest.mark.parametrize("use", [evaluate, read, save, load, load_into_module])
def test_training_goes_on_as_if_nothing_had_been_looked_at(use, keys):
    """Before the first step, between two steps, and between a forward pass and its backward."""

    def work(communicator, model, looks):
        engine = polyaccel.initialize(model=model, config=make_config(3, zero=keys))[0]
        look = (lambda: use(engine, communicator.rank)) if looks else (lambda: None)
        is_reading = use in (evaluate, read, save)
        for step in range(3):
            look()
            train(engine, step, communicator.rank, look if is_reading else lambda: None)
        engine.destroy()
        return snapshot(model)

    found, wanted = (on_threads(2, work, gpt, looks)[0] for looks in (True, False))
    assert_bitwise(found, wanted)
