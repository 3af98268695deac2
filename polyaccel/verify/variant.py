"""`Variant`: how a program runs in one of the runs of a verification, and what it records.

[Note: Shadow runs]
A verification runs the user's whole program several times for a few optimizer steps: as plain torch, with the engine,
and at most twice as plain torch with weights moved by one unit in the last place. Every run has the same ranks and
batches, in float32, because the rewrites are the same there. The plain runs hold the whole model on each rank and
average whole gradients, so no rewrite acts in them. Their spread is the tolerance of each quantity. Each moved run only
widens it, so none is made once nothing differs. Where the engine differs, further runs with one rewrite off find the
one to blame.

[Note: Choices that rounding flips]
A router chooses experts by the largest scores. Where two scores differ by less than rounding, a right rewrite chooses
another expert than the plain run, and everything behind it differs. So does the gradient of a ReLU next to zero. The
plain run with noise on its weights flips in the same way, or not, by chance. So a run that differs is compared with
plain runs that had noise too, and agrees where it agrees with one of them. They record whether the program makes such
choices; one that makes none has a single run with noise.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.errors import ConfigError, Problem

VARIABLE = "POLYACCEL_VERIFY"
"""Environment variable with the variant of a process, as JSON, which `polyaccel verify` sets; or a user's choice, one
of `CHOICES`, which goes before `verify` of the config."""
CHOICES = ("auto", "always", "off")

NOISE = 4.0
"""Units in the last place of one standard deviation of a variant's noise."""
_FACTS = "facts"
Array = npt.NDArray[Any]


class VerificationEnd(SystemExit):
    """Raised on each rank when all steps of a variant are recorded: the rest of the program does not run."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of a verification."""

    name: str
    is_plain: bool = False
    """Whether plain torch takes the place of the engine."""
    moved: int = 0
    """Units in the last place by which weights are moved before the first step: -1, 0 or 1."""
    noise: int = 0
    """Which random noise of a few units in the last place is added to weights before the first step; 0 is none."""
    reorders: bool = False
    """Whether products are added up in another order."""
    is_double: bool = False
    """Whether a plain run computes in float64."""
    without: tuple[str, ...] = ()
    """Rewrites that are off, by name."""
    steps: int = 2
    """Optimizer steps of each engine that are recorded."""
    engines: int = 1
    """How many engines the script makes at least, one after the other."""
    folder: str | None = None
    """Folder for the records of processes; None keeps them in memory."""
    bins: int = 0
    """Sums that stand for a tensor of more elements, see `StepRecording`; 0 records every tensor whole."""

    def to_json(self) -> str:
        """Return the value of the environment variable."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Variant:
        """Return the variant that `to_json` wrote."""
        tree = json.loads(text)
        return Variant(**{**tree, "without": tuple(tree["without"])})


@dataclass(slots=True)
class Record:
    """What one rank recorded in one run."""

    rank: int
    values: dict[str, Array] = field(default_factory=dict)
    """Whole tensors by `step/kind/name`; see `polyaccel.verify.compare`."""
    acted: dict[str, int] = field(default_factory=dict)
    """How many modules and parameters each rewrite changed, by its name."""
    order: list[str] = field(default_factory=list)
    """Parameters and buffers in the order in which their modules ended their first forward pass."""
    events: list[str] = field(default_factory=list)
    """Updates in the order in which they were recorded: number of the engine, a slash and the step."""
    has_choices: bool = False
    """Whether the program chose by comparing numbers, recorded in runs with noise."""
    plain: str = "torch"
    """What took the place of the engine in a plain run."""
    engines: int = 0
    """How many engines were made on this rank."""
    unfinished: int = 0
    """How many of them have steps left to record."""
    is_written: bool = False
    shared: dict[str, Any] = field(default_factory=dict)
    """What the engines of this rank have in common while they run."""

    def add(self, step: int, kind: str, name: str, value: Any) -> None:
        """Record one quantity of a step. Floats are kept in float32 or wider."""
        array = np.asarray(value)
        self.values[f"{step}/{kind}/{name}"] = array.astype(np.float32) if array.dtype == np.float16 else array.copy()

    def write(self, folder: Path) -> None:
        """Write the record to a file of `folder` that only this rank writes."""
        facts = {"acted": self.acted, "order": self.order, "events": self.events, "has_choices": self.has_choices}
        facts["plain"] = self.plain
        arrays: dict[str, Any] = {**self.values, _FACTS: np.array(json.dumps(facts))}
        np.savez(folder / f"rank{self.rank}.npz", **arrays)
        self.is_written = True

    @staticmethod
    def read(file: Path) -> Record:
        """Return the record that `write` left in `file`."""
        with np.load(file, allow_pickle=False) as found:
            values = {name: found[name] for name in found.files if name != _FACTS}
            facts = json.loads(str(found[_FACTS]))
        return Record(int(file.stem.removeprefix("rank")), values, **facts)


@dataclass(slots=True)
class ActiveRun:
    """A variant that runs in this process, with the records of its ranks."""

    variant: Variant
    records: dict[int, Record] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def record_of(self, rank: int) -> Record:
        """Return the record of a rank of this process, which several engines share."""
        with self._lock:
            return self.records.setdefault(rank, Record(rank))

    def end_engine(self, rank: int) -> None:
        """Count an engine of `rank` whose steps are recorded. Raises VerificationEnd if it was the last one."""
        record = self.record_of(rank)
        record.unfinished -= 1
        if record.unfinished == 0 and record.engines >= self.variant.engines:
            self._write(record)
            raise VerificationEnd(0)

    def end_process(self) -> None:
        """Keep the records of a script that has ended while some engine, but not all, had steps left."""
        for record in self.records.values():
            if record.unfinished < record.engines and not record.is_written:
                self._write(record)

    def _write(self, record: Record) -> None:
        if self.variant.folder is not None:
            record.write(Path(self.variant.folder))


_active: ActiveRun | None = None


@contextmanager
def running(variant: Variant) -> Iterator[ActiveRun]:
    """Return a context in which engines of this process run as `variant`, for ranks that are threads."""
    global _active
    before, _active = _active, ActiveRun(variant)
    try:
        yield _active
    finally:
        _active = before


def active_run(environment: Mapping[str, str] | None = None) -> ActiveRun | None:
    """Return the run of this process, or None outside of verifications."""
    global _active
    text = (os.environ if environment is None else environment).get(VARIABLE, "")
    if _active is None and text.startswith("{"):
        _active = ActiveRun(Variant.from_json(text))
        atexit.register(_active.end_process)
    return _active


def verify_choice(configured: str) -> str:
    """Return whether trainings of this process are proven: the environment's word, else `configured`.

    Raises ConfigError for a word that is none of `CHOICES`.
    """
    stated = os.environ.get(VARIABLE, "")
    if not stated or stated.startswith("{"):
        return configured
    if stated not in CHOICES:
        raise ConfigError([Problem(VARIABLE, stated, f"should be one of {', '.join(CHOICES)}")], source="environment")
    return stated
