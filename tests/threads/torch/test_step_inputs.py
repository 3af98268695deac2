"""Sequences that grow, and the share of layers that stays: by the papers' formulas, and as plain torch trains."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from parity_models import drawn_from, make_config, on_threads
from torch import Tensor, nn

import polyaccel
from polyaccel.config import load_config
from polyaccel.engine.policies.step_inputs import step_input_policy_of
from polyaccel.errors import ConfigError

LINEAR: dict[str, Any] = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 1024,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 40000, "difficulty_step": 8},
}
"""As DeepSpeed's documentation writes it."""


def lengths(section: dict[str, Any], steps: range) -> list[int]:
    policy = step_input_policy_of(load_config({"curriculum_learning": section}))
    assert policy.length is not None
    return [policy.length.at(step) for step in steps]


def test_lengths_grow_by_the_papers_formulas() -> None:
    steps = range(1, 45000, 977)
    wanted = [math.floor((8 + 1016 * min(step / 40000, 1.0)) / 8 + 1e-9) * 8 for step in steps]
    assert lengths(LINEAR, steps) == wanted
    root = {**LINEAR, "schedule_type": "fixed_root", "schedule_config": {**LINEAR["schedule_config"], "root_degree": 2}}
    wanted = [math.floor((8 + 1016 * math.sqrt(min(step / 40000, 1.0))) / 8 + 1e-9) * 8 for step in steps]
    assert lengths(root, steps) == wanted


def test_stairs_end_after_their_last_step() -> None:
    numbers = {"difficulty": [2, 4, 6], "max_step": [3, 5]}
    stairs = {"enabled": True, "schedule_type": "fixed_discrete", "schedule_config": numbers}
    assert lengths(stairs, range(1, 9)) == [2, 2, 2, 4, 4, 6, 6, 6]


def test_the_share_of_layers_falls_by_the_papers_formula() -> None:
    policy = step_input_policy_of(
        load_config({"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.01}})
    )
    assert policy.layers is not None
    assert [policy.layers.at(done) for done in (0, 7, 10000)] == [1.0, 0.5 * math.exp(-0.07) + 0.5, pytest.approx(0.5)]


@pytest.mark.parametrize(
    "change",
    [
        {"max_difficulty": None},
        {"min_difficulty": 2048},
        {"min_difficulty": 4},
        {"schedule_type": "fixed_root"},
        {"schedule_type": "fixed_discrete"},
        {"schedule_config": {"difficulty_step": 8}},
    ],
)
def test_numbers_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        load_config({"curriculum_learning": {**LINEAR, **change}})


class Words(nn.Module):
    """Next-token loss of a bag of words, which counts its tokens; some take the length themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.seen: list[int] = []

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.seen.append(tokens.shape[1])
        hidden = self.embed(tokens).cumsum(1)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class CutsItself(Words):
    def forward(self, tokens: Tensor, labels: Tensor, curriculum_seqlen: int = 12) -> Tensor:  # type: ignore[override]
        return super().forward(tokens[:, :curriculum_seqlen], labels[:, :curriculum_seqlen])


GROWING = {
    **LINEAR,
    "min_difficulty": 2,
    "max_difficulty": 12,
    "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 2},
}


def words(kind: type = Words) -> Any:
    with drawn_from(0):
        return kind()


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, 16, (3, 12), generator=torch.Generator().manual_seed(10 * step + rank))


def train(engine: Any, first: int, last: int, rank: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(tokens(step, rank), labels=tokens(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def plain(world: int, lengths: list[int]) -> list[float]:
    model, losses = words(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, length in enumerate(lengths):
        each = [model(tokens(step, rank)[:, :length], tokens(step, rank)[:, :length]) for rank in range(world)]
        optimizer.zero_grad()
        torch.stack(each).mean().backward()
        optimizer.step()
        losses.append(each[0].item())
    return losses


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("kind", [Words, CutsItself])
def test_a_growing_sequence_trains_as_in_plain_torch(stage: int, world: int, kind: type, tmp_path: Any) -> None:
    config = make_config(stage, curriculum_learning=GROWING)
    config["optimizer"]["params"]["weight_decay"] = 0.01

    def run(communicator: Any, model: Any) -> Any:
        engine = polyaccel.initialize(model=model, config=config)[0]
        losses = train(engine, 0, 3, communicator.rank)
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        engine = polyaccel.initialize(model=model, config=config)[0]
        engine.load_checkpoint(str(tmp_path))
        losses += train(engine, 3, 7, communicator.rank)
        engine.eval()(tokens(0, 0), labels=tokens(0, 0))
        return losses, model.seen

    losses, seen = on_threads(world, run, lambda: words(kind))[0]
    grown = [4, 6, 8, 10, 12, 12, 12]
    assert seen == [*grown, 12]
    assert losses == pytest.approx(plain(world, grown), rel=1e-5)


class Dropped(Words):
    def __init__(self) -> None:
        super().__init__()
        self.thetas: list[float] = []

    def forward(self, tokens: Tensor, labels: Tensor, **named: Any) -> Tensor:
        if named:
            assert named["progressive_layer_drop"] is True
            self.thetas.append(named["pld_theta"])
        return super().forward(tokens, labels)


def test_a_model_gets_the_share_of_layers_in_training_alone() -> None:
    model = words(Dropped)
    drop = {"enabled": True, "theta": 0.5, "gamma": 0.1}
    engine = polyaccel.initialize(model=model, config=make_config(0, progressive_layer_drop=drop))[0]
    train(engine, 0, 3, 0)
    engine.eval()(tokens(0, 0), labels=tokens(0, 0))
    assert model.thetas == pytest.approx([1.0, 0.5 + 0.5 * math.exp(-0.1), 0.5 + 0.5 * math.exp(-0.2)])
