"""DeepSpeed's names of schedules, analysis and sampling of curricula, as its scripts use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer, DistributedDataAnalyzer
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset

from polyaccel.errors import CheckpointError, ConfigError, PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads

BASE = {"min_difficulty": 8, "max_difficulty": 64}
WORDS, COUNT = 12, 50
TOKENS = torch.randint(1, WORDS, (COUNT, 9), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.randint(2, 10, (COUNT,), generator=torch.Generator().manual_seed(1))


class Sentences(torch.utils.data.Dataset[Any]):
    """Samples as Megatron-DeepSpeed's datasets have them."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"text": TOKENS[at], "padding_mask": (torch.arange(9) < LENGTHS[at]).long()}


def metric_seqlen(data: Any) -> torch.Tensor:
    return torch.count_nonzero(data["padding_mask"], dim=1)


def metric_total_vocab_freq(data: Any) -> torch.Tensor:
    """As analyze_data.py counts for BERT: in floats."""
    weights = data["padding_mask"].view(-1).double()
    return torch.bincount(data["text"].view(-1), minlength=WORDS + 1, weights=weights)


def analyzer(folder: Path, **changes: Any) -> DataAnalyzer:
    values: dict[str, Any] = {
        "metric_names": ["seqlen", "total_vocab_freq"],
        "metric_functions": [metric_seqlen, metric_total_vocab_freq],
        "metric_types": ["single_value_per_sample", "accumulate_value_over_samples"],
        "metric_dtypes": [np.int64, np.int64],
        "save_path": str(folder),
        "batch_size": 4,
        "num_threads": 3,
    }
    return DataAnalyzer(Sentences(), **{**values, **changes})


def section(folder: Path, **changes: Any) -> dict[str, Any]:
    metric = {
        "index_to_sample_path": f"{folder}/seqlen/seqlen_index_to_sample",
        "index_to_metric_path": f"{folder}/seqlen/seqlen_index_to_metric",
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 3,
        "max_difficulty": 9,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 1},
        **changes,
    }
    curriculum = {"enabled": True, "data_cluster_path": f"{folder}/clusters", "curriculum_metrics": {"seqlen": metric}}
    return {
        "enabled": True,
        "seed": 7,
        "data_sampling": {"enabled": True, "num_epochs": 2, "curriculum_learning": curriculum},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("analysis")
    for worker in range(3):
        analyzer(found, num_workers=3, worker_id=worker).run_map()
    analyzer(found, num_workers=3).run_reduce()
    return found


def test_the_analysis_has_what_deepspeeds_readers_read(folder: Path) -> None:
    values = MMapIndexedDataset(f"{folder}/seqlen/seqlen_sample_to_metric", skip_warmup=True)
    assert [int(one[0]) for one in values] == LENGTHS.tolist()
    samples = MMapIndexedDataset(f"{folder}/seqlen/seqlen_index_to_sample", skip_warmup=True)
    levels = MMapIndexedDataset(f"{folder}/seqlen/seqlen_index_to_metric", skip_warmup=True)
    for level, group in zip(levels, samples, strict=True):
        assert set(group.tolist()) == set(np.flatnonzero(LENGTHS.numpy() == level[0]).tolist())
    counted = MMapIndexedDataset(f"{folder}/total_vocab_freq/total_vocab_freq_metric_value", skip_warmup=True)[0]
    mask = torch.arange(9) < LENGTHS[:, None]
    assert counted.tolist() == torch.bincount(TOKENS[mask], minlength=WORDS + 1).tolist()


def test_ranks_analyse_together(tmp_path: Path) -> None:
    def run(communicator: Any) -> None:
        DistributedDataAnalyzer(
            Sentences(),
            metric_names=["seqlen"],
            metric_functions=[metric_seqlen],
            metric_types=["single_value_per_sample"],
            save_path=str(tmp_path),
        ).run_map_reduce()

    run_threads(2, run)
    values = MMapIndexedDataset(f"{tmp_path}/seqlen/seqlen_sample_to_metric")
    assert [int(one[0]) for one in values] == LENGTHS.tolist()


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ({"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8}},
         {1: 8, 3: 24, 5: 32, 9: 56, 10: 64, 40: 64}),
        ({"schedule_type": "fixed_root",
          "schedule_config": {"total_curriculum_step": 16, "difficulty_step": 4, "root_degree": 2}},
         {1: 20, 4: 36, 9: 48, 16: 64}),
        ({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 16, 64], "max_step": [2, 5]}},
         {1: 8, 2: 8, 3: 16, 5: 16, 6: 64}),
    ],
)  # fmt: skip
def test_difficulties_are_those_of_the_formulas(numbers: dict[str, Any], wanted: dict[int, int]) -> None:
    scheduler = CurriculumScheduler({**BASE, **numbers})
    assert scheduler.get_current_difficulty() == 8
    assert {step: scheduler.get_difficulty(step) for step in wanted} == wanted
    for step in range(1, 50):
        scheduler.update_difficulty(step)
    assert scheduler.get_current_difficulty() == 64
    other = CurriculumScheduler({**BASE, **numbers})
    other.set_state(scheduler.get_state())
    assert other.get_current_difficulty() == 64


def test_a_custom_schedule_is_a_function() -> None:
    scheduler = CurriculumScheduler({**BASE, "schedule_type": "custom"})
    with pytest.raises(PolyaccelError):
        scheduler.update_difficulty(1)
    scheduler.set_custom_get_difficulty(lambda step: 8 + step)
    assert scheduler.update_difficulty(3) == 11
    with pytest.raises(ConfigError):
        CurriculumScheduler({**BASE, "schedule_type": "fixed_root", "schedule_config": {}})


def sampler(folder: Path, rank: int = 0, size: int = 2, **changes: Any) -> DeepSpeedDataSampler:
    return DeepSpeedDataSampler(
        section(folder, **changes), COUNT, 2, rank, size, None, gradient_accumulation_steps=2, global_rank=rank
    )


def test_samples_are_as_easy_as_the_step_asks(folder: Path) -> None:
    ranks = [list(sampler(folder, rank)) for rank in range(2)]
    assert len(ranks[0]) == 2 * COUNT // 4
    for number, pair in enumerate(zip(*ranks, strict=True)):
        step = number // 2 + 1
        most = min(9, int(3 + 6 * step / 6))
        assert all(len(part) == 2 for part in pair)
        assert all(LENGTHS[one] <= most for part in pair for one in part)
    assert max(LENGTHS[one] for part in ranks[0] for one in part) == 9


def test_a_state_continues(folder: Path) -> None:
    straight = list(sampler(folder))
    first = sampler(folder)
    drawn = iter(first)
    begun = [next(drawn) for _ in range(5)]
    rest = sampler(folder)
    rest.load_state_dict(first.state_dict())
    assert begun + list(rest) == straight
    with pytest.raises(CheckpointError):
        rest.load_state_dict({"batch": [], "consumed_samples": 3})
    with pytest.raises(ConfigError):
        DeepSpeedDataSampler({"enabled": True}, COUNT, 2, 0, 1)


def test_a_custom_schedule_of_the_sampler(folder: Path) -> None:
    found = sampler(folder, schedule_type="custom", schedule_config={})
    found.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 3})
    assert all(LENGTHS[one] <= 3 for part in found for one in part)
    assert found.current_difficulties == {"seqlen": 3}
