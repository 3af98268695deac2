"""Every schedule trains as one rank does: chunks down and up the stages, backward passes in two parts, own tables."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deep_pipelines import deep_model, numbered_words
from pairwise import combinations
from pipeline_models import MICRO_BATCHES, Figures, assert_same, pipeline_config, trained

from polyaccel.pipeline.csv_schedule import write_table
from polyaccel.pipeline.schedules import make_table
from polyaccel.pipeline.table import PipelineError

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]


def config_of(stage: int, schedule: str = "1f1b") -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 400}
    return pipeline_config(stage, schedule, zero_optimization=zero)


@cache
def on_one_rank(data: int, shards_gradients: bool, tied: bool, drops: float) -> Figures:
    model = partial(deep_model, tied=tied, drops=drops)
    return trained(1, data, config_of(2 * shards_gradients), model=model, make=numbered_words, steps=2)


def assert_close(found: Figures, expected: Figures) -> None:
    for place, losses in expected.losses.items():
        assert found.losses[place] == pytest.approx(losses, rel=1e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert found.values.keys() == expected.values.keys()
    for name, value in expected.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-5, atol=2e-6, msg=name)


@combinations(
    stages=[2, 3, 4],
    data=[1, 2],
    schedule=SCHEDULES,
    stage=[0, 1, 2],
    tied=[False, True],
    drops=[0.0, 0.3],
    interval=[0, 2],
)
def test_every_schedule_trains_as_one_rank_does(stages, data, schedule, stage, tied, drops, interval):
    model = partial(deep_model, schedule=schedule, tied=tied, drops=drops, activation_checkpoint_interval=interval)
    found = trained(stages, data, config_of(stage, schedule), model=model, make=numbered_words, steps=2)
    expected = on_one_rank(data, stage == 2, tied, drops)
    if schedule in ("gpipe", "1f1b") and not tied:
        assert_same(found, expected)
    else:
        assert_close(found, expected)


@pytest.mark.parametrize("chunks", [1, 3])
def test_interleaved_chunks_are_as_many_as_one_says(chunks):
    model = partial(deep_model, schedule="interleaved", chunks=chunks)
    found = trained(2, 1, config_of(1), model=model, make=numbered_words, steps=2)
    assert_close(found, on_one_rank(1, False, False, 0.0))


def test_a_table_of_a_file_is_run(tmp_path: Path):
    """One whose second stage leaves all gradients of parameters for the end, with the layers of the V the other way
    round: the first chunk is not on the first stage."""
    rows = ["slot,stage,op,micro_batch,chunk"]
    tasks: dict[int, list[str]] = {0: [], 1: []}
    for micro in range(MICRO_BATCHES):
        tasks[1] += [f"FORWARD,{micro},0", f"FORWARD,{micro},2"]
        tasks[0] += [f"FORWARD,{micro},1", f"FORWARD,{micro},3"]
    for micro in range(MICRO_BATCHES):
        tasks[0] += [f"BACKWARD,{micro},3", f"BACKWARD,{micro},1"]
        tasks[1] += [f"BACKWARD_INPUT,{micro},2", f"BACKWARD_INPUT,{micro},0"]
    tasks[1] += [f"BACKWARD_WEIGHT,{micro},{chunk}" for micro in range(MICRO_BATCHES) for chunk in (0, 2)]
    for stage, each in tasks.items():
        rows += [f"{slot},{stage},{task}" for slot, task in enumerate(each)]
    path = tmp_path / "own.csv"
    path.write_text("\n".join(rows) + "\n")
    for tied in (False, True):
        model = partial(deep_model, schedule=str(path), tied=tied)
        found = trained(2, 1, config_of(2, str(path)), model=model, make=numbered_words, steps=2)
        assert_close(found, on_one_rank(1, True, tied, 0.0))


def test_a_model_that_was_cut_otherwise_is_refused(tmp_path: Path):
    path = tmp_path / "own.csv"
    path.write_text(write_table(make_table("1f1b", 2, 8)))
    for schedule, named in (
        ("zb-v", ("zb-v", "[0, 1, 1, 0]", "[0, 1]")),
        (str(path), ("own.csv", "8 micro-batches", "4")),
    ):
        with pytest.raises(PipelineError) as caught:
            trained(2, 1, config_of(1, schedule), model=deep_model, make=numbered_words)
        assert all(part in str(caught.value) for part in named)
    with pytest.raises(PipelineError) as caught:
        trained(3, 1, config_of(1), model=partial(deep_model, schedule=str(path)), make=numbered_words)
    assert caught.value.value == 2
    assert "own.csv" in str(caught.value)
