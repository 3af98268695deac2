"""Tensors in files, commands that measure them, and modules that `python -m` runs."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.launcher.launch import parse_args, terminate_process_tree
from deepspeed.ops.aio import AsyncIOBuilder
from deepspeed_runs import GOLDEN, taken_over
from launcher_job import is_alive
from polyaccel_deepspeed.commands import file_speed, file_tuning, universal
from polyaccel_deepspeed.file_speed import nbytes_of
from polyaccel_deepspeed.node_launcher import hosts_of

from polyaccel.errors import LaunchError, OffloadError, PolyaccelError

PLUGIN = Path(deepspeed.__file__).parents[1]


@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_come_back_from_files(tmp_path: Path, threads: int) -> None:
    handle = AsyncIOBuilder().load().aio_handle(1024, 8, False, True, threads)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (1024, 8, threads)
    values = torch.arange(1001, dtype=torch.bfloat16)
    name = str(tmp_path / "values")
    assert handle.sync_pwrite(values, name) == 1
    assert os.path.getsize(name) == 2002
    found = torch.zeros_like(values)
    assert handle.sync_pread(found, name) == 1
    assert torch.equal(found, values)
    part = torch.zeros(10, dtype=torch.bfloat16)
    assert (handle.async_pread(part, name, 200), handle.wait()) == (0, 1)
    assert torch.equal(part, values[100:110])
    assert handle.sync_pwrite(torch.full((2,), -1, dtype=torch.bfloat16), name, 4) == 1
    assert handle.read(found, name) == 1
    assert found[:5].tolist() == [0, 1, -1, -1, 4]


def test_many_operations_are_under_way_at_once(tmp_path: Path) -> None:
    handle = AsyncIOBuilder().load().aio_handle()
    tensors = [torch.rand(100) for _ in range(4)]
    for number, each in enumerate(tensors):
        assert handle.async_pwrite(each, str(tmp_path / str(number))) == 0
    assert (handle.wait(), handle.wait()) == (4, 0)
    found = [handle.new_cpu_locked_tensor(100, each) for each in tensors]
    for number, each in enumerate(found):
        handle.async_pread(each, str(tmp_path / str(number)))
    assert handle.wait() == 4
    assert all(map(torch.equal, found, tensors))
    assert [handle.free_cpu_locked_tensor(found[0]), handle.free_cpu_locked_tensor(tensors[0])] == [True, False]
    with open(tmp_path / "open", "wb") as file:
        assert handle.sync_pwrite(tensors[0], file.fileno()) == 1
    assert handle.read(found[1], str(tmp_path / "open")) == 1
    assert torch.equal(found[1], tensors[0])


def test_a_short_file_and_a_tensor_with_gaps_are_errors(tmp_path: Path) -> None:
    handle = AsyncIOBuilder().load().aio_handle()
    handle.write(torch.ones(4), str(tmp_path / "a"))
    with pytest.raises(OffloadError):
        handle.read(torch.ones(5), str(tmp_path / "a"))
    with pytest.raises(OffloadError):
        handle.read(torch.ones(5), str(tmp_path / "none"))
    with pytest.raises(PolyaccelError):
        handle.write(torch.ones(4, 4).T, str(tmp_path / "a"))


def test_the_commands_measure_a_folder_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nbytes_of("3K") == 3072
    for read in ([], ["--read"]):
        words = ["--folder", str(tmp_path), "--io_size", "64K", "--loops", "2", *read, "--engine", "aio_handle"]
        assert file_speed(words) == 0
        first, last = capsys.readouterr().out.splitlines()
        assert first.endswith("--engine aio_handle")
        assert float(last.split()[2]) > 0
    assert file_tuning(["--nvme_dir", str(tmp_path), "--io_size", "64K"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert json.loads(last)["aio"]["intra_op_parallelism"] in (1, 2, 4, 8)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("theirs", [False, True])
def test_a_checkpoint_becomes_a_universal_one(tmp_path: Path, theirs: bool) -> None:
    """One of DeepSpeed's own, and ours that was imported from it."""
    source = GOLDEN / "zero1"
    if not theirs:
        taken_over("zero1", tmp_path / "ours")
        source = tmp_path / "ours"
    else:
        source = next(path.parent for path in source.rglob("*_model_states.pt"))
    out = tmp_path / "out" / "universal"
    words = ["--input_folder", str(source), "--output_folder", str(out), "--no_strict"]
    assert universal(words) == 0
    assert (tmp_path / "out" / "latest_universal").read_text() == "universal"
    wanted = GOLDEN / "universal" / "global_step4" / "zero" / "up.weight"
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        found, value = (
            torch.load(folder / f"{kind}.pt", weights_only=True)["param"]
            for folder in (out / "zero" / "up.weight", wanted)
        )
        assert torch.equal(found, value)
    assert universal(words) == 1  # it exists
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["latest_universal", "universal"]


@pytest.mark.parametrize(
    "module", ["checkpoint.ds_to_universal", "launcher.launch", "launcher.runner", "utils.zero_to_fp32"]
)
def test_a_module_is_run_by_its_name(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"deepspeed.{module}", "--help"],
        cwd=PLUGIN, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")


def test_a_hosts_launcher_reads_what_the_runner_gives() -> None:
    world = base64.urlsafe_b64encode(json.dumps({"a": [0, 1], "b": [3]}).encode()).decode()
    assert hosts_of(world) == {"a": [0, 1], "b": [3]}
    given = parse_args(["--world_info", world, "--node_rank", "1", "--no_python", "train.py", "--x", "1"])
    assert (given.node_rank, given.no_python, given.training_script_args) == (1, True, ["--x", "1"])
    with pytest.raises(LaunchError) as caught:
        hosts_of("None")
    assert caught.value.value == "None"


def test_a_tree_of_processes_ends() -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        terminate_process_tree(process.pid)
        assert process.wait(timeout=60) != 0
    assert not is_alive(child)
    terminate_process_tree(process.pid)  # gone already


def test_a_hosts_ranks_are_started(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)\n")
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", "--master_port=0",
         "--no_local_rank", str(script)],
        cwd=PLUGIN, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(line[-3:] for line in done.stdout.split("\n") if line) == ["0 2", "1 2"]
