"""What `python -m bench tuning` measures, and what it says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.tuning import compare
from polyaccel.planner.autotune.candidates import Candidate
from polyaccel.planner.autotune.cost_model import CostEstimate
from polyaccel.planner.autotune.records import TrialRecord
from polyaccel.planner.autotune.trials import TrialPlan
from polyaccel.planner.autotune.tuner import TuneResult

EVERY = tuple(
    CostEstimate(
        Candidate(stage=0, micro_batch=number, accumulation=1, bucket_numel=1), 100 + number, 0, 50, float(number)
    )
    for number in range(1, 5)
)
PLAN = TrialPlan(command=("x",), config_file="x", config_tree={}, train_batch_size=4, mapped={})


def measured(factors: Sequence[float], nbytes: int = 100) -> list[TrialRecord]:
    """A round in which each setting takes so many times what was foretold."""
    return [
        TrialRecord(candidate=each.candidate, step_s=(each.step_s or 0) * factor, peak_nbytes=nbytes)
        for each, factor in zip(EVERY, factors, strict=True)
    ]


def answer(best: int) -> TuneResult:
    record = TrialRecord(candidate=EVERY[best].candidate, step_s=1.0, peak_nbytes=1)
    return TuneResult(best=record, records=(record,), foretold=EVERY[::-1], limit_nbytes=None, why="")


def test_a_round_goes_on_where_it_was_stopped_until_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Candidate] = []

    def run(plan: TrialPlan, candidate: Candidate, folder: Path) -> tuple[TrialRecord, None]:
        if len(tried) == 2:
            raise KeyboardInterrupt
        tried.append(candidate)
        return TrialRecord(candidate=candidate, step_s=1.0, peak_nbytes=1), None

    monkeypatch.setattr(compare, "run_trial", run)
    every = [each.candidate for each in EVERY]
    with pytest.raises(KeyboardInterrupt):
        compare._measured(every, PLAN, tmp_path, None)
    assert len(compare._measured(every, PLAN, tmp_path, 0.0)) == 2, "its time is over"
    tried.clear()
    found = compare._measured(every[::-1][:2], PLAN, tmp_path, None)
    assert tried == every[::-1][:2]
    assert [record.candidate for record in found] == [*every[:2], *every[::-1][:2]]


def test_the_shortest_of_all_rounds_counts_and_what_failed_is_left_out() -> None:
    first, second = measured([1.1] * 4), measured([1.0] * 4, nbytes=120)
    second[1] = replace(second[1], step_s=None, failure="it hung")
    first[2] = replace(first[2], step_s=None, failure="it hung")
    second[2] = first[2]
    rows = {row.foretold.candidate: row for row in compare._rows(answer(0), [first, second])}
    assert list(rows) == [EVERY[3].candidate, EVERY[1].candidate, EVERY[0].candidate]
    assert rows[EVERY[0].candidate].measured.step_s == pytest.approx(1.0)
    assert rows[EVERY[0].candidate].measured.peak_nbytes == 120
    assert rows[EVERY[1].candidate].measured.step_s == pytest.approx(2.2)


def test_the_verdict_has_errors_and_the_distance_from_the_best() -> None:
    rows = compare._rows(answer(1), [measured([1.0, 1.0, 1.1, 2.0])])
    said = compare._verdict(rows, answer(1), 1 << 30)
    assert "Foretold step times: 3 of 4 within 15%" in said
    assert "Foretold memory: 4 of 4 within 10%" in said
    assert "100.0% more than the best" in said
