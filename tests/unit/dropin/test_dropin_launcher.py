"""The command `deepspeed`: which ranks its options, hostfiles and filters mean, without starting any."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from polyaccel_deepspeed.commands import bench, launch
from polyaccel_deepspeed.launcher import choose_hosts, launch_arguments, plan

from polyaccel.errors import LaunchError

HOSTS = "a slots=2\nb slots=4  # faster\n\n# c slots=8\n"


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    file = tmp_path / "hosts"
    file.write_text(HOSTS, encoding="utf-8")
    return str(file)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").touch()
    return str(tmp_path / "train.py")


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ([], {"a": (0, 1), "b": (0, 1, 2, 3)}),
        (["--num_nodes", "1"], {"a": (0, 1)}),
        (["--num_gpus", "3"], {"a": (0, 1, 2), "b": (0, 1, 2)}),
        (["--include", "b:3,1"], {"b": (1, 3)}),
        (["--include", "b:0@a"], {"a": (0, 1), "b": (0,)}),
        (["--exclude", "a"], {"b": (0, 1, 2, 3)}),
        (["--exclude", "b:0,1@a:1"], {"a": (0,), "b": (2, 3)}),
    ],
)
def test_hosts_and_devices_are_filtered(options: list[str], hosts: dict[str, tuple[int, ...]], hostfile: str) -> None:
    assert choose_hosts(launch_arguments(["--hostfile", hostfile, *options, "train.py"])) == hosts


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--include", "z"], "--include z: there is no host 'z'"),
        (["--include", "a:7"], "--include a:7: a has no device 7"),
        (["--exclude", "a:x"], "--exclude a:x: 'x' are no numbers of devices"),
        (["--exclude", "a@b"], "no host and no device is left"),
        (["--include", "a", "--exclude", "b"], "--include and --exclude cannot be given together"),
        (["--include", "a", "--num_gpus", "1"], "--include and --num_gpus cannot be given together"),
        (["--num_nodes", "3"], "--num_nodes 3, but only 2 hosts are known"),
        (["--num_gpus", "0"], "--num_gpus 0: there would be no rank"),
        ([], "a, b: polyaccel starts no processes on other hosts"),
        (["--no_ssh"], "--no_ssh with --node_rank -1"),
        (["--autotuning", "run"], "--autotuning run: polyaccel has no such thing"),
    ],
)
def test_what_cannot_be_started_is_one_sentence_and_a_cure(
    options: list[str], said: str, hostfile: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(["--hostfile", hostfile, *options, script]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"deepspeed: error: {said}")
    assert "cure: " in error


@pytest.mark.parametrize("line", ["a", "a slots=x", "b slots=1\nb slots=2"])
def test_a_hostfile_that_is_wrong_is_named_with_its_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(line, encoding="utf-8")
    with pytest.raises(LaunchError, match=r"hosts, line [12]: .* (is no line `host slots=N`|a second time)"):
        choose_hosts(launch_arguments(["-H", str(tmp_path / "hosts"), "train.py"]))


def test_ranks_of_this_machine_get_their_local_rank(script: str) -> None:
    made = plan(launch_arguments(["--num_gpus", "2", script, "--epochs", "3"]))
    assert [one.command[-3:] for one in made.ranks] == [(f"--local_rank={i}", "--epochs", "3") for i in range(2)]
    (one,) = plan(launch_arguments(["--include", "localhost:1", "--no_local_rank", "--master_port", "0", script])).ranks
    assert one.command[-1] == script


def test_a_hostfile_may_name_this_machine_alone(script: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"{socket.gethostname()} slots=3", encoding="utf-8")
    made = plan(launch_arguments(["-H", str(tmp_path / "hosts"), "--force_multi", "--launcher", "pdsh", script]))
    assert len(made.ranks) == 3


def test_the_second_of_two_hosts_has_the_ranks_after_the_first(hostfile: str, script: str) -> None:
    given = ["-H", hostfile, "--no_ssh", "--node_rank", "1", "--master_addr", "a.example", script]
    ranks = plan(launch_arguments(given)).ranks
    assert [one.rank for one in ranks] == [2, 3, 4, 5]
    last = ranks[-1].environment
    shown = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    assert [last[name] for name in shown] == ["5", "3", "6", "4", "1", "2", "a.example", "29500"]


def test_a_missing_hostfile_is_said_and_this_machine_taken(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(launch_arguments(["-H", "/nowhere/hosts", "--num_gpus", "1", script]))
    assert len(made.ranks) == 1
    assert "there is no hostfile /nowhere/hosts" in capsys.readouterr().err


def test_options_of_the_bench_and_of_the_launcher_may_be_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("polyaccel_deepspeed.commands.launch", lambda args: seen.append(args) or 0)
    assert bench(["--trials", "3", "--num_gpus", "2", "--scan"]) == 0
    assert seen == [["--num_gpus", "2", "--module", "polyaccel_deepspeed.bench", "--trials", "3", "--scan"]]
