"""Scripts give the parameters of the whole model: a stage trains those that it has, in the groups that they are in."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hf_models import VOCABULARY, tiny
from pipeline_models import MICRO_BATCHES, batches, pipeline_config, plain_layers
from torch import nn

import polyaccel
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.pipeline.module import PipelineModule


def whole(model: nn.Module) -> Any:
    """An iterator, as most scripts give it."""
    return model.parameters()


def with_decay(model: nn.Module) -> Any:
    """Groups of weights with decay and without it; some trained parameters are in none."""
    named = [(name, one) for name, one in model.named_parameters() if "embed" not in name]
    return [
        {"params": [one for _, one in named if one.dim() > 1], "weight_decay": 0.5},
        {"params": [one for _, one in named if one.dim() == 1], "weight_decay": 0.0},
    ]


def sentences(step: int) -> list[Any]:
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randint(3, VOCABULARY, (2, 6), generator=generator) for _ in range(MICRO_BATCHES)]
    return [{"input_ids": words, "labels": words} for words in drawn]


def numbers(step: int) -> list[Any]:
    return list(batches(step, 0))


def layers() -> nn.Sequential:
    model = nn.Sequential(*plain_layers())
    model.loss_fn = nn.functional.mse_loss
    return model


def losses(stages: int, model: nn.Module, make: Any, give: Any, micro: int) -> list[list[float]]:
    config = pipeline_config(1, pipeline={"stages": stages}, train_micro_batch_size_per_gpu=micro)

    def run(communicator: Any) -> list[float]:
        own = deepcopy(model)
        if stages == 1 and isinstance(own, nn.Sequential):
            own = PipelineModule(own, 1, loss_fn=own.loss_fn)
        engine, *_ = polyaccel.initialize(model=own, model_parameters=give(own), config=config)
        found = [float(engine.train_batch(iter(make(step)))) for step in range(3)]
        engine.destroy()
        return found

    return run_threads(stages, run)


@pytest.mark.parametrize("give", [whole, with_decay])
def test_blocks_of_a_model(give: Any) -> None:
    model = tiny("llama", dtype=torch.float32)
    (alone,) = losses(1, model, sentences, give, 2)
    for found in losses(2, model, sentences, give, 2):
        assert found == pytest.approx(alone, rel=1e-6)


def test_a_list_of_layers() -> None:
    (alone,) = losses(1, layers(), numbers, with_decay, 4)
    for found in losses(2, layers(), numbers, with_decay, 4):
        assert found == pytest.approx(alone, rel=1e-6)
