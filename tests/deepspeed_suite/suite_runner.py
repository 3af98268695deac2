"""DeepSpeed's test files, one pytest each, ended and started again when a test makes no progress."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).parent
# Tests that DeepSpeed's own CI leaves to other jobs: other devices, downloads, hours.
MARKS = "not sequential and not nightly and not stable_diffusion and not evaluation"
# A rank that failed leaves the others waiting. They get this long to end by themselves.
GRACE = 15.0
# pytest's codes for an error of its own and for options that it does not know.
_BROKEN = (3, 4)


@dataclass(frozen=True)
class Setting:
    """How the files are run.

    Attributes:
        python: The interpreter, in whose environment `deepspeed` is.
        tests: The folder `tests` of DeepSpeed's repository.
        path: Folders that go before the environment's packages.
        outcomes: The file that outcomes are added to.
        seconds: Time for one test.
        cases: Cases of one test that are tried until one passes.
        only: The cases that are run; all that `cases` keeps where it is empty.
    """

    python: str
    tests: Path
    path: tuple[str, ...]
    outcomes: Path
    seconds: float = 240.0
    cases: int = 2
    only: frozenset[str] = frozenset()


def run_files(files: list[str], setting: Setting) -> None:
    """Run test files that have no outcome yet, those of a folder in one process.

    Args:
        files: Their paths from the folder of tests.
        setting: How.
    """
    setting.outcomes.parent.mkdir(parents=True, exist_ok=True)
    over = {str(row[1]) for row in read_rows(setting.outcomes) if row[0] == "file"}
    left = [file for file in files if file not in over]
    for _, group in groupby(left, key=lambda file: file.rpartition("/")[0]):
        _run_group([*group], setting)


def read_rows(file: Path) -> Iterator[list[object]]:
    """Yield the rows of a file of outcomes."""
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def _run_group(files: list[str], setting: Setting) -> None:
    while _run_once(files, setting):
        pass
    for file in files:
        _write(setting.outcomes, "file", file)


def _is_in(case: str, files: list[str]) -> bool:
    return case.partition("::")[0] in files


def _run_once(files: list[str], setting: Setting) -> bool:
    """Run pytest on the cases of files that have no outcome yet. Return whether it had to be ended in one of them."""
    only = setting.outcomes.with_suffix(".only").absolute()
    only.write_text("\n".join(sorted(each for each in setting.only if _is_in(each, files))), encoding="utf-8")
    environment = dict(os.environ) | {
        "DS_ACCELERATOR": "cpu",
        "DS_UNITTEST_TIMEOUT": "3600",
        "HF_HUB_OFFLINE": "1",
        "LOCAL_SIZE": "4",
        "OMP_NUM_THREADS": "1",
        "POLYACCEL_MATRIX_KERNELS": "off",
        "PYTHONPATH": os.pathsep.join(
            [*setting.path, str(HERE), str(setting.tests.absolute()), os.environ.get("PYTHONPATH", "")]
        ),
        "SUITE_CASES": str(setting.cases),
        "SUITE_ONLY": str(only) if setting.only else "",
        "SUITE_OUTCOMES": str(setting.outcomes.absolute()),
        "TRANSFORMERS_OFFLINE": "1",
    }
    command = [setting.python, "-m", "pytest", "-p", "suite_observer", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += ["-p", "no:xdist", "-q", "--continue-on-collection-errors", "-o", "addopts="]
    command += ["--basetemp", str(setting.outcomes.with_suffix(".tmp").absolute())]
    before = setting.outcomes.stat().st_size if setting.outcomes.exists() else 0
    with (setting.outcomes.parent / (setting.outcomes.name + ".log")).open("w") as log:
        process = subprocess.Popen(
            [*command, "-m", MARKS, *files],
            cwd=setting.tests,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        size, moved, failed = before, time.monotonic(), None
        try:
            while process.poll() is None:
                time.sleep(0.2)
                now = setting.outcomes.stat().st_size if setting.outcomes.exists() else 0
                if now != size:
                    size, moved = now, time.monotonic()
                    rows = _rows_since(setting.outcomes, before)
                    failed = time.monotonic() if rows and rows[-1][0] == "rank" else None
                waited = time.monotonic() - moved
                if waited > setting.seconds or (failed is not None and time.monotonic() - failed > GRACE):
                    return _end(process, _rows_since(setting.outcomes, before), setting)
        finally:
            _kill(process)
    if process.returncode in _BROKEN:
        raise SystemExit(f"pytest could not run {files[0]}: see {log.name}")
    rows = _rows_since(setting.outcomes, before)
    if rows and rows[-1][0] != "end":  # pytest died in a test
        return _end(process, rows, setting)
    return False


def _end(process: subprocess.Popen[bytes], rows: list[list[object]], setting: Setting) -> bool:
    _kill(process)
    started = [str(row[1]) for row in rows if row[0] == "start"]
    if not started:
        return False  # a file does not load
    since = max((at for at, row in enumerate(rows) if row[0] == "start"), default=-1)
    texts = [str(row[1]) for row in rows[since + 1 :] if row[0] == "rank"]
    outcome = "failed" if texts else "hung"
    text = texts[0] if texts else f"no progress, code {process.returncode}"
    _write(setting.outcomes, "end", started[-1], outcome, 0, text)
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rows_since(file: Path, offset: int) -> list[list[object]]:
    if not file.exists():
        return []
    with file.open("rb") as opened:
        opened.seek(offset)
        return [json.loads(line) for line in opened.read().decode().splitlines() if line.endswith("]")]


def _write(file: Path, *row: object) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(row) + "\n")
