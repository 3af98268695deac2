"""Run public training scripts over the drop-in, on two CPU ranks, and compare their losses with DeepSpeed's.

    python tests/scripts --sources FOLDER --only minRF
    python tests/scripts --record PYTHON      a real package's python: its losses are the expected ones

Files come from git directories in FOLDER (`OWNER+NAME/repo`), or are cloned from GitHub.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from argparse import ArgumentParser
from datetime import date
from math import isfinite
from pathlib import Path
from typing import Any

from script_page import counts, page, put
from script_runs import HERE, MESHES, ROOT, Failed, Losses, apart, on_mesh, run, scripts
from script_shims import torchvision_without_operators

EXPECTED = HERE / "expected.json"
RESULTS = HERE / "results.json"
OF_MESHES = HERE / "meshes.json"
PAGE = ROOT / "docs" / "reference" / "public_scripts.md"
COMPATIBILITY = ROOT / "docs" / "compatibility.md"


def load(file: Path) -> dict[str, Any]:
    """A table of results by the names of scripts."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def store(file: Path, table: dict[str, Any]) -> None:
    """Write it, in the order of names."""
    lines = [f" {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table)]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def judge(script: dict[str, Any], losses: Losses, expected: Losses | None) -> tuple[str, float]:
    """The result of a run, and how far apart its losses are."""
    if expected is None:
        return "not comparable", -1.0
    if not all(isfinite(loss) for rank in losses for loss in rank):
        return "not finite", -1.0
    distance = apart(losses, expected)
    return ("equal" if distance <= script.get("tolerance", 1e-5) else "other losses"), distance


def choose(rows: list[dict[str, Any]], only: list[str]) -> list[dict[str, Any]]:
    """Rows whose names have one of the parts `only`; a whole name chooses its row alone."""
    names = {row["name"] for row in rows}
    return [
        row
        for row in rows
        if not only or any(part == row["name"] if part in names else part in row["name"] for part in only)
    ]


def refusal(log: str) -> tuple[str, str]:
    """The result of a run that raised an error: refused where polyaccel said so with a hint, and why."""
    found = re.findall(r"^polyaccel\.errors\.(\w+): (.*)\n +hint: ", log, re.MULTILINE)
    kind, why = found[-1] if found else ("", "")
    return ("refused", why) if found and kind != "VerificationError" else ("failed", why)


def walk_meshes(sources: list[Path], only: list[str], meshes: list[str]) -> int:
    """Run the trainers' scripts under each mesh and on one rank, and give how many losses differ."""
    failures, table = 0, load(OF_MESHES)
    for script in choose([row for row in scripts() if "meshes" in row], only):
        alone: dict[str, Losses] = {}
        for mesh in meshes or [name for name in MESHES if not name.startswith("one")]:
            plain = "one rank, experts" if "expert" in mesh else "one rank"
            try:
                found = run(on_mesh(script, mesh), sources, sys.executable, "meshes")
                if plain not in alone:
                    alone[plain] = run(on_mesh(script, plain), sources, sys.executable, "meshes")
                least = script.get("terms", 1e-12)
                distance = max(apart([losses], alone[plain], least) for losses in found)
                result, why = "equal" if distance <= script.get("mesh_tolerance", 1e-6) else "other losses", ""
                if not all(isfinite(loss) for losses in alone[plain] for loss in losses):
                    result = "not finite"
            except Exception as error:  # such as a refusal: the next mesh is run
                print(f"{script['name']}, {mesh}: {error}", flush=True)
                result, why = refusal(str(error))
                distance = float("inf")
            failures += result not in ("equal", "refused")
            table = load(OF_MESHES)
            row = {"result": result, "apart": distance, "date": str(date.today())}
            table[f"{script['name']}, {mesh}"] = {**row, "why": why} if why else row
            store(OF_MESHES, table)
            print(f"{script['name']}, {mesh}: {result}, apart {distance:.1e}", flush=True)
    return failures


def write_pages(expected: dict[str, Any]) -> None:
    """Write the page of scripts, and their counts in the page about compatibility."""
    rows, results, meshes = scripts(), load(RESULTS), load(OF_MESHES)
    PAGE.write_text(page(rows, expected, results, meshes), encoding="utf-8")
    text = COMPATIBILITY.read_text(encoding="utf-8")
    COMPATIBILITY.write_text(put(text, counts(rows, results, meshes)), encoding="utf-8")


def main() -> int:
    """Run the rows, and give how many failed."""
    parser = ArgumentParser(description="Run public training scripts over the drop-in.")
    parser.add_argument("--sources", type=Path, nargs="*", default=[], help="folders of git directories")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the scripts' names")
    parser.add_argument("--group", default="", help="a group of the table, such as examples")
    parser.add_argument("--record", metavar="PYTHON", help="record the losses of the real package of this python")
    parser.add_argument("--missing", action="store_true", help="only rows without a result")
    parser.add_argument(
        "--meshes", nargs="*", metavar="MESH", help="run trainers under meshes: tensor 2, pipeline 2, ..."
    )
    parser.add_argument("--page", action="store_true", help="write the page, and run nothing")
    arguments = parser.parse_args()
    file = EXPECTED if arguments.record else RESULTS
    torchvision_without_operators()  # for the models that stand in
    if arguments.meshes is not None:
        return walk_meshes(arguments.sources, arguments.only, arguments.meshes)
    expected, failures = load(EXPECTED), 0
    for script in choose(scripts(), arguments.only):
        name = script["name"]
        if arguments.page or not script["group"].startswith(arguments.group):
            continue
        if arguments.missing and name in load(file):
            continue
        try:
            losses = run(
                script, arguments.sources, arguments.record or sys.executable, "real" if arguments.record else "ours"
            )
        except Exception as error:  # a script's stand-ins and its run alike: the next script is run
            if not isinstance(error, Failed):
                traceback.print_exc()
            failures += 1
            print(f"{name}: {error}", flush=True)
            if not arguments.record:
                store(RESULTS, {**load(RESULTS), name: {"result": "failed", "date": str(date.today())}})
            continue
        shown = f"{losses[0][0]:.6f} to {losses[0][-1]:.6f}, {len(losses[0])} losses" if losses[0] else "no losses"
        if arguments.record:
            store(EXPECTED, {**load(EXPECTED), name: losses})
            print(f"{name}: recorded, {shown}", flush=True)
            continue
        result, distance = judge(script, losses, expected.get(name))
        failures += result == "other losses"
        row = {"result": result, "apart": distance, "date": str(date.today())}
        store(RESULTS, {**load(RESULTS), name: row})
        print(f"{name}: {result}, {shown}, apart {distance:.1e}", flush=True)
    if arguments.page or not arguments.only:
        write_pages(expected)
    return failures


if __name__ == "__main__":
    sys.exit(min(main(), 100))
