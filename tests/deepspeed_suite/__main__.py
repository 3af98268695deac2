"""Run DeepSpeed's own unit tests on CPU ranks over the drop-in, and write the counts in docs/compatibility.md.

    python tests/deepspeed_suite --tests FOLDER/tests --only runtime/zero

Cases that pass under the real package are recorded; `--real PYTHON` records them again, with the interpreter of an
environment that has DeepSpeed. Outcomes are added to build/deepspeed_suite as they come: a run that is stopped goes on
where it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser
from datetime import date
from importlib.metadata import version
from pathlib import Path

from suite_list import reason_of
from suite_page import page, put, rows_of
from suite_runner import Setting, read_rows, run_files

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("real_outcomes.json")
BUILD = ROOT / "build" / "deepspeed_suite"
URL = "https://github.com/deepspeedai/DeepSpeed"
COMMIT = "edaa7221267243c7be7fb49c5d5f5c4fb97b4641"
"""Of the tests whose cases are recorded. Tests at the release's tag have other names."""
VERSION = "0.19.8"
"""Of the package under which they are recorded."""


def main() -> int:
    """Run the suite.

    Returns:
        0 if at least 95 % of the cases of public behaviour pass.
    """
    parser = ArgumentParser(description="Run DeepSpeed's own unit tests over the drop-in, on CPU ranks.")
    parser.add_argument("--tests", type=Path, help="the folder `tests` of DeepSpeed; fetched without it")
    parser.add_argument("--only", default="", help="a part of the paths of files")
    parser.add_argument("--real", metavar="PYTHON", help="record which cases pass under this interpreter's DeepSpeed")
    parser.add_argument("--seconds", type=float, default=240.0, help="time for one case")
    parser.add_argument("--page", action="store_true", help="write the page from the outcomes, and run nothing")
    arguments = parser.parse_args()
    if arguments.real:
        return _record(arguments.real, arguments.tests or _fetch(), arguments.only, arguments.seconds)
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    passed = [f"unit/{file}::{case}" for file, cases in recorded["passed"].items() for case in cases]
    outcomes = BUILD / "ours.jsonl"
    if not arguments.page:
        files = [f"unit/{file}" for file in recorded["passed"] if arguments.only in file]
        only = frozenset(passed)
        run_files(
            files, Setting(sys.executable, arguments.tests or _fetch(), (), outcomes, arguments.seconds, only=only)
        )
    found = {str(row[1]): str(row[2]) for row in read_rows(outcomes) if row[0] == "end"}
    there = [case for case in passed if arguments.only in case]
    rows = rows_of(there, found)
    failed = [case for case in there if found.get(case) != "passed" and not reason_of(case)]
    print(*failed, sep="\n")
    if not arguments.only:
        facts = (
            f"{date.today()}, torch {version('torch')}: DeepSpeed's tests of {recorded['tests']}. The cases that pass "
            f"under DeepSpeed {recorded['deepspeed']} were recorded on {recorded['date']}."
        )
        put(ROOT / "docs" / "compatibility.md", page(rows, facts))
    public, here = (sum(row[at] for row in rows.values()) for at in (2, 3))
    print(f"{here} of {public} cases of public behaviour pass")
    return int(here < 0.95 * public)


def _fetch(url: str = URL, commit: str = COMMIT) -> Path:
    """Get DeepSpeed's tests, without its package: their conftest would import that one."""
    folder = BUILD / "DeepSpeed"
    if not (folder / "tests").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for command in (
            ["init", "--quiet"],
            ["sparse-checkout", "set", "tests"],
            ["fetch", "--quiet", "--depth", "1", url, commit],
            ["checkout", "--quiet", "FETCH_HEAD"],
        ):
            subprocess.run(["git", "-C", str(folder), *command], check=True)
    return folder / "tests"


def _record(python: str, tests: Path, only: str, seconds: float) -> int:
    outcomes = BUILD / "real.jsonl"
    files = sorted(str(file.relative_to(tests)) for file in (tests / "unit").rglob("test_*.py"))
    run_files([file for file in files if only in file], Setting(python, tests, (), outcomes, seconds))
    write_record(
        [str(row[1]) for row in read_rows(outcomes) if row[:1] == ["end"] and row[2] == "passed"],
        f"commit {COMMIT[:7]}",
    )
    return 0


def write_record(passed: list[str], tests: str) -> None:
    """Write which cases pass under the real package.

    Args:
        passed: Their node ids.
        tests: Tag or commit of the tests.
    """
    by_file: dict[str, list[str]] = {}
    for case in sorted(set(passed)):
        file, _, name = case.removeprefix("unit/").partition("::")
        by_file.setdefault(file, []).append(name)
    record = {"deepspeed": VERSION, "tests": tests, "date": str(date.today()), "passed": by_file}
    RECORDED.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
