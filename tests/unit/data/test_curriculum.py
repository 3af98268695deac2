"""Sampling by difficulty: what is eligible, how often it comes, and states that continue."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.data import DataAnalysis, IndexedDataset, vocabulary_counts, vocabulary_rarity
from polyaccel.data.curriculum import CurriculumOrder, Metric
from polyaccel.errors import CheckpointError, PolyaccelError

values = st.lists(st.integers(0, 9), min_size=1, max_size=40)


def metric(found: list[int], difficulty: Any, **named: Any) -> Metric:
    array = np.array(found)
    levels = np.unique(array)
    groups = [np.flatnonzero(array == level) for level in levels]
    return Metric(difficulty=difficulty, samples=groups, values=[np.array([level]) for level in levels], **named)


@settings(max_examples=50, deadline=None)
@given(values, st.integers(0, 99), st.integers(1, 7))
def test_batches_hold_what_is_eligible(found: list[int], seed: int, size: int) -> None:
    least = min(found)
    order = CurriculumOrder({"own": metric(found, lambda step: least + step // 2)}, len(found), seed)
    for step in range(1, 12):
        batch = order.next_batch(size)
        assert len(batch) == size
        assert all(found[sample] <= least + step // 2 for sample in batch)


@settings(max_examples=30, deadline=None)
@given(values, st.integers(0, 99))
def test_a_cluster_comes_whole_before_it_comes_again(found: list[int], seed: int) -> None:
    order = CurriculumOrder({"own": metric(found, lambda step: 9)}, len(found), seed)
    drawn = np.concatenate([order.next_batch(3) for _ in range(len(found))])
    counts = np.bincount(drawn, minlength=len(found))
    assert counts.tolist() == [3] * len(found)


@settings(max_examples=30, deadline=None)
@given(values, st.integers(1, 12), st.integers(1, 6))
def test_a_state_continues_exactly(found: list[int], stop: int, size: int) -> None:
    def make() -> CurriculumOrder:
        length = metric(found, lambda step: min(9, max(min(found), step)))
        share = metric(found[::-1], lambda step: min(100, 40 + 10 * step), percentile=True)
        return CurriculumOrder({"length": length, "share": share}, len(found), 7)

    whole, first = make(), make()
    try:
        wanted = [whole.next_batch(size).tolist() for _ in range(15)]
    except PolyaccelError:  # no sample is easy by both
        return
    for _ in range(stop):
        first.next_batch(size)
    second = make().restored(json.loads(json.dumps(first.state_dict())))
    assert [second.next_batch(size).tolist() for _ in range(15 - stop)] == wanted[stop:]
    assert second.state_dict() == whole.state_dict()


def test_percentiles_are_parts_of_all_samples() -> None:
    order = CurriculumOrder({"own": metric(list(range(200)), lambda step: 10 * step, percentile=True)}, 200, 0)
    for step in range(1, 11):
        assert set(order.next_batch(5000).tolist()) == set(range(20 * step))


def test_two_metrics_are_met_both() -> None:
    evens = metric([number % 2 for number in range(50)], lambda step: 0 if step < 3 else 1)
    order = CurriculumOrder({"evens": evens, "size": metric(list(range(50)), lambda step: 10 * step)}, 50, 0)
    assert set(order.next_batch(500).tolist()) == set(range(0, 11, 2))
    assert set(order.next_batch(500).tolist()) == set(range(0, 21, 2))
    assert set(order.next_batch(500).tolist()) == set(range(31))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PolyaccelError):
        CurriculumOrder({"own": metric([1, 2], lambda step: 2)}, 3, 0)
    with pytest.raises(PolyaccelError):
        CurriculumOrder({"own": metric([5, 6], lambda step: 2)}, 2, 0).next_batch(2)
    order = CurriculumOrder({"own": metric([1, 2], lambda step: 2)}, 2, 0)
    with pytest.raises(CheckpointError):
        order.restored(CurriculumOrder({"own": metric([1, 2], lambda step: 2)}, 2, 1).state_dict())


def documents() -> list[Any]:
    numbers = np.random.default_rng(0)
    return [numbers.integers(0, 20, numbers.integers(1, 30)) for _ in range(57)]


def test_an_analysis_is_that_of_numpy(tmp_path: Path) -> None:
    data = documents()
    DataAnalysis(data, tmp_path, sums={"counts": vocabulary_counts(20)}).map()
    DataAnalysis(data, tmp_path, sums={"counts": vocabulary_counts(20)}).reduce()
    counts = IndexedDataset(tmp_path / "counts" / "counts_metric_value")[0]
    assert counts.tolist() == np.bincount(np.concatenate(data), minlength=20).tolist()
    metrics = {"seqlen": len, "rarity": vocabulary_rarity(counts)}
    progress: list[tuple[int, int]] = []
    for worker in range(3):
        analysis = DataAnalysis(data, tmp_path, metrics=metrics, chunk=10)
        analysis.map(worker=worker, workers=3, on_progress=lambda done, total: progress.append((done, total)))
    assert progress == [(10, 20), (20, 20), (10, 20), (20, 20), (10, 17), (17, 17)]
    analysis.reduce()
    shares = np.bincount(np.concatenate(data), minlength=20) / sum(map(len, data))
    rarity = [round(-sum(np.log(shares[token]) for token in one)) for one in data]
    for name, wanted in (("seqlen", [len(one) for one in data]), ("rarity", rarity)):
        prefix = tmp_path / name / name
        assert [int(one[0]) for one in IndexedDataset(f"{prefix}_sample_to_metric")[:]] == wanted
        levels = [int(one[0]) for one in IndexedDataset(f"{prefix}_index_to_metric")[:]]
        assert levels == sorted(set(wanted))
        for level, samples in zip(levels, IndexedDataset(f"{prefix}_index_to_sample")[:], strict=True):
            assert samples.tolist() == [number for number, value in enumerate(wanted) if value == level]
        merged = np.concatenate(IndexedDataset(f"{prefix}_index_to_sample_percentile_merged")[:])
        assert merged.tolist() == np.argsort(wanted, kind="stable").tolist()


def test_an_analysis_continues_where_it_was_interrupted(tmp_path: Path) -> None:
    data, seen = documents(), []

    def length(sample: Any) -> int:
        seen.append(len(sample))
        if len(seen) == 25:
            raise KeyboardInterrupt
        return len(sample)

    with pytest.raises(KeyboardInterrupt):
        DataAnalysis(data, tmp_path, metrics={"seqlen": length}, chunk=10).map()
    analysis = DataAnalysis(data, tmp_path, metrics={"seqlen": len}, chunk=10)
    assert analysis.done() == 20
    with pytest.raises(PolyaccelError) as caught:
        analysis.reduce()
    assert caught.value.value == 2
    analysis.map(worker=1, workers=2)
    analysis.map(worker=0, workers=2)
    analysis.reduce()
    assert analysis.done() == 57


def test_two_writers_at_once_leave_whole_files(tmp_path, monkeypatch):
    """A second rank comes between the writing of a file and its name, in the same process or on another host."""
    data, replace, steps = [[1] * (at + 1) for at in range(5)], os.replace, []

    def interrupted(source, target):
        if not steps:
            steps.append(target)
            DataAnalysis(data, tmp_path, metrics={"seqlen": len}, chunk=2).map()
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    analysis = DataAnalysis(data, tmp_path, metrics={"seqlen": len}, chunk=2)
    analysis.map()
    analysis.reduce()
    assert steps
    assert [int(one[0]) for one in IndexedDataset(f"{tmp_path}/seqlen/seqlen_sample_to_metric")] == [1, 2, 3, 4, 5]
    assert not list(tmp_path.rglob("*unfinished*"))


def test_bad_analyses_are_refused(tmp_path: Path) -> None:
    data = documents()
    for named in ({}, {"metrics": {"a/b": len}}, {"metrics": {"a": len}, "sums": {"a": len}}, {"chunk": 0}):
        with pytest.raises(PolyaccelError):
            DataAnalysis(data, tmp_path, **named)
    DataAnalysis(data, tmp_path, metrics={"seqlen": len}, chunk=10)
    for others, chunk in ((data[1:], 10), (data, 11)):
        with pytest.raises(PolyaccelError):
            DataAnalysis(others, tmp_path, metrics={"seqlen": len}, chunk=chunk)
    with pytest.raises(PolyaccelError):
        DataAnalysis(data, tmp_path, metrics={"half": lambda one: 0.5}).map()  # type: ignore[dict-item,return-value]
    with pytest.raises(PolyaccelError):
        DataAnalysis(data, tmp_path, metrics={"seqlen": len}, chunk=10).map(worker=2, workers=2)


def test_tokens_without_a_count_have_no_rarity() -> None:
    rarity = vocabulary_rarity([2, 0, 2])
    assert rarity([0, 2]) == round(2 * np.log(2))
    for token in (-100, 1, 3):  # an ignored label, one that does not occur, one beyond the vocabulary
        with pytest.raises(PolyaccelError) as caught:
            rarity([0, token])
        assert caught.value.value == token


def test_difficulties_that_are_no_numbers_are_refused() -> None:
    order = CurriculumOrder({"own": metric([1, 9], lambda step: float("nan"))}, 2, 0)
    with pytest.raises(PolyaccelError):
        order.next_batch(1)
    order = CurriculumOrder({"own": metric([1, 9], lambda step: np.float64(2.5))}, 2, 0)
    order.next_batch(1)
    assert json.dumps(order.state_dict()["history"]) == '[{"own": 2.5}]'
    assert type(order.difficulties["own"]) is float
