"""The config's Muon at every stage, on one to four ranks, with what may stand next to it.

Compared with the paper's formula in float64. `make test` runs a sample, `make test-slow` the rest.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from paper_muon import SETTINGS, PaperMuon
from parity_models import make_config
from transformer_models import transformer_batch, transformer_model

import polyaccel
from polyaccel import zero
from polyaccel.testkit.ranks.threads import run_threads

STEPS = 2
SECTIONS = {
    "tensor": {"tensor_parallel": {"autotp_size": 2}},
    "experts": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
}
ROWS = [
    (variant, stage, world)
    for variant, stage, world in product(
        ("plain", "tensor", "experts", "accumulation", "zero.Init"), range(4), (1, 2, 3, 4)
    )
    if variant not in SECTIONS or world % 2 == 0
]


def seeds(step, rank, micro_batches):
    """The batches of a rank in a step."""
    return [100 * step + 10 * rank + micro for micro in range(micro_batches)]


def in_float64(model, kind, ranks, micro_batches):
    """Weights of plain torch, with the paper's update."""
    model = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    optimizer = PaperMuon(names, list(model.parameters()), {})
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            for seed in seeds(step, rank, micro_batches):
                (model(**transformer_batch(kind, seed=seed)).loss / (ranks * micro_batches)).backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize(("variant", "stage", "world"), ROWS)
def test_the_weights_are_those_of_the_paper_s_formula(variant, stage, world):
    kind = "mixtral" if variant == "experts" else "llama"
    micro_batches = 2 if variant == "accumulation" else 1
    axis = 2 if variant == "tensor" else 1
    model = transformer_model(kind)
    with zero.Init(enabled=variant == "zero.Init"):
        models = [transformer_model(kind) for _ in range(world)]
    config = make_config(
        stage,
        accumulation=micro_batches,
        zero={"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30},
        optimizer={"type": "Muon", "params": SETTINGS},
        **SECTIONS.get(variant, {}),
    )

    def go(communicator):
        engine, *_ = polyaccel.initialize(model=models[communicator.rank], config=config)
        for step in range(STEPS):
            for seed in seeds(step, communicator.rank // axis, micro_batches):
                engine.backward(engine(**transformer_batch(kind, seed=seed)).loss)
                engine.step()
        found = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return found

    wanted = in_float64(model, kind, world // axis, micro_batches)
    for found in run_threads(world, go):
        for name, value in wanted.items():
            assert found[name].shape == value.shape
            torch.testing.assert_close(found[name], value.detach(), rtol=0.0, atol=3e-5)
