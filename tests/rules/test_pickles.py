"""Who may read a pickle, which is a program that its reader runs: those listed here, each with its reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "polyaccel"
READERS = {
    "comm/api/objects.py": "users' own objects, under the seal of the job's secret",
    "errors.py": "reads none: asks of a value whether it can be pickled, when an error is",
    "checkpoint/convert/formats/torch_dcp.py": "metadata of torch's library, whose own records alone are made",
    "testkit/ranks/mpi.py": "answers of a test's own workers, through pipes that nobody else has",
    "testkit/ranks/procs.py": "answers of a test's own workers, through pipes that nobody else has",
    "testkit/ranks/worker.py": "tasks of the pool and answers to it, through pipes that no other process has",
}
MODULES = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal"})


def imported(file: Path) -> set[str]:
    """The top packages of which the file imports more than errors, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not all(name.name.endswith("Error") for name in node.names):
            found.add((node.module or "").partition(".")[0])
    return found


def test_nobody_else_imports_pickle() -> None:
    files = {file.relative_to(PACKAGE).as_posix(): file for file in PACKAGE.rglob("*.py")}
    assert sorted(name for name, file in files.items() if imported(file) & MODULES) == sorted(READERS)


@pytest.mark.parametrize("method", ["send", "recv", "isend", "irecv", "bcast", "gather", "allgather", "scatter"])
def test_no_rank_uses_the_pickles_of_mpi4py(method: str) -> None:
    """The methods of mpi4py's communicators in small letters pickle; those with a capital send bytes."""
    worlds = ("world", "COMM_WORLD", "comm", "_comm")
    for file in (*PACKAGE.glob("comm/mpi/*.py"), *PACKAGE.glob("comm/backends/mpi/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == method:
                assert ast.unparse(node.value).rpartition(".")[2] not in worlds, f"{file}: {ast.unparse(node)}"
