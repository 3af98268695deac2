"""Loaders of samples by difficulty: positions in the middle, other world sizes, and engines that train with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_models import make_config, on_threads
from torch import Tensor, nn
from torch.utils.data import Dataset

import polyaccel
from polyaccel.config import load_config
from polyaccel.data import DataAnalysis
from polyaccel.engine.policies.data_sampling import sampling_policy_of
from polyaccel.errors import CheckpointError, ConfigError, PolyaccelError
from polyaccel.torch.curriculum_loader import CurriculumDataLoader
from polyaccel.torch.data import ShardedDataLoader

LENGTHS = np.random.default_rng(3).integers(1, 17, 61).tolist()


class Samples(Dataset[Tensor]):
    """Sample i: its number, and ones as many as its length."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Tensor:
        sample = torch.zeros(17)
        sample[0], sample[1 : 1 + LENGTHS[index]] = index, 1
        return sample


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("analysis")
    analysis = DataAnalysis(Samples(), folder, metrics={"seqlen": lambda one: int(one[1:].sum())}, chunk=20)
    analysis.map()
    analysis.reduce()
    return f"{folder}/seqlen/seqlen_"


def section(prefix: str, **changes: Any) -> dict[str, Any]:
    metric = {
        "index_to_sample_path": f"{prefix}index_to_sample",
        "index_to_metric_path": f"{prefix}index_to_metric",
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 4,
        "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 2},
    }
    curriculum = {"enabled": True, "data_cluster_path": "none", "curriculum_metrics": {"seqlen": metric | changes}}
    return {
        "enabled": True,
        "seed": 5,
        "data_sampling": {"enabled": True, "num_epochs": 2, "curriculum_learning": curriculum},
    }


def loader(prefix: str, micro: int, accumulation: int, rank: int = 0, world: int = 1, **named: Any) -> Any:
    policy = sampling_policy_of(load_config({"data_efficiency": section(prefix)}))
    assert policy is not None
    sizes: dict[str, Any] = {"micro_batch_size": micro, "accumulation": accumulation, "rank": rank, "world_size": world}
    return CurriculumDataLoader(Samples(), metrics=policy.metrics, epochs=2, seed=5, **sizes, **named)


def numbers(batch: Tensor) -> list[int]:
    return [int(one) for one in batch[:, 0]]


def test_each_step_has_what_it_admits(prefix: str) -> None:
    found = [numbers(batch) for batch in loader(prefix, 4, 1)]
    assert len(found) == len(loader(prefix, 4, 1)) == 2 * 61 // 4
    admitted = [6, 8, 10, 12, 14, 16]  # 4 + 12 t / 6, down to a multiple of 2
    for step, batch in enumerate(found[:6]):
        assert max(LENGTHS[sample] for sample in batch) <= admitted[step]
    assert max(LENGTHS[sample] for batch in found[6:] for sample in batch) == 16


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_state_continues_at_another_world_size(prefix: str, stop: int, workers: int) -> None:
    def stream(ranks: list[Any], count: int) -> list[int]:
        parts = [iter(rank) for rank in ranks]
        return [sample for _ in range(count) for part in parts for sample in numbers(next(part))]

    wanted = stream([loader(prefix, 2, 3, rank, 2) for rank in range(2)], 12)  # batches of 12
    begun = [loader(prefix, 2, 3, rank, 2, num_workers=workers) for rank in range(2)]
    assert stream(begun, stop) == wanted[: 4 * stop]
    states = [json.loads(json.dumps(one.state_dict())) for one in begun]
    assert states[0] == states[1]
    others = [loader(prefix, 1, 3, rank, 4) for rank in range(4)]
    for one in others:
        one.load_state_dict(states[0])
    assert stream(others, 12 - stop) == wanted[4 * stop :]


def test_an_iteration_ends_and_the_next_one_continues(prefix: str) -> None:
    whole = loader(prefix, 9, 1)
    found = [numbers(batch) for _ in range(2) for batch in whole]
    assert len(found) == 2 * (122 // 9)
    again, broken = loader(prefix, 9, 1), []
    for _ in range(3):
        for number, batch in enumerate(again):
            broken.append(numbers(batch))
            if number == 4:
                break
    assert broken == found[:13]


def test_an_iteration_without_room_for_a_wider_micro_batch_is_over(prefix: str) -> None:
    """120 of 122 samples are handed out: two are left, and 4 ranks take 4."""
    begun = loader(prefix, 2, 1)
    parts = iter(begun)
    for _ in range(60):
        next(parts)
    wider = [loader(prefix, 1, 1, rank, 4) for rank in range(4)]
    for one in wider:
        one.load_state_dict(begun.state_dict())
    assert [len(list(one)) for one in wider] == [122 // 4] * 4


def test_custom_schedules_and_post_processing(prefix: str) -> None:
    with pytest.raises(ConfigError):
        loader(prefix, 4, 1).set_schedules({"seqlen": lambda step: 3})
    policy = sampling_policy_of(load_config({"data_efficiency": section(prefix, schedule_type="custom")}))
    assert policy is not None
    own = CurriculumDataLoader(Samples(), metrics=policy.metrics, micro_batch_size=4, custom=policy.custom)
    with pytest.raises(ConfigError):
        next(iter(own))
    own.set_schedules({"seqlen": lambda step: 2 + step})
    own.set_post_process(lambda batch, state: (batch, state["current_difficulties"]["seqlen"]))
    for step, (batch, difficulty) in zip(range(1, 8), own, strict=False):
        assert difficulty == 2 + step
        assert max(LENGTHS[sample] for sample in numbers(batch)) <= 2 + step


@pytest.mark.parametrize(
    "change",
    [
        {"index_to_sample_path": None},
        {"index_to_metric_path": None},
        {"index_to_metric_path": "nowhere"},
        {"min_difficulty": 17},
        {"schedule_type": "fixed_root"},
        {"schedule_config": {}},
        {"difficulty_type": "rank"},
    ],
)
def test_sections_that_do_not_fit_are_refused(prefix: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        sampling_policy_of(load_config({"data_efficiency": section(prefix, **change)}))


def test_other_states_are_refused(prefix: str) -> None:
    plain = ShardedDataLoader[Tensor](Samples(), micro_batch_size=2)
    with pytest.raises(CheckpointError):
        loader(prefix, 2, 1).load_state_dict(plain.state_dict())
    with pytest.raises(CheckpointError):
        plain.load_state_dict(loader(prefix, 2, 1).state_dict())


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(17, 1)
        self.seen: list[int] = []

    def forward(self, batch: Tensor) -> Tensor:
        self.seen += numbers(batch)
        loss: Tensor = self.layer(batch / 61).square().mean()
        return loss


def test_an_engine_resumes_in_the_middle_of_a_step(prefix: str, tmp_path: Path) -> None:
    config = make_config(2, data_efficiency=section(prefix)) | {"train_micro_batch_size_per_gpu": 2}
    config |= {"gradient_accumulation_steps": 1}

    def run(communicator: Any, model: Any, first: bool, steps: int) -> list[int]:
        model.seen.clear()
        engine = polyaccel.initialize(model=model, training_data=Samples(), config=config)[0]
        if not first:
            engine.load_checkpoint(str(tmp_path))
        for _ in range(steps):
            engine.train_batch()
        if first:
            engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        return list(model.seen)

    wanted = on_threads(2, run, Sums, True, 9)
    on_threads(2, run, Sums, True, 4)
    found = on_threads(2, run, Sums, False, 5)
    assert [one[8:] for one in wanted] == found


def test_verification_and_jax_refuse_it(prefix: str) -> None:
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "data_efficiency": section(prefix)}
    with pytest.raises(PolyaccelError):
        polyaccel.initialize(model=lambda params, batch, rng: 0.0, params={}, config=config)
