"""The walk over the zoo: a process for each model, with a limit on each row, and results as lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from zoo_models import Entry, NotBuilt, build
from zoo_rows import Comparison, Row

LIMIT_S = 240.0
"""For one row on a busy machine; ranks that hang are named after 110 s."""
_AGAIN = 3
"""Exit code of a process whose ranks hang: another one runs the rows that are left."""


def walk(entries: Iterable[Entry], file: Path, jobs: int = 1, again: Collection[str] = ()) -> None:
    """Append the rows of `entries` to `file`, except those that it has; those with a result of `again` run again."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if again:
        _forget(file, again)
    begun = {row["model"] for row in rows_of(file)}
    left = [one for one in entries if one.key not in done(file)]
    left.sort(key=lambda one: one.key not in begun)
    _import_all()
    running: dict[int, tuple[Entry, Path]] = {}
    while left or running:
        while left and len(running) < jobs:
            entry = left.pop(0)
            state = file.with_name(f"{entry.key.replace('/', '-')}.state")
            state.write_text("build")
            if not (pid := os.fork()):
                os._exit(_child(entry, file, state))
            running[pid] = entry, state
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            entry, state = running.pop(pid)
            if status and os.waitstatus_to_exitcode(status) != _AGAIN:
                mesh = state.read_text()
                ended = f"the process ended with {os.waitstatus_to_exitcode(status)}"
                _append(file, entry, Row(mesh, "not built" if mesh == "build" else "defect", ended))
            if entry.key not in done(file):
                left.insert(0, entry)
            state.unlink(missing_ok=True)
            continue
        for pid, (_, state) in running.items():
            if time.time() - state.stat().st_mtime > LIMIT_S:
                os.kill(pid, signal.SIGKILL)
                os.utime(state)
        time.sleep(0.2)


def _import_all() -> None:
    """Train one model, so that processes inherit every module that this imports."""
    torch.set_num_threads(1)
    sys.setswitchinterval(0.02)  # of ranks that are threads most wait, and only one at a time computes in Python
    comparison = Comparison(build(Entry("causal", "mixtral", "MixtralForCausalLM")))
    for mesh in comparison.meshes():
        comparison.row(mesh)


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, the last one of each model and mesh."""
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return list({(row["model"], row["mesh"]): row for row in rows}.values())


def _forget(file: Path, results: Collection[str]) -> None:
    """Take the rows with these results out of a file, and their models' marks that all rows are there."""
    rows = rows_of(file)
    open_ = {row["model"] for row in rows if row["result"] in results}
    kept = [
        row for row in rows if row["result"] not in results and not (row["mesh"] == "all" and row["model"] in open_)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


def done(file: Path) -> set[str]:
    """Return the models that have all their rows."""
    return {row["model"] for row in rows_of(file) if row["mesh"] in ("all", "build")}


def _child(entry: Entry, file: Path, state: Path) -> int:
    try:
        torch.set_num_threads(1)
        had = {row["mesh"] for row in rows_of(file) if row["model"] == entry.key}
        try:
            tiny = build(entry)
            comparison = Comparison(tiny)
        except NotBuilt as error:
            _append(file, entry, Row("build", "not built", str(error)))
            return 0
        size = sum(one.numel() for one in tiny.model.parameters())
        for mesh in comparison.meshes():
            if mesh in had:
                continue
            state.write_text(mesh)
            began = time.monotonic()
            row = comparison.row(mesh)
            _append(file, entry, row, seconds=round(time.monotonic() - began, 1))
            if row.detail.startswith("Comm"):
                return _AGAIN
        _append(file, entry, Row("all", "", tiny.shrunk), parameters=size)
    except Exception:
        _append(file, entry, Row("build", "not built", " ".join(traceback.format_exc(limit=-3).split())))
    return 0


def _append(file: Path, entry: Entry, row: Row, **more: Any) -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    line = {"model": entry.key, "class": entry.name, **asdict(row), **more, **versions}
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")
