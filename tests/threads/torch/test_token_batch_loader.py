"""Loaders of token batches: positions, other world sizes, and learning rates, compared with plain torch in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_models import drawn_from, make_config, on_threads
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import polyaccel
from polyaccel.data import DataAnalysis, IndexedDataset, IndexedDatasetBuilder
from polyaccel.data.token_batches import group_by_tokens
from polyaccel.errors import CheckpointError, ConfigError, PolyaccelError
from polyaccel.torch.token_batch_loader import TokenBatchLoader

LENGTHS = np.random.default_rng(5).integers(1, 20, 97)
SAMPLES = [torch.full((int(length),), float(number)) for number, length in enumerate(LENGTHS)]
MAX_TOKENS, GROUPS = 40, 4


def padded(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True, padding_value=-1.0)


def loader(micro: int, accumulation: int, rank: int = 0, world: int = 1, **options: Any) -> TokenBatchLoader:
    sizes: dict[str, Any] = {"micro_batch_size": micro, "accumulation": accumulation, "rank": rank, "world_size": world}
    options = {"order": "random", "seed": 3, "collate_fn": padded} | options
    return TokenBatchLoader(SAMPLES, lengths=LENGTHS, max_tokens=MAX_TOKENS, **sizes, **options)  # type: ignore[arg-type]


def numbers(batch: Tensor) -> list[int]:
    return [int(one) for one in batch[:, 0]]


def stream(ranks: list[TokenBatchLoader], count: int) -> list[set[int]]:
    """The samples of each batch of groups on all ranks, epoch after epoch."""
    parts = [iter(one) for one in ranks]
    found: list[set[int]] = []
    for at in range(count):
        batch: set[int] = set()
        for place, one in enumerate(ranks):
            try:
                micro = next(parts[place])
            except StopIteration:
                parts[place] = iter(one)
                micro = next(parts[place])
            batch |= set(numbers(micro))
        found.append(batch)
        assert at < count
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 5, 13])
def test_a_state_continues_at_another_world_size(stop: int, workers: int) -> None:
    wanted = stream([loader(2, 1, rank, 2) for rank in range(2)], 30)  # a micro-batch of all ranks is a batch
    begun = [loader(2, 1, rank, 2, num_workers=workers) for rank in range(2)]
    assert stream(begun, stop) == wanted[:stop]
    states = [json.loads(json.dumps(one.state_dict())) for one in begun]
    assert states[0] == states[1]
    others = [loader(1, 1, rank, 4) for rank in range(4)]
    for one in others:
        one.load_state_dict(states[0])
    assert stream(others, 30 - stop) == wanted[stop:]
    alone = loader(1, 4)
    alone.load_state_dict(states[0])
    apart = stream([alone], 4 * (30 - stop))
    assert [set().union(*apart[at : at + 4]) for at in range(0, len(apart), 4)] == wanted[stop:]


def test_an_epoch_has_the_groups_and_the_next_one_others() -> None:
    own = loader(1, 4)
    for epoch in range(2):
        groups = group_by_tokens(LENGTHS, max_tokens=MAX_TOKENS, per_batch=4, order="random", seed=3 + epoch)
        assert own.batch_sizes() == groups.batch_sizes().tolist()
        assert len(own) == len(groups)
        assert [numbers(batch) for batch in own] == [groups[at].tolist() for at in range(len(groups))]


def test_an_iteration_that_was_left_is_over() -> None:
    own = loader(1, 4, order="dataloader")
    first = numbers(next(iter(own)))
    assert numbers(next(iter(own))) == first
    assert own.epoch == 1


def test_states_of_other_batches_are_refused() -> None:
    state = loader(1, 4).state_dict()
    for other in (loader(1, 3), loader(1, 4, seed=4), loader(1, 4, least=2), loader(1, 4, order="seqlen")):
        with pytest.raises(CheckpointError):
            other.load_state_dict(state)
    with pytest.raises(CheckpointError):
        loader(2, 2).load_state_dict(state | {"position": 1})
    with pytest.raises(CheckpointError):
        loader(1, 4).load_state_dict({"epoch": 0, "position": 0})


def test_samples_that_do_not_fit_together_have_a_hint() -> None:
    with pytest.raises(PolyaccelError) as caught:
        next(iter(loader(1, 4, collate_fn=None)))
    assert caught.value.hint


class Mean(nn.Module):
    """A loss that is a mean over the tokens of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        with drawn_from(0):
            self.layer, self.head = nn.Linear(1, 5).double(), nn.Linear(5, 1).double()
        self.seen: list[int] = []

    def forward(self, batch: Tensor) -> Tensor:
        self.seen += numbers(batch)
        tokens = batch[batch >= 0].double()[:, None] / 97
        loss: Tensor = (self.head(torch.tanh(self.layer(tokens))) - tokens.sin()).square().mean()
        return loss


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("analysis")
    analysis = DataAnalysis(SAMPLES, path, metrics={"seqlen": len})
    analysis.map()
    analysis.reduce()
    return str(path)


def config(folder: str, stage: int, micro: int, accumulation: int, **changes: Any) -> dict[str, Any]:
    batching = {"enabled": True, "max_tokens": MAX_TOKENS, "metrics_path": folder, "verbose": False}
    batching |= {"sequence_picking_order": "random"} | changes
    sampling = {"enabled": True, "num_workers": 0, "dynamic_batching": batching}
    found = make_config(stage, accumulation=accumulation)
    found["data_efficiency"] = {"enabled": True, "seed": 3, "data_sampling": sampling}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.01, "warmup_type": "linear"}}
    return found | {"train_micro_batch_size_per_gpu": micro, "scheduler": schedule}


def train(
    communicator: Any, model: Any, options: dict[str, Any], begin: int, steps: int, path: str
) -> tuple[list[Tensor], list[float]]:
    engine = polyaccel.initialize(model=model, training_data=SAMPLES, collate_fn=padded, config=options)[0]
    if begin:
        engine.load_checkpoint(path)
    factors = []
    for _ in range(steps - begin):
        engine.train_batch()
        factors.append(engine.lr_scale)
    if path and not begin:
        engine.save_checkpoint(path)
    engine.destroy()
    return [one.detach().clone() for one in model.parameters()], factors


def in_plain_torch(method: str, steps: int) -> tuple[list[Tensor], list[float]]:
    """AdamW whose rate is that of the schedule times the factor of each batch, and groups have equal weights."""
    model = Mean()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    factors = []
    batches: list[list[list[int]]] = []
    epoch = 0
    while len(batches) < steps:
        groups = group_by_tokens(LENGTHS, max_tokens=MAX_TOKENS, per_batch=GROUPS, order="random", seed=3 + epoch)
        each = [groups[at].tolist() for at in range(len(groups))]
        batches += [each[at : at + GROUPS] for at in range(0, len(each), GROUPS)]
        epoch += 1
    for step, batch in enumerate(batches[:steps]):
        ratio = sum(map(len, batch)) / GROUPS
        factors.append({"linear": ratio, "sqrt": ratio**0.5, "none": 1.0}[method])
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, max(0, step - 1) / 6) * factors[-1]
        optimizer.zero_grad()
        for samples in batch:
            (model(padded([SAMPLES[one] for one in samples])) / GROUPS).backward()
        optimizer.step()
    return [one.detach() for one in model.parameters()], factors


@pytest.mark.parametrize(
    ("method", "stage", "world", "micro"),
    [("linear", 0, 1, 1), ("linear", 2, 2, 1), ("sqrt", 3, 2, 1), ("none", 1, 1, 1), ("linear", 3, 4, 1)],
)
def test_training_equals_plain_torch(folder: str, method: str, stage: int, world: int, micro: int) -> None:
    wanted, factors = in_plain_torch(method, 14)
    options = config(folder, stage, micro, GROUPS // world // micro, lr_scaling_method=method)
    for params, seen in on_threads(world, train, Mean, options, 0, 14, ""):
        assert seen == pytest.approx(factors)
        for found, one in zip(params, wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-11)


def test_a_run_resumes_at_another_world_size(folder: str, tmp_path: Path) -> None:
    wanted, factors = in_plain_torch("linear", 14)
    on_threads(2, train, Mean, config(folder, 2, 1, 2), 0, 5, str(tmp_path))
    for params, seen in on_threads(4, train, Mean, config(folder, 3, 1, 1), 5, 14, str(tmp_path)):
        assert seen == pytest.approx(factors[5:])
        for found, one in zip(params, wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-11)


def test_a_loader_that_runs_ahead_is_refused(folder: str) -> None:
    model = Mean()
    engine, _, batches, _ = polyaccel.initialize(
        model=model, training_data=SAMPLES, collate_fn=padded, config=config(folder, 0, 4, 1)
    )
    ahead = iter(batches)
    engine.backward(engine(next(ahead)))
    next(ahead)
    with pytest.raises(PolyaccelError):
        engine.step()
    engine.destroy()


def test_a_token_file_has_its_lengths(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "data") as builder:
        for length in LENGTHS:
            builder.add_item(np.arange(length))
    data = IndexedDataset(tmp_path / "data")
    options = config("", 0, 1, GROUPS)
    options["data_efficiency"]["data_sampling"]["dynamic_batching"]["metrics_path"] = None
    engine, _, batches, _ = polyaccel.initialize(model=Mean(), training_data=data, config=options)
    assert isinstance(batches, TokenBatchLoader)
    assert len(batches.groups.samples) > 80
    engine.destroy()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": None},
        {"metrics_path": None},
        {"metrics_path": "nowhere"},
        {"min_batch_size": 3, "max_batch_size": 2},
        {"lr_scaling_method": "cubic"},
        {"sequence_picking_order": "shortest"},
    ],
)
def test_settings_that_do_not_fit_are_refused(folder: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        polyaccel.initialize(model=Mean(), training_data=SAMPLES, config=config(folder, 0, 1, 4, **changes))


def test_other_data_are_refused(folder: str) -> None:
    with pytest.raises(ConfigError):
        polyaccel.initialize(model=Mean(), training_data=SAMPLES[1:], config=config(folder, 0, 1, 4))
