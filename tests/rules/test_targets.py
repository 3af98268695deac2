"""Every file of tests is run by exactly one of the targets that CI calls: none falls between them, none runs twice.
What is left to `make test-slow` is there."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ("test", "test-builds")
SLOW = [
    line for line in (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines() if line[:1] not in ("", "#")
]
CONTRACTS = sorted((ROOT / "polyaccel" / "testkit").rglob("contract*.py"))
INHERITED = "".join(file.read_text(encoding="utf-8") for file in CONTRACTS)
"""What the classes of a file may have their tests from."""
FILES = {file.relative_to(ROOT) for file in (ROOT / "tests").rglob("test_*.py")}


def pytest_arguments(target: str) -> list[str]:
    """What `make TARGET` passes on to pytest."""
    said = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
    (command,) = (line for line in said.stdout.splitlines() if " -m pytest " in line)
    words = shlex.split(command)
    return words[words.index("pytest") + 1 :]


def run_by(target: str) -> set[Path]:
    """The files that `make TARGET` collects: those below the paths that it names, or all, without the ignored ones."""
    arguments = pytest_arguments(target)
    ignored = {Path(arguments[at + 1]) for at, word in enumerate(arguments) if word == "--ignore"}
    named = {Path(word) for word in arguments if word.startswith("tests")} - ignored or {Path("tests")}
    assert all((ROOT / path).exists() for path in ignored | named)
    return {file for file in FILES if named & {file, *file.parents} and not ignored & {file, *file.parents}}


def test_every_file_is_run_by_one_target() -> None:
    runs = {target: run_by(target) for target in TARGETS}
    assert all(runs.values())
    assert set.union(*runs.values()) == FILES
    assert sum(map(len, runs.values())) == len(FILES)


def test_help_names_every_target_that_says_what_it_does() -> None:
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    told = {line.partition(":")[0] for line in makefile if " ## " in line}
    assert {line.split()[1] for line in said.stdout.splitlines() if line.startswith("  make ")} == told


@pytest.mark.parametrize("target", TARGETS)
def test_ci_calls_each_of_them_once(target: str) -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert [word for word in script.splitlines() if word.strip().startswith(f"make {target} ")] != []
    assert script.count(f"make {target} VENV") == 1


def test_slow_tests_are_there() -> None:
    """A test that is renamed takes its line in `tests/slow.txt` along."""
    assert sorted(set(SLOW)) == SLOW
    for line in SLOW:
        named, _, every = line.partition(" 1/")
        assert not every or int(every) > 1, line
        file, _, test = named.partition("::")
        assert Path(file) in FILES, line
        *classes, name = test.partition("[")[0].split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        defined = text + INHERITED if classes else text
        assert not name or f"def {name}(" in defined or f"class {name}(" in text, line
        assert all(f"class {each}(" in text for each in classes), line
