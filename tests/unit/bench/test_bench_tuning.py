"""What `python -m bench tuning` chooses to measure, and what it says of it."""

from __future__ import annotations

from bench.tuning import compare
from polyaccel.tuning.candidates import Candidate
from polyaccel.tuning.foretelling import Foretold
from polyaccel.tuning.records import TrialRecord
from polyaccel.tuning.tuner import TuningAnswer

EVERY = tuple(
    Foretold(Candidate(stage=0, micro_batch=number, accumulation=1, bucket_numel=1), 100 + number, 0, 50, float(number))
    for number in range(1, 41)
)


def answer(best: int) -> TuningAnswer:
    record = TrialRecord(candidate=EVERY[best].candidate, step_s=1.0, peak_nbytes=1)
    return TuningAnswer(best=record, records=(record,), foretold=EVERY[::-1], limit_nbytes=None, why="")


def test_settings_are_spread_over_all_and_the_tuner_s_choice_is_among_them() -> None:
    for best in (0, 1, 7, 38, 39):
        found = compare._chosen(answer(best), 10)
        assert len(found) == 10
        assert EVERY[best] in found
        assert [each.step_s for each in found] == sorted(each.step_s or 0 for each in found)
    assert compare._chosen(answer(3), 99) == list(EVERY)


def test_the_verdict_has_errors_and_the_distance_from_the_best() -> None:
    rows = [
        compare.Row(each, TrialRecord(candidate=each.candidate, step_s=(each.step_s or 0) * factor, peak_nbytes=100))
        for each, factor in zip(EVERY[:4], (1.0, 1.0, 1.1, 2.0), strict=True)
    ]
    said = compare._verdict(rows, answer(1), 1 << 30, 10.0, 20.0)
    assert "Foretold step times: 3 of 4 within 15 %" in said
    assert "Foretold memory: 4 of 4 within 10 %" in said
    assert "100.0% more than the best" in said
