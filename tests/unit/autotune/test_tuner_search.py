"""The search of the tuner, on a machine that is a formula."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from polyaccel.config import load_config
from polyaccel.config.resolve import resolve_config
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import PolyaccelError
from polyaccel.job.trial_env import TrialModel
from polyaccel.planner.autotune import tuner
from polyaccel.planner.autotune.candidates import Candidate, candidates, own_candidate
from polyaccel.planner.autotune.records import TrialLog, TrialRecord, read_trials
from polyaccel.planner.autotune.results import front_picture, pareto_front, write_results
from polyaccel.planner.autotune.trials import TrialPlan
from polyaccel.planner.autotune.tuner import TuneRequest, best_of, tune

MIB = 1 << 20
TREE: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 1},
}
SPECS = tuple(ParamSpec(f"blocks.{number}.weight", (1024, 1024), DType.FLOAT32) for number in range(8))
TOLD = TrialModel(SPECS, {spec.fqn: spec.fqn[:8] for spec in SPECS}, 132 * MIB, False, 0, {})
Found = tuple[TrialRecord, TrialModel | None]


def measured(candidate: Candidate) -> TrialRecord:
    """A trial on a machine where large micro-batches are faster and take memory, and higher stages take less."""
    samples = candidate.micro_batch * candidate.accumulation
    forward, backward = 0.01 * samples, 0.02 * samples + 0.01 * samples * candidate.recomputes
    beside = 0.004 * candidate.accumulation + 0.002 * candidate.stage * candidate.accumulation
    states = 32 * 4 * MIB if candidate.stage == 0 else (32 * 3 - 8 * candidate.stage) * MIB
    activations = (70 + 8 * candidate.micro_batch if candidate.recomputes else 20 * candidate.micro_batch) * MIB
    return TrialRecord(
        candidate=candidate,
        step_s=forward + backward + beside,
        phase_s={"forward": forward, "backward": backward, "update": beside},
        peak_nbytes=100 * MIB + states + activations,
    )


@pytest.fixture
def question(tmp_path: Path) -> Callable[..., TuneRequest]:
    def ask(limit_nbytes: int | None = None, **section: Any) -> TuneRequest:
        config = resolve_config(load_config({**TREE, "autotuning": section}), world_size=2)
        plan = TrialPlan(command=("x",), config_file="x", config_tree=TREE, train_batch_size=32, mapped={})
        return TuneRequest(
            config=config, world_size=2, plan=plan, trials_folder=tmp_path / "trials", limit_nbytes=limit_nbytes
        )

    return ask


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """What was tried, on the machine that `measured` is."""
    found: list[Candidate] = []

    def run(plan: TrialPlan, candidate: Candidate, folder: Path) -> Found:
        found.append(candidate)
        return measured(candidate), TOLD

    monkeypatch.setattr(tuner, "run_trial", run)
    return found


def open_log(question: TuneRequest, folder: Path, *, overwrite: bool = True) -> TrialLog:
    return TrialLog(folder, question.key, overwrite=overwrite)


@pytest.mark.parametrize("limit", [None, 420 * MIB, 300 * MIB, 250 * MIB])
def test_the_best_of_all_is_found_in_a_few_trials(
    limit: int | None, question: Callable[..., TuneRequest], tried: list[Candidate], tmp_path: Path
) -> None:
    asked = question(limit, tuner_num_trials=8)
    answer = tune(asked, open_log(asked, tmp_path), lambda sentence: None)
    every = [measured(each) for each in candidates(asked.config, 2, is_remote=False)]
    best = best_of(every, limit)
    assert best is not None
    assert answer.best is not None
    assert answer.best.step_s == pytest.approx(best.step_s, rel=0.05)
    assert tried[0] == own_candidate(asked.config)
    assert len(tried) == len(answer.records) <= 8
    assert max(tried.count(each) for each in tried) <= 2
    assert len(answer.estimates) == len(every)


def test_what_the_trials_told_foretells_the_rest(
    question: Callable[..., TuneRequest], tried: list[Candidate], tmp_path: Path
) -> None:
    asked = question(tuner_num_trials=8, margin=10.0, tuner_early_stopping=0)
    answer = tune(asked, open_log(asked, tmp_path), lambda sentence: None)
    assert len(tried) == 8
    assert "tuner_num_trials = 8" in answer.why
    assert tried[1].recomputes, "what keeps activations does not tell what recomputation costs"
    for each in answer.estimates:
        if each.candidate.stage > 1:
            continue
        truth = measured(each.candidate)
        assert each.step_s == pytest.approx(truth.step_s, rel=0.15), str(each.candidate)
        assert each.device_nbytes == pytest.approx(truth.peak_nbytes, rel=0.25), str(each.candidate)


def test_what_chance_may_have_put_behind_is_tried_twice(
    question: Callable[..., TuneRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The third trial, the first of what is foretold to be best, is disturbed: others seem to be faster."""
    tried: list[Candidate] = []

    def run(plan: TrialPlan, candidate: Candidate, folder: Path) -> Found:
        tried.append(candidate)
        truth = measured(candidate)
        return replace(truth, step_s=(1.005 if len(tried) == 3 else 1.0) * (truth.step_s or 0.0)), TOLD

    monkeypatch.setattr(tuner, "run_trial", run)
    asked = question(tuner_num_trials=8, tuner_early_stopping=0)
    log = open_log(asked, tmp_path)
    answer = tune(asked, log, lambda sentence: None)
    assert answer.best is not None
    assert answer.best.step_s == min(measured(each).step_s or 0.0 for each in tried)
    assert tried.count(tried[2]) == 2
    assert max(tried.count(each) for each in tried) == 2
    assert len(tried) == len(answer.records) <= 8
    tune(asked, log, lambda sentence: None)
    assert len(tried) == len(answer.records), "a tuner that is started again has nothing to repeat"


def test_a_tuner_that_was_stopped_goes_on(
    question: Callable[..., TuneRequest], tried: list[Candidate], tmp_path: Path
) -> None:
    asked = question(tuner_num_trials=2)
    tune(asked, open_log(asked, tmp_path), lambda sentence: None)
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write('{"candidate": {"sta')  # killed while it wrote
    more = question(tuner_num_trials=4, margin=10.0)
    said: list[str] = []
    answer = tune(more, open_log(more, tmp_path), said.append)
    assert len(tried) == len(set(tried)) == len(answer.records) == 4
    assert [sentence.partition(":")[0] for sentence in said] == ["trial 3", "trial 4"]
    records, told = read_trials(tmp_path)
    assert (tuple(records), told) == (answer.records, TOLD)


def test_trials_of_another_question_do_not_count(
    question: Callable[..., TuneRequest], tried: list[Candidate], tmp_path: Path
) -> None:
    asked = question(tuner_num_trials=1)
    tune(asked, open_log(asked, tmp_path), lambda sentence: None)
    other = replace(asked, world_size=4)
    with pytest.raises(PolyaccelError) as caught:
        open_log(other, tmp_path, overwrite=False)
    assert caught.value.value == str(tmp_path / "trials.jsonl")
    assert open_log(other, tmp_path).records == []


def test_what_fails_for_want_of_memory_is_the_limit(
    question: Callable[..., TuneRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed: list[int] = []

    def run(plan: TrialPlan, candidate: Candidate, folder: Path) -> Found:
        truth = measured(candidate)
        assert truth.peak_nbytes is not None
        if truth.peak_nbytes > 300 * MIB:
            failed.append(truth.peak_nbytes)
            return TrialRecord(candidate=candidate, failure="rank 0 was killed by SIGKILL (out of memory?)"), None
        return truth, TOLD

    monkeypatch.setattr(tuner, "run_trial", run)
    asked = question(tuner_num_trials=12)
    answer = tune(asked, open_log(asked, tmp_path), lambda sentence: None)
    best = best_of([measured(each) for each in candidates(asked.config, 2, is_remote=False)], 300 * MIB)
    assert best is not None
    assert answer.best is not None
    assert answer.best.step_s == pytest.approx(best.step_s, rel=0.1)
    assert len(failed) <= 4


def test_where_nothing_can_be_tried_the_reason_is_told(
    question: Callable[..., TuneRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Candidate] = []

    def run(plan: TrialPlan, candidate: Candidate, folder: Path) -> Found:
        seen.append(candidate)
        return TrialRecord(candidate=candidate, failure="no such loss"), None

    monkeypatch.setattr(tuner, "run_trial", run)
    asked = question()
    with pytest.raises(PolyaccelError) as caught:
        tune(asked, open_log(asked, tmp_path), lambda sentence: None)
    assert caught.value.value == "stage 1, micro-batch 2 x 8"
    least = seen[-1]
    assert (len(seen), least.stage, least.micro_batch, least.recomputes) == (2, 3, 1, True)


def test_the_files_of_an_answer(question: Callable[..., TuneRequest], tried: list[Candidate], tmp_path: Path) -> None:
    asked = question(300 * MIB, tuner_num_trials=5)
    answer = tune(asked, open_log(asked, tmp_path), lambda sentence: None)
    write_results(answer, own_candidate(asked.config), TREE, 32, tmp_path)
    best = json.loads((tmp_path / "best.json").read_text())
    assert answer.best is not None
    assert own_candidate(resolve_config(load_config(best), world_size=2)) == answer.best.candidate
    assert best["optimizer"] == TREE["optimizer"]
    assert "mesh" not in best, "what is as before is not written"
    table = (tmp_path / "table.md").read_text().splitlines()
    assert len(table) == 2 + len(answer.records)
    assert {line.count("|") for line in table} == {7}
    assert str(answer.best.candidate) in next(line for line in table if "best" in line)
    picture = ElementTree.fromstring((tmp_path / "front.svg").read_text())
    kinds = [dot.get("class") for dot in picture.iter("{http://www.w3.org/2000/svg}circle")]
    assert (kinds.count("tried"), kinds.count("best")) == (len(answer.records), 1)
    front = pareto_front(answer.records)
    assert front
    for each in front:
        assert not any(
            other.peak_nbytes <= each.peak_nbytes and other.step_s < each.step_s  # type: ignore[operator]
            for other in answer.records
        )


def test_a_picture_of_nothing_is_one_too(question: Callable[..., TuneRequest]) -> None:
    answer = tuner.TuneResult(best=None, records=(), estimates=(), limit_nbytes=None, why="")
    assert "Nothing fits" in ElementTree.fromstring(front_picture(answer))[0].text  # type: ignore[operator]
