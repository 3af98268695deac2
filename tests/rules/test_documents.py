"""What README and CONTRIBUTING tell people to type is run by a test: each command is in a table, or a test fails."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANY_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)

RUN_ELSEWHERE = {
    "pip install -e '.[torch]'": "tests/builds/environments/test_bare_environments.py",
    "pip install ./plugins/polyaccel-deepspeed": "tests/builds/dropin/test_dropin_installed.py",
    "deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config ds_config.json": (
        "tests/builds/documents/test_docs_code.py"
    ),
    "polyaccel plugins new acme --kind accelerator": "tests/builds/documents/test_docs_code.py",
    "pip install ./polyaccel-acme": "tests/builds/documents/test_docs_code.py",
    "polyaccel plugins check acme --kind accelerator": "tests/builds/plugins/test_plugins_new.py",
}
"""Commands that another test runs."""
MAKE = {
    "make train": "examples/gpt/train.py",
    "make check": "tests/unit",
    "make test": "python -m pytest",
    "make test-builds": "python -m pytest",
    "make lint": "ruff check .",
}
"""Targets, which would make an environment, and a command that is part of each. CI runs all but the first in full."""
SETUP = {".venv/bin/pre-commit install"}
"""Commands that only prepare the reader's clone."""
PYTEST = ".venv/bin/python -m pytest "
"""How a document runs some tests; which ones is checked here, and `make test` runs them."""
PATH = re.compile(r"`((?:polyaccel|plugins|tests|csrc|docs)/[\w./-]+|[\w-]+\.(?:toml|lock|yml|md))`")
"""A file or folder of the project, as CONTRIBUTING writes it."""


def commands() -> set[str]:
    """Every line of every block of shell in the two documents."""
    documents = (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))
    blocks = [block for document in documents for block in FENCE.findall(document.read_text(encoding="utf-8"))]
    return {line for language, text in blocks for line in text.splitlines() if language == "sh"}


def run_in_builds() -> set[str]:
    """The commands in the table of the test that runs them."""
    module = ast.parse((ROOT / "tests" / "builds" / "documents" / "test_readme_runs.py").read_text(encoding="utf-8"))
    (table,) = (
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "RUN"
    )
    return set(ast.literal_eval(table))


def test_every_command_is_run_somewhere() -> None:
    typed = {command for command in commands() if not command.startswith(PYTEST)}
    assert typed == {*run_in_builds(), *RUN_ELSEWHERE, *MAKE, *SETUP}
    assert all((ROOT / file).exists() for file in RUN_ELSEWHERE.values())


@pytest.mark.parametrize("target", [*MAKE, "make bench", "make help", "make clean"])
def test_a_target_is_there_and_does_what_it_is_for(target: str) -> None:
    done = subprocess.run([*target.split(), "-n"], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert MAKE.get(target, "") in done.stdout


def test_make_train_prints_one_short_line_and_runs_it(tmp_path: Path) -> None:
    for name, text in {"python": "echo 3", "polyaccel": "printf '[%s]' \"$@\"; exit 5"}.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    make = ["make", "-n", "train", f"VENV={tmp_path}", "ARGS=--steps 2"]
    shown = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, timeout=280)
    (recipe,) = (line for line in shown.stdout.splitlines() if "examples/gpt/train.py" in line)
    done = subprocess.run(recipe, shell=True, capture_output=True, text=True, timeout=280)
    line, ran = done.stdout.split("\n")
    assert line == f"{tmp_path}/bin/polyaccel run --ranks 3 examples/gpt/train.py --steps 2"
    assert ran == "[run][--ranks][3][examples/gpt/train.py][--steps][2]"
    assert done.returncode == 5


def test_make_makes_its_environment_when_it_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "-n", "test", f"VENV={tmp_path / 'venv'}"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    lines = done.stdout.splitlines()
    made = next(number for number, line in enumerate(lines) if "-m venv" in line)
    installed = next(number for number, line in enumerate(lines) if "--constraint requirements-dev.lock" in line)
    tested = next(number for number, line in enumerate(lines) if "-m pytest" in line)
    assert made < installed < tested


def test_every_file_that_a_document_links_to_exists() -> None:
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md", "recipes/*.md"):
        for document in ROOT.glob(pattern):
            assert _dead_links(document) == [], document


def _dead_links(document: Path) -> list[str]:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", ANY_FENCE.sub("", document.read_text(encoding="utf-8")))
    files = [(document.parent / link).resolve() for link in links if "://" not in link]
    return [str(file) for file in files if not file.exists()]


def test_every_error_in_the_page_on_troubleshooting_is_one_of_ours() -> None:
    page = (ROOT / "docs" / "howto" / "troubleshooting.md").read_text(encoding="utf-8")
    errors = re.findall(r"^\| `([^`]+)`[^|]* \|", page, re.MULTILINE)
    code = "\n".join(file.read_text(encoding="utf-8") for file in ROOT.glob("polyaccel/**/*.py"))
    assert len(errors) > 5
    assert [error for error in errors if error not in code] == []


def test_the_page_on_packages_has_each_folder() -> None:
    page = (ROOT / "docs" / "packages.md").read_text(encoding="utf-8")
    rows = {
        name for cell in re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE) for name in re.findall(r"`([\w/]+)`", cell)
    }
    inits = ROOT.glob("polyaccel/**/__init__.py")
    folders = {str(file.parent.relative_to(ROOT / "polyaccel")) for file in inits} - {"."}
    deeper = {name for name in folders if name.startswith("comm/backends/")}
    backends = {"local", "gloo", "nccl", "xccl", "hccl", "shm", "mpi", "ccl"}
    assert folders - deeper <= rows
    assert [name for name in rows - backends if not _is_a_module(name)] == []


def _is_a_module(name: str) -> bool:
    return (ROOT / "polyaccel" / name).is_dir() or (ROOT / "polyaccel" / f"{name}.py").exists()


def test_every_test_that_a_document_runs_exists() -> None:
    named = [shlex.split(command.removeprefix(PYTEST)) for command in commands() if command.startswith(PYTEST)]
    assert named
    for target, *options in named:
        path, _, function = target.partition("::")
        files = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("test_*.py"))
        tests = re.findall(r"def (test_\w+)", "\n".join(file.read_text(encoding="utf-8") for file in files))
        assert not function or function in tests
        assert not options or (options[0] == "-k" and any(options[1] in test for test in tests))


def test_every_path_that_contributing_names_exists() -> None:
    paths = PATH.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
