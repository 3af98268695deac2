"""The messages that users meet most are frozen with their wording: those of configs, launches, checkpoints and starts.

All other tests assert the class of an error, its `value`, and names and numbers of its message: a reworded message
fails here alone. After a deliberate change: `python tests/rules/test_messages.py` writes the list anew.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

import polyaccel
from polyaccel import load_config
from polyaccel.checkpoint import open_checkpoint
from polyaccel.checkpoint.format.commit import check_tag
from polyaccel.cli.elastic import check_size
from polyaccel.comm import init_distributed
from polyaccel.comm.default import default_communicator
from polyaccel.comm.discovery import discover
from polyaccel.comm.launchers.slurm import first_host
from polyaccel.config.resolve import load_resolved
from polyaccel.engine.counters import StepCounters
from polyaccel.engine.loss_scale import LossScaler
from polyaccel.engine.lr_schedules import build_schedule
from polyaccel.errors import PolyaccelError
from polyaccel.launch.base import Job
from polyaccel.launch.hosts import excluded, first_hosts, first_slots, included, listed_hosts, read_hostfile
from polyaccel.launch.plan import plan_host
from polyaccel.launch.program import python_command

GOLDEN = Path(__file__).parents[1] / "golden" / "messages.json"
SAVED = GOLDEN.with_name("checkpoint_v2")
ROOT = GOLDEN.parents[2]
OK = {"train_batch_size": 8}
nothing = SimpleNamespace()
HOSTS = {"a": (0, 1), "b": (0,)}


def _file(folder: Path, text: str) -> str:
    (folder / "ds.json").write_text(text, encoding="utf-8")
    return str(folder / "ds.json")


def _hosts(folder: Path, text: str) -> Path:
    (folder / "hosts").write_text(text, encoding="utf-8")
    return folder / "hosts"


def _copy(folder: Path) -> Path:
    shutil.copytree(SAVED, folder / "saves")
    return folder / "saves"


def _written(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def _changed(folder: Path, change: Callable[[Path], object], **options: Any) -> None:
    place = _copy(folder)
    change(place)
    open_checkpoint(place, **options)


def _files(place: Path, pattern: str) -> Path:
    return next(iter(sorted(place.glob(pattern))))


TREES: dict[str, Any] = {
    "unknown key": {**OK, "zero_optimisation": {"stage": 2}},
    "unknown key below": {**OK, "zero_optimization": {"stages": 2}},
    "impossible value": {**OK, "zero_optimization": {"stage": 7}},
    "wrong type": {"train_batch_size": "eight"},
    "no batch size": {},
    "batch sizes that contradict": {**OK, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
    "batch that ranks cannot share": {"train_batch_size": 9},
    "fp16 and bf16": {**OK, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
    "parameters offloaded unsharded": {**OK, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
    "files without a folder": {**OK, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
    "mesh that does not fit": {**OK, "tensor_parallel": {"autotp_size": 3}},
    "part of no divisor": {**OK, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}},
    "key that resembles none": {**OK, "amp": {"enabled": True}},
    "negative clipping": {**OK, "gradient_clipping": -1.0},
    "elasticity of small batches": {
        "elasticity": {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [128]}
    },
    "logged operation": {**OK, "comms_logger": {"enabled": True, "prof_ops": ["all_reduced"]}},
    "several problems": {"train_batch_size": 0, "fp61": {}, "zero_optimization": {"stage": "two"}},
    "no JSON value": {**OK, "optimizer": {"type": "Adam", "params": {"lr": {1, 2}}}},
    "no config": 3,
}
FILES = {"a list": "[1, 2]", "no JSON": '{"train_batch_size": 8', "a key twice": '{"fp16": {}, "fp16": {}}'}
RAISES: dict[str, Callable[[Path], object]] = {
    **{f"config: {name}": lambda folder, tree=tree: load_resolved(tree, world_size=4) for name, tree in TREES.items()},
    **{f"file: {name}": lambda folder, text=text: load_config(_file(folder, text)) for name, text in FILES.items()},
    "file: missing": lambda folder: load_config(str(folder / "ds.json")),
    "initialize: no model": lambda folder: polyaccel.initialize(config=OK),
    "initialize: model in the place of args": lambda folder: polyaccel.initialize(print, config=OK),
    "initialize: two configs": lambda folder: polyaccel.initialize(
        model=SimpleNamespace(), config=OK, config_params=OK
    ),
    "start: no group": lambda folder: default_communicator(),
    "start: half of the variables": lambda folder: discover(environ={"RANK": "0", "WORLD_SIZE": "2"}),
    "start: rank outside of the world": lambda folder: discover(rank=2, world_size=2, environ={}),
    "start: rank without a world": lambda folder: discover(rank=1, environ={}),
    "start: variable that is no number": lambda folder: discover(environ={"RANK": "one", "WORLD_SIZE": "2"}),
    "start: time limit": lambda folder: init_distributed(timeout=0),
    "start: list of hosts": lambda folder: first_host("n[02"),
    "launch: no hostfile": lambda folder: read_hostfile(folder / "hosts"),
    "launch: line of a hostfile": lambda folder: read_hostfile(_hosts(folder, "a slots=x\n")),
    "launch: hostfile without hosts": lambda folder: read_hostfile(_hosts(folder, "# none\n")),
    "launch: --hosts": lambda folder: listed_hosts("a:0"),
    "launch: --include another host": lambda folder: included(HOSTS, "c"),
    "launch: --include another slot": lambda folder: included(HOSTS, "a:2"),
    "launch: --exclude everything": lambda folder: excluded(HOSTS, "a@b"),
    "launch: --num_nodes": lambda folder: first_hosts(HOSTS, 3),
    "launch: --nproc": lambda folder: first_slots(HOSTS, 0),
    "launch: two hosts without an address": lambda folder: plan_host(Job(command=("x",), hosts=HOSTS), 0, {}),
    "launch: a job in a rank": lambda folder: plan_host(
        Job(command=("x",), hosts={"localhost": (0,)}), 0, {"RANK": "1", "LOCAL_RANK": "1"}
    ),
    "launch: --module of a path": lambda folder: python_command("train.py", module=True),
    "launch: no script": lambda folder: python_command("absent.py"),
    "launch: no module": lambda folder: python_command("absent.module", module=True),
    "launch: ranks of an elastic job": lambda folder: check_size(5, (1, 2, 4)),
    "checkpoint: empty folder": lambda folder: open_checkpoint(folder),
    "checkpoint: another tag": lambda folder: open_checkpoint(_copy(folder), tag="step9"),
    "checkpoint: no latest": lambda folder: _changed(folder, lambda place: (place / "latest").unlink()),
    "checkpoint: latest names nothing": lambda folder: _changed(
        folder, lambda place: _written(place / "latest", "step9")
    ),
    "checkpoint: no marker": lambda folder: _changed(
        folder, lambda place: _files(place, "*/commit.json").unlink(), tag="global_step12"
    ),
    "checkpoint: damaged marker": lambda folder: _changed(
        folder, lambda place: _written(_files(place, "*/commit.json"), "{}"), tag="global_step12"
    ),
    "checkpoint: short manifest": lambda folder: _changed(
        folder, lambda place: _written(_files(place, "*/*/manifest.json"), "{}"), tag="global_step12"
    ),
    "checkpoint: missing file": lambda folder: _changed(
        folder, lambda place: _files(place, "*/*/*.safetensors").unlink(), tag="global_step12"
    ),
    "checkpoint: renamed": lambda folder: _changed(
        folder, lambda place: (place / "global_step12").rename(place / "best"), tag="best"
    ),
    "checkpoint: tag": lambda folder: check_tag("../best"),
    "checkpoint: URL": lambda folder: open_checkpoint("s3://bucket/runs"),
    "checkpoint: another kind": lambda folder: open_checkpoint(SAVED).read_into("embed.weight", "norms", 0, 1, None),
    "checkpoint: elements outside": lambda folder: open_checkpoint(SAVED).read_into(
        "embed.weight", "param", 0, 99, None
    ),
    "checkpoint: counters": lambda folder: StepCounters(
        gradient_accumulation_steps=1, train_batch_size=8
    ).load_state_dict({}),
    "checkpoint: another tensor": lambda folder: open_checkpoint(SAVED).read_into("embed.wieght", "param", 0, 1, None),
    "checkpoint: loss scale": lambda folder: LossScaler.from_config().load_state_dict({}),
    "training: smallest loss scale": lambda folder: _overflowed(),
    "training: unknown schedule": lambda folder: build_schedule("WarmupLR", {"gamma": 3}, SimpleNamespace()),
}


def _overflowed() -> None:
    scaler = LossScaler.from_config(initial_scale_power=0, hysteresis=1)
    for _ in range(3):
        scaler.update(True, culprit="blocks.3.mlp.weight")


def message_of(name: str) -> list[str]:
    """The class and the lines of the error, the names of temporary folders apart."""
    with TemporaryDirectory() as folder:
        try:
            RAISES[name](Path(folder))
        except PolyaccelError as error:
            text = (
                str(error)
                .replace(str(Path(folder).resolve()), "FOLDER")
                .replace(folder, "FOLDER")
                .replace(os.getcwd(), "HERE")
            )
            return [type(error).__name__, *text.split("\n")]
    raise AssertionError(f"{name}: nothing was raised")


@pytest.mark.parametrize("name", RAISES)
def test_the_messages_are_the_frozen_ones(name: str) -> None:
    assert message_of(name) == json.loads(GOLDEN.read_text(encoding="utf-8"))[name]


def test_no_other_message_is_frozen() -> None:
    assert json.loads(GOLDEN.read_text(encoding="utf-8")).keys() == RAISES.keys()


def matched(file: Path) -> list[str]:
    """Where `pytest.raises` or `pytest.warns` of a file compares a message with a pattern."""
    calls = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [
        f"{file.relative_to(ROOT).as_posix()}:{call.lineno}"
        for call in calls
        if ast.unparse(call.func) in ("pytest.raises", "pytest.warns")
        and any(word.arg == "match" for word in call.keywords)
    ]


def test_a_test_asserts_no_wording_of_an_error() -> None:
    """It asserts the class, the `value`, and names and numbers of the message."""
    files = [file for shelf in ("tests", "plugins") for file in sorted((ROOT / shelf).rglob("*.py"))]
    assert [place for file in files for place in matched(file)] == []


if __name__ == "__main__":
    found = {name: message_of(name) for name in RAISES}
    GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
