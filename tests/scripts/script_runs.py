"""A public script on two CPU ranks: its files, stand-ins and shims, and the losses of each rank."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomllib
from script_sources import git_directory, write_files
from script_stand_ins import make

from polyaccel.job.ports import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "scripts"
RANKS = 2
TIMEOUT_S = 400
ABOUT_DEEPSPEED = re.compile(r"deepspeed|model_engine|zero_|\.backward\(|\.step\(", re.IGNORECASE)
"""What no replacement may touch."""

Losses = list[list[float]]


class Failed(Exception):
    """A script that did not end, with the end of what it printed."""


def scripts() -> list[dict[str, Any]]:
    """The rows of the table, with the defaults of their projects."""
    found: list[dict[str, Any]] = []
    for file in sorted((HERE / "table").glob("*.toml")):
        for project in tomllib.loads(file.read_text(encoding="utf-8"))["project"]:
            shared = {key: value for key, value in project.items() if key != "script"}
            found += [{**shared, **script} for script in project["script"]]
    return found


MESHES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor 2": {"tensor_parallel": {"autotp_size": 2}},
    "sequence 2": {"sequence_parallel_size": 2},
    "pipeline 2": {"pipeline": {"stages": 2}},
    "expert 2": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "one rank, experts": {},
}
"""Sections that are put into a trainer's config. Ranks get the same batches, so that losses are those of one rank."""


def on_mesh(script: dict[str, Any], mesh: str) -> dict[str, Any]:
    """The row of a trainer whose config has a section for `mesh`, at stage 1; a mixture where ranks share experts."""
    file = script["meshes"]
    config = dict(script.get("config", {}).get(file, {}))
    config |= {"zero_optimization": {"stage": 1}, "bf16.enabled": False, "fp16.enabled": False, **MESHES[mesh]}
    stand_ins = script.get("mesh_stand_ins", script["stand_ins"])
    if "expert" in mesh:
        experts = script.get("expert_model", "mixtral")
        stand_ins = [f"{name.partition('=')[0]}={experts}" if name.startswith("model:") else name for name in stand_ins]
    return {
        **script,
        "name": f"{script['name']} on {mesh}",
        "arguments": " ".join([script["arguments"], script.get("mesh_arguments", "")]),
        "ranks": 1 if mesh.startswith("one") else RANKS,
        "same_seed": True,
        "stand_ins": stand_ins,
        "shims": [*script["shims"], "one_share"],
        "config": {**script.get("config", {}), file: config},
    }


def prepare(script: dict[str, Any], sources: Iterable[Path], folder: Path) -> Path:
    """Write the files of a script into `folder`, with its stand-ins and replacements, and give the order of its ranks.

    Raises:
        ValueError: A replacement touches a line about DeepSpeed, or is not in the file.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    directory = git_directory(script["repository"], list(sources), BUILD / "sources")
    tree = folder / "tree"
    write_files(directory, script["commit"], script["files"], tree)
    work = tree / script.get("folder", ".")
    work.mkdir(parents=True, exist_ok=True)
    for name in script.get("stand_ins", []):
        make(name, work)
    for file, pairs in script.get("smaller", {}).items():
        _replace(tree / file, pairs)
    for file, values in script.get("config", {}).items():
        _configure(tree / file, values)
    order = {
        "script": str(tree / script["path"]),
        "arguments": script.get("arguments", "").split(),
        "paths": [str(tree / path) for path in script.get("import_from", [])],
        "shims": script.get("shims", []),
        "ranks": script.get("ranks", RANKS),
        "losses": script.get("losses"),
        "same_seed": script.get("same_seed", False),
        "local_rank": script.get("local_rank", False),
        "out": str(folder),
    }
    (folder / "order.json").write_text(json.dumps(order, indent=2), encoding="utf-8")
    return work


def _replace(file: Path, pairs: list[list[str]]) -> None:
    text = file.read_text(encoding="utf-8")
    for old, new in pairs:
        if old not in text or ABOUT_DEEPSPEED.search(old + new):
            raise ValueError(
                f"no line to make smaller in {file}: {old!r}\nhint: name a line that is not about DeepSpeed"
            )
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")


def _configure(file: Path, values: dict[str, Any]) -> None:
    """Give a config on disk a smaller batch, or the precision of a CPU."""
    config = json.loads(file.read_text(encoding="utf-8"))
    for path, value in values.items():
        part = config
        *parents, last = path.split(".")
        for parent in parents:
            part = part.setdefault(parent, {})
        part[last] = value
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def run(script: dict[str, Any], sources: Iterable[Path], python: str, name: str) -> Losses:
    """The losses of both ranks under the package of `python`.

    Raises:
        Failed: A rank ended otherwise, or not at all.
    """
    folder = BUILD / name / script["name"].replace("/", "_")
    work = prepare(script, sources, folder)
    shared = {
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(script.get("ranks", RANKS))),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "WANDB_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "DS_ACCELERATOR": "cpu",
        **script.get("environment", {}),
    }
    command = [python, str(HERE / "script_ranks.py"), str(folder / "order.json")]
    with (folder / "start.log").open("wb") as log:
        ranks = subprocess.Popen(
            command, env={**os.environ, **shared}, cwd=work, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = ranks.wait(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"not ended after {TIMEOUT_S} s\n{_end_of(folder / 'rank0.log')}") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
            ranks.wait()
    if code:
        log_file = folder / f"rank{code - 1}.log"
        raise Failed(_end_of(log_file if log_file.exists() else folder / "start.log"))
    return [
        json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8"))
        for rank in range(script.get("ranks", RANKS))
    ]


def _end_of(file: Path) -> str:
    return "\n".join(file.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]) if file.exists() else ""


def apart(ours: Losses, theirs: Losses, least: float = 1e-12) -> float:
    """The largest difference of two losses, relative to theirs and to `least` at least; infinite when their numbers
    differ or there are none."""
    if [len(one) for one in ours] != [len(one) for one in theirs] or not any(ours):
        return float("inf")
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one, other, strict=True)]
    return max(_distance(mine, other, least) for mine, other in pairs)


def _distance(one: float, other: float, least: float) -> float:
    if one == other or (one != one and other != other):
        return 0.0
    return abs(one - other) / max(abs(other), least)
