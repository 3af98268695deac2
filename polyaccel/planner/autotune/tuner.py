"""Autotuner: runs the candidate with the best predicted step time until no untried one is predicted to be better."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyaccel.comm.benchmark import CollectiveTimings
from polyaccel.config import ResolvedConfig
from polyaccel.errors import PolyaccelError
from polyaccel.job.trial_env import TrialModel
from polyaccel.planner.autotune.candidates import Candidate, candidates, own_candidate
from polyaccel.planner.autotune.cost_model import CostEstimate, CostModel
from polyaccel.planner.autotune.hardware_probe import USUAL, HardwareRates
from polyaccel.planner.autotune.records import TrialLog, TrialRecord
from polyaccel.planner.autotune.trials import TrialPlan, run_trial
from polyaccel.planner.model import ModelShape

_SAME = 0.1
"""The share by which two trials of one setting may differ where others use the machine too."""
_MOST_DOUBTS = 2
_LEAST_FOR_DOUBTS, _LEAST_FOR_BOTH_KINDS = 6, 4
"""So many trials must be allowed for any setting to be tried twice, and for a trial that only teaches."""
_OUT_OF_MEMORY = re.compile(r"out of memory|MemoryError|SIGKILL|can't allocate|cannot allocate", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """What is tuned: a config on so many ranks, tried by `plan` in folders below `trials_folder`.

    `limit_nbytes` is the memory that a rank may use of its device, None what the device has. `speeds` are those of
    collectives among the ranks; `rates` those of this machine.
    """

    config: ResolvedConfig
    world_size: int
    plan: TrialPlan
    trials_folder: Path
    limit_nbytes: int | None
    speeds: CollectiveTimings | None = None
    rates: HardwareRates = USUAL

    @property
    def key(self) -> str:
        """What distinguishes this question from others: trials answer it alone."""
        tree = {name: value for name, value in self.plan.config_tree.items() if name != "autotuning"}
        steps = [self.plan.first_step, self.plan.last_step]
        text = json.dumps([tree, self.plan.command, self.world_size, steps], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """`best` is the trial of the shortest step that fits, None where none does; `estimated` are all candidates by what
    is estimated of them in the end, the fastest of those that fit `limit_nbytes` first. `why` the tuner stopped."""

    best: TrialRecord | None
    records: tuple[TrialRecord, ...]
    estimates: tuple[CostEstimate, ...]
    limit_nbytes: int | None
    why: str


Tell = Callable[[str], object]


def tune(question: TuneRequest, log: TrialLog, tell: Tell) -> TuneResult:
    """Try candidates until nothing better is estimated, or by the section `autotuning`. Continues where `log` ends;
    `tell` gets a sentence for each trial.

    Raises PolyaccelError where not even the least demanding candidate can be tried.
    """
    return _Search(question, log, tell).run()


class _Search:
    """A search while it continues."""

    def __init__(self, question: TuneRequest, log: TrialLog, tell: Tell) -> None:
        self._question, self._log, self._tell = question, log, tell
        self._section = question.config.autotuning
        self._cost_model: CostModel | None = None
        self._every: tuple[Candidate, ...] = ()
        self._limit_nbytes = question.limit_nbytes

    def run(self) -> TuneResult:
        trial_model = self._log.model()
        if trial_model is None or not any(record.is_good for record in self._log.records):
            trial_model = self._probe()
        self._know(trial_model)
        chosen, why = self._next()
        while chosen is not None:
            self._try(chosen.candidate, chosen)
            chosen, why = self._next()
        assert self._cost_model is not None  # set by _know
        self._cost_model.learn(self._log.records)
        return TuneResult(
            best=self._best(),
            records=tuple(self._log.records),
            estimates=tuple(self._in_order(self._every)),
            limit_nbytes=self._limit_nbytes,
            why=why,
        )

    def _probe(self) -> TrialModel:
        """The first trial: the config as it is, or, where that fails, what needs least."""
        own = own_candidate(self._question.config)
        tried = {record.candidate for record in self._log.records}
        for candidate in (own, self._least(own)):
            if candidate in tried:
                continue
            record = self._try(candidate, None)
            trial_model = self._log.model()
            if record.is_good and trial_model is not None:
                return trial_model
        failure = next((record.failure for record in self._log.records if record.failure), "nothing was recorded")
        raise PolyaccelError(
            f"neither {own} nor {self._least(own)} could be tried: {failure}",
            hint=f"run the script by itself; outputs are in {self._question.trials_folder}",
            value=str(own),
        )

    def _least(self, own: Candidate) -> Candidate:
        """What needs least memory of all that may be tried without knowing the device."""
        section = self._section
        least = min(
            candidates(self._question.config, self._question.world_size, is_remote=False),
            key=lambda each: (each.micro_batch / each.sharing, -each.stage, not each.recomputes),
        )
        return replace(least, stage=max(section.stages), recomputes=True in section.checkpointing)

    def _know(self, trial_model: TrialModel) -> None:
        """Make everything that follows from the model."""
        question = self._question
        if self._limit_nbytes is None and trial_model.is_remote and trial_model.total_nbytes:
            self._limit_nbytes = trial_model.total_nbytes
        self._cost_model = CostModel(
            question.config,
            ModelShape("the script's model", trial_model.specs, trial_model.units),
            question.world_size,
            is_remote=trial_model.is_remote,
            base_nbytes=max(0, trial_model.nbytes_before - trial_model.nbytes),
            speeds=question.speeds,
            rates=question.rates,
        )
        self._every = candidates(question.config, question.world_size, is_remote=trial_model.is_remote)

    def _next(self) -> tuple[CostEstimate | None, str]:
        """The candidate to try next, or None and why there is none."""
        untried = self._untried()
        why = self._reason_to_stop(untried)
        doubtful = self._within_noise()
        if doubtful and (why or self._trials_left() <= len(doubtful)):
            return doubtful[0], ""
        return (None, why) if why else (untried, "")

    def _untried(self) -> CostEstimate | None:
        """Return the fastest untried candidate that is estimated to fit, or the first that teaches."""
        assert self._cost_model is not None  # set by _know
        self._cost_model.learn(self._log.records)
        tried = {record.candidate for record in self._log.records}
        ranked = [
            each
            for each in self._in_order([each for each in self._every if each not in tried])
            if not each.excess(self._limit_nbytes) and not self._will_oom(each)
        ]
        other_kind = [each for each in ranked if self._explores(each)]
        return next(iter(other_kind or ranked), None)

    def _explores(self, chosen: CostEstimate) -> bool:
        """Return whether it is the first trial with or without recomputation: neither predicts the other."""
        shown = {record.candidate.recomputes for record in self._log.records}
        is_affordable = self._section.tuner_num_trials >= _LEAST_FOR_BOTH_KINDS
        return is_affordable and chosen.candidate.recomputes not in shown

    def _within_noise(self) -> list[CostEstimate]:
        """The settings that chance alone may have put behind the best, the fastest first and two at most: tried once,
        and no more behind than two trials of one setting may be. They are tried again before the last trial is over;
        the shortest step of a setting counts, so another trial of the best would not change the choice."""
        assert self._cost_model is not None  # set by _know
        best = self._best()
        if best is None or self._section.tuner_num_trials < _LEAST_FOR_DOUBTS or self._trials_left() < 1:
            return []
        tried = [record.candidate for record in self._log.records]
        close = [
            record
            for record in fitting(self._log.records, self._limit_nbytes)
            if (record.step_s or 0.0) <= (1 + _SAME) * (best.step_s or 0.0)
            and record.candidate != best.candidate
            and tried.count(record.candidate) == 1
        ]
        close.sort(key=lambda record: record.step_s or 0.0)
        return [self._cost_model.predict(record.candidate) for record in close[:_MOST_DOUBTS]]

    def _trials_left(self) -> int:
        return self._section.tuner_num_trials - len(self._log.records)

    def _in_order(self, every: Sequence[Candidate]) -> list[CostEstimate]:
        assert self._cost_model is not None
        return in_order([self._cost_model.predict(each) for each in every], self._limit_nbytes)

    def _will_oom(self, estimate: CostEstimate) -> bool:
        """Whether a trial that needed no more has failed for want of memory."""
        assert self._cost_model is not None
        return any(
            estimate.device_nbytes >= self._cost_model.predict(record.candidate).device_nbytes
            for record in self._log.records
            if _OUT_OF_MEMORY.search(record.failure)
        )

    def _reason_to_stop(self, chosen: CostEstimate | None) -> str:
        records, section, best = self._log.records, self._section, self._best()
        if chosen is None:
            return "everything that is estimated to fit has been tried"
        if self._trials_left() < 1:
            return f"autotuning.tuner_num_trials = {section.tuner_num_trials} trials have been made"
        if best is None:
            return ""
        stale = len(records) - 1 - records.index(best)
        if section.tuner_early_stopping and stale >= section.tuner_early_stopping:
            return f"the last {stale} trials were no better (autotuning.tuner_early_stopping)"
        if self._explores(chosen):
            return ""
        assert self._cost_model is not None
        least_s = max(best.step_s or 0.0, self._cost_model.predict(best.candidate).step_s or 0.0)
        if (chosen.step_s or 0.0) > least_s * (1 + section.margin + best.spread):
            return f"the next one, {chosen.candidate}, is estimated to take {chosen.step_s:.3g} s a step"
        return ""

    def _best(self) -> TrialRecord | None:
        return best_of(self._log.records, self._limit_nbytes)

    def _try(self, candidate: Candidate, estimate: CostEstimate | None) -> TrialRecord:
        number = len(self._log.records) + 1
        record, trial_model = run_trial(self._question.plan, candidate, self._question.trials_folder / f"trial{number}")
        if estimate is not None:
            record = replace(record, foretold_s=estimate.step_s, foretold_nbytes=estimate.device_nbytes)
        if trial_model is not None and record.is_good:
            self._log.keep_model(trial_model)
        self._log.add(record)
        self._tell(f"trial {number}: {candidate}: {in_words(record)}")
        return record


def best_of(records: Sequence[TrialRecord], limit_nbytes: int | None) -> TrialRecord | None:
    """The record of the shortest step within the limit."""
    return min(fitting(records, limit_nbytes), key=lambda record: record.step_s or 0.0, default=None)


def fitting(records: Sequence[TrialRecord], limit_nbytes: int | None) -> list[TrialRecord]:
    """The good records within the limit."""
    return [record for record in records if record.is_good and (limit_nbytes or 1 << 62) >= (record.peak_nbytes or 0)]


def in_order(
    estimates: Sequence[CostEstimate], limit_nbytes: int | None, host_nbytes: int | None = None
) -> list[CostEstimate]:
    """Order by fit, then speed, then less offload, then need; unfit ones by need."""

    def place(each: CostEstimate) -> tuple[bool, float, tuple[int, int], int]:
        is_too_large = bool(each.excess(limit_nbytes, host_nbytes))
        seconds = 0.0 if is_too_large else each.step_s or 0.0
        return is_too_large, seconds, each.candidate.setting.offloaded, each.device_nbytes

    return sorted(estimates, key=place)


def in_words(record: TrialRecord) -> str:
    """What a trial found."""
    if not record.is_good:
        return f"failed: {record.failure}"
    said = "" if record.foretold_s is None else f" (estimated {record.foretold_s:.3g} s)"
    return f"{record.step_s:.3g} s a step{said}, {(record.peak_nbytes or 0) / (1 << 20):.0f} MiB"
