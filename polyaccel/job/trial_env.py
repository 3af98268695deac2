"""A trial of the tuner, as its processes see it: a folder that the environment variable `POLYACCEL_TUNE_TRIAL_DIR`
names.

`trial.json` there has the changes to the config, which every config that a rank loads gets, whatever script it is; rank
0 writes `model.json` next to it, what its model is made of and what memory was in use before there were buffers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import PolyaccelError

TRIAL_VARIABLE = "POLYACCEL_TUNE_TRIAL_DIR"
"""The variable with the folder of the trial that a process belongs to. Every process that a rank starts inherits it."""
CHANGES_FILE, MODEL_FILE = "trial.json", "model.json"


@dataclass(frozen=True, slots=True)
class TrialModel:
    """A model as a rank holds it: its parameters in the order of their gradients, and the unit of each.

    `nbytes_before` is the memory in use when the rank had the model and no buffers yet. `is_remote`: the device's
    memory is not the host's; `total_nbytes` is what the device has, 0 if unknown. `others` are the axes of the mesh
    next to `data`, with their sizes.
    """

    specs: tuple[ParamSpec, ...]
    units: Mapping[str, str]
    nbytes_before: int
    is_remote: bool
    total_nbytes: int
    others: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Of all parameters that a rank holds."""
        return sum(spec.nbytes for spec in self.specs)

    def to_json(self) -> str:
        rows = [
            [spec.fqn, list(spec.shape), spec.dtype.value, spec.trainable, self.units.get(spec.fqn, "")]
            for spec in self.specs
        ]
        fields = {name: getattr(self, name) for name in ("nbytes_before", "is_remote", "total_nbytes")}
        return json.dumps({**fields, "others": dict(self.others), "parameters": rows})

    @classmethod
    def from_json(cls, text: str) -> TrialModel:
        """The inverse of `to_json`; blocks of a tensor are taken for whole tensors."""
        tree = json.loads(text)
        rows = tree["parameters"]
        specs = tuple(ParamSpec(fqn, tuple(shape), DType(dtype), 0, trained) for fqn, shape, dtype, trained, _ in rows)
        units = {fqn: unit for fqn, *_, unit in rows if unit}
        return cls(specs, units, tree["nbytes_before"], tree["is_remote"], tree["total_nbytes"], tree["others"])


def trial_folder(environment: Mapping[str, str]) -> Path | None:
    """The folder of the trial that a process with `environment` belongs to; None where it belongs to none."""
    named = environment.get(TRIAL_VARIABLE)
    return Path(named) if named else None


def trial_changes(environment: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the config overrides of this tuner trial, or {}. Raises PolyaccelError if their file cannot be read."""
    folder = trial_folder(environment)
    if folder is None:
        return {}
    try:
        changes = json.loads((folder / CHANGES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PolyaccelError(
            f"{TRIAL_VARIABLE}={folder}, and its {CHANGES_FILE} cannot be read: {error}",
            hint=f"unset {TRIAL_VARIABLE}: only the tuner sets it",
            value=str(folder),
        ) from error
    return changes if isinstance(changes, dict) else {}


def deep_merge(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Write `changes` into `tree`, table by table. None removes a key."""
    for key, value in changes.items():
        if value is None:
            tree.pop(key, None)
        elif isinstance(value, Mapping):
            below = tree.get(key)
            if not isinstance(below, dict):
                below = tree[key] = {}
            deep_merge(below, value)
        else:
            tree[key] = value


def write_trial_model(environment: Mapping[str, str], describe: Callable[[], TrialModel]) -> None:
    """Write down a model in the trial's folder; nothing outside of a trial, nor where it has been written."""
    folder = trial_folder(environment)
    if folder is not None and not (folder / MODEL_FILE).exists():
        (folder / MODEL_FILE).write_text(describe().to_json() + "\n", encoding="utf-8")
