"""The folder of a run, `runs/NAME`: which one it is, and what its files are called."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path

from polyaccel import PolyaccelError

DEFAULT_NAME = "gpt"


@dataclass(frozen=True)
class RunFolder:
    """Paths below a run's folder."""

    path: Path

    @property
    def settings(self) -> Path:
        return self.path / "settings.json"

    @property
    def resolved_config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def corpus(self) -> Path:
        return self.path / "corpus.json"

    @property
    def sample(self) -> Path:
        return self.path / "sample.txt"

    @property
    def loss_png(self) -> Path:
        return self.path / "loss.png"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def exists(self) -> bool:
        return self.settings.exists()


def choose_folder(runs: Path, name: str | None, *, resume: bool) -> RunFolder:
    """The folder to work in. Without a name: the run that was active last when resuming, else the first free of
    gpt, gpt-2, gpt-3, ... Raises PolyaccelError for a new run under a name that is taken, or no run to resume."""
    if resume:
        return _existing(runs, name)
    if name is None:
        names = (DEFAULT_NAME if number == 1 else f"{DEFAULT_NAME}-{number}" for number in count(1))
        return next(folder for name in names if not (folder := RunFolder(runs / name)).path.exists())
    folder = RunFolder(runs / name)
    if folder.exists():
        hint = "choose another --name, or go on with it by --resume"
        raise PolyaccelError(f"the run {folder.path} exists", hint=hint, value=name)
    return folder


def _existing(runs: Path, name: str | None) -> RunFolder:
    begun = [RunFolder(file.parent) for file in runs.glob("*/settings.json")]
    if name is not None:
        begun = [folder for folder in begun if folder.path == runs / name]
    if not begun:
        what = f"no run {runs / name}" if name else f"no run in {runs}"
        raise PolyaccelError(f"there is {what} to resume", hint="start one without --resume", value=name)
    return max(begun, key=lambda folder: max(file.stat().st_mtime for file in folder.path.iterdir()))
