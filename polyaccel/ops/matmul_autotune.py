"""The choice of which matrix products of the framework are replaced on this machine: by the user, or by measurement.

A measurement holds for one processor, one version of torch and one number of threads. Each is a small file in the
user's cache folder, so that a job measures once a machine and `polyaccel doctor` can show the result without torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from logging import getLogger
from pathlib import Path
from typing import Literal, get_args

from polyaccel.core.processor import processor_identity
from polyaccel.core.user_dirs import cache_folder
from polyaccel.errors import ConfigError, Problem
from polyaccel.ops.base import MATRIX_OPS

MatrixChoice = Literal["auto", "on", "off"]
VARIABLE = "POLYACCEL_MATRIX_KERNELS"
"""Environment variable that overrides the config's `matrix_kernels`; "on" uses the kernels without a measurement."""
LEAST_SPEEDUP = 1.2
"""The speedup from which on a product is replaced: less would not be worth another rounding of its sums."""

_FORMAT = 1

log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """Speedups over torch's own products, by the op's name, measured with `threads` threads of `processor`."""

    processor: str
    torch: str
    threads: int
    speedups: Mapping[str, float]

    @property
    def faster(self) -> frozenset[str]:
        """The names of the ops worth using."""
        return frozenset(name for name, speedup in self.speedups.items() if speedup >= LEAST_SPEEDUP)


def matrix_choice(configured: MatrixChoice) -> MatrixChoice:
    """The user's choice: the environment's, else `configured`. Raises ConfigError for a value that is none."""
    stated = os.environ.get(VARIABLE, "")
    for choice in get_args(MatrixChoice):
        if stated == choice:
            return choice  # type: ignore[no-any-return]
    if stated:
        expected = f"should be one of {', '.join(get_args(MatrixChoice))}"
        raise ConfigError([Problem(VARIABLE, stated, expected, "unset it")], source="environment")
    return configured


def load_measured(threads: int) -> Measured | None:
    """The measurement of this machine with `threads`; None without one, or if its file cannot be read."""
    found = _read(_file(threads))
    wanted = (processor_identity(), _torch_version(), threads)
    return found if found is not None and (found.processor, found.torch, found.threads) == wanted else None


def save_measured(threads: int, speedups: Mapping[str, float]) -> None:
    """Keep a measurement. Where the cache cannot be written, the next process measures again."""
    measured = Measured(processor_identity(), _torch_version(), threads, dict(speedups))
    file = _file(threads)
    temporary = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump({"format": _FORMAT, **asdict(measured)}, stream)
        os.replace(temporary, file)
    except OSError as error:
        log.debug("the measurement of matrix products was not kept: %s", error)
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def describe_matrix_kernels() -> str:
    """One line for reports: the products that are replaced on this machine, as far as they have been measured."""
    choice = matrix_choice("auto")
    if choice != "auto":
        return f"{choice} ({VARIABLE})"
    identity, version = processor_identity(), _torch_version()
    if not version:
        return "none: they come with torch"
    lines = [
        f"{found.threads} thread{'s' * (found.threads != 1)}, {_summary(found)}"
        for found in sorted(_all_measured(), key=lambda found: found.threads)
        if (found.processor, found.torch) == (identity, version)
    ]
    return "; ".join(lines) or "not measured yet; the first engine on this machine does that"


def _summary(measured: Measured) -> str:
    parts = (f"{name} {speedup:.2f}" for name, speedup in measured.speedups.items())
    used = f"used for {', '.join(sorted(measured.faster))}" if measured.faster else "not used"
    return f"oneDNN's speed over torch's: {', '.join(parts)}; {used}"


def _file(threads: int) -> Path:
    key = json.dumps([processor_identity(), _torch_version(), threads])
    return cache_folder() / f"matrix-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _all_measured() -> Iterator[Measured]:
    for file in sorted(cache_folder().glob("matrix-*.json")):
        found = _read(file)
        if found is not None:
            yield found


def _read(file: Path) -> Measured | None:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        if tree.pop("format") != _FORMAT:
            return None
        found = Measured(**tree)
        known = {name: float(found.speedups[name]) for name in (op.name for op in MATRIX_OPS)}
        return Measured(str(found.processor), str(found.torch), int(found.threads), known)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
