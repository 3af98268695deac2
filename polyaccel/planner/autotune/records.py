"""What trials found, as JSON lines: a tuner that was stopped reads them and continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polyaccel.errors import PolyaccelError
from polyaccel.job.trial_env import TrialModel
from polyaccel.observability.metrics import cut_unfinished_line
from polyaccel.planner.autotune.candidates import Candidate

TRIALS_FILE, MODEL_FILE = "trials.jsonl", "model.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial that has ended. `step_s` is the shortest of its measured steps, for what else a machine does makes steps
    longer and never shorter; `spread` is half of what the longest took more, as a share of it, `phase_s` its phases,
    and `peak_nbytes` the most device memory of any rank; all None, or empty, where `failure` says why there are none.
    `foretold_s` and `foretold_nbytes` are the planner's estimates before it, None where it could not."""

    candidate: Candidate
    step_s: float | None = None
    spread: float = 0.0
    phase_s: Mapping[str, float] = field(default_factory=dict)
    peak_nbytes: int | None = None
    failure: str = ""
    wall_s: float = 0.0
    foretold_s: float | None = None
    foretold_nbytes: int | None = None

    @property
    def is_good(self) -> bool:
        return not self.failure and self.step_s is not None and self.peak_nbytes is not None

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> TrialRecord:
        """The inverse of `to_line`, parsed."""
        return cls(**{**tree, "candidate": Candidate(**tree["candidate"])})


class TrialLog:
    """The trials of one question, in a folder: `key` says which one, so that the answers to another are not taken.

    Raises PolyaccelError where the folder has those of another and they may not be overwritten, or where its file is
    not to be read.
    """

    def __init__(self, folder: Path, key: str, *, overwrite: bool) -> None:
        self.folder = folder
        self.records: list[TrialRecord] = []
        self._file = folder / TRIALS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            cut_unfinished_line(self._file)
            lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
            trees = [json.loads(line) for line in lines]
            if trees and trees[0].get("key") == key:
                self.records = [TrialRecord.from_tree(tree) for tree in trees[1:]]
                return
            if trees and not overwrite:
                raise PolyaccelError(
                    f"{self._file} has the trials of another config, script or number of ranks",
                    hint="name another results_dir, or let autotuning.overwrite be true",
                    value=str(self._file),
                )
            (folder / MODEL_FILE).unlink(missing_ok=True)
            self._file.write_text(json.dumps({"key": key}) + "\n", encoding="utf-8")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PolyaccelError(
                f"{self._file} is not to be read or written: {type(error).__name__}: {error}",
                hint="name another results_dir, or remove the file",
                value=str(self._file),
            ) from error

    def add(self, record: TrialRecord) -> None:
        """Write a trial down; it is on the disk when this returns."""
        self.records.append(record)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(record.to_line() + "\n")

    def keep_model(self, trial_model: TrialModel) -> None:
        """Keep what a trial's model is made of."""
        if self.model() is None:
            (self.folder / MODEL_FILE).write_text(trial_model.to_json() + "\n", encoding="utf-8")

    def model(self) -> TrialModel | None:
        """The model, once a trial has recorded it."""
        try:
            return TrialModel.from_json((self.folder / MODEL_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, LookupError):
            return None


def read_trials(folder: Path) -> tuple[list[TrialRecord], TrialModel]:
    """Read the trials and the model from a tuner's folder."""
    try:
        lines = (folder / TRIALS_FILE).read_text(encoding="utf-8").splitlines()[1:]
        trial_model = TrialModel.from_json((folder / MODEL_FILE).read_text(encoding="utf-8"))
        return [TrialRecord.from_tree(json.loads(line)) for line in lines], trial_model
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise PolyaccelError(
            f"{folder} has no trials: {type(error).__name__}: {error}",
            hint="name the results folder of `polyaccel tune`",
            value=str(folder),
        ) from error
