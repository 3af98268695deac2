"""The command `deepspeed`: which ranks its options, hostfiles and filters mean, without starting any."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from polyaccel_deepspeed.commands import bench, launch
from polyaccel_deepspeed.launcher import job, launch_arguments

from polyaccel.errors import LaunchError
from polyaccel.launch.base import JobResult

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
        (["--num_accelerators=3"], {"a": (0, 1, 2), "b": (0, 1, 2)}),
        (["--include", "b:3,1"], {"b": (1, 3)}),
        (["--exclude", "b:0,1@a:1"], {"a": (0,), "b": (2, 3)}),
    ],
)
def test_hosts_and_devices_are_filtered(
    options: list[str], hosts: dict[str, tuple[int, ...]], hostfile: str, script: str
) -> None:
    assert job(launch_arguments(["--hostfile", hostfile, *options, script])).hosts == hosts


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--include", "a", "--exclude", "b"], "--include and --exclude cannot be given together"),
        (["--no_ssh"], "--no-ssh, and 2 hosts"),
        (["--autotuning", "run"], "--autotuning, and no argument of the script names a config"),
    ],
)
def test_what_cannot_be_started_is_one_sentence_and_a_cure(
    options: list[str], said: str, hostfile: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(["--hostfile", hostfile, *options, script]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"deepspeed: error: {said}")
    assert "hint: " in error


def test_ranks_get_their_local_rank_unless_told_otherwise(script: str) -> None:
    made = job(launch_arguments(["--num_gpus", "2", script, "--epochs", "3"]))
    assert (made.names_local_rank, made.arguments, made.hosts) == (True, ("--epochs", "3"), {"localhost": (0, 1)})
    made = job(launch_arguments(["--include", "localhost:1", "--no_local_rank", script]))
    assert (made.names_local_rank, made.hosts) == (False, {"localhost": (1,)})


def test_a_hostfile_may_name_this_machine_alone(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_text(f"{socket.gethostname()} slots=3", encoding="utf-8")
    started = []
    monkeypatch.setattr(
        "polyaccel.launch.local.LocalLauncher.run", lambda launcher, job: started.append(job) or JobResult(0)
    )
    assert launch(["-H", str(tmp_path / "hosts"), script]) == 0
    assert [made.world_size for made in started] == [3]


def test_a_missing_hostfile_is_said_and_this_machine_taken(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = job(launch_arguments(["-H", "/nowhere/hosts", "--num_gpus", "1", script]))
    assert made.world_size == 1
    assert "the hostfile /nowhere/hosts does not exist" in capsys.readouterr().err


def test_variables_of_the_environment_file_are_exported(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("# for all hosts\n\nNCCL_DEBUG=INFO\nA=b=c\n")
    made = job(launch_arguments(["--num_gpus", "1", "--export", "A=1", script]))
    assert made.exports == {"NCCL_DEBUG": "INFO", "A": "1"}
    (tmp_path / "other").write_text("A=2\n")
    monkeypatch.setenv("DS_ENV_FILE", "other")
    assert job(launch_arguments(["--num_gpus", "1", script])).exports == {"A": "2"}


def test_the_environment_file_is_read_as_a_shell_reads_it_and_wins(
    script: str, hostfile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("UCX_TLS", "of the shell")
    (tmp_path / ".deepspeed_env").write_text("export A='a b'\nB=\"$HOME/x\"\nUCX_TLS=tcp\n")
    exports = job(launch_arguments(["-H", hostfile, script])).exports
    assert {name: exports[name] for name in ("A", "B", "UCX_TLS")} == {"A": "a b", "B": "/home/me/x", "UCX_TLS": "tcp"}


def test_options_of_the_bench_and_of_the_launcher_may_be_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("polyaccel_deepspeed.commands.launch", lambda args: seen.append(args) or 0)
    assert bench(["--trials", "3", "--num_gpus", "2", "--scan"]) == 0
    assert seen == [["--num_gpus", "2", "--module", "polyaccel_deepspeed.bench", "--trials", "3", "--scan"]]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--num_gpu", "2"], {"nproc": 2}),
        (["--num_gp=2"], {"nproc": 2}),
        (["--num_acc", "3"], {"nproc": 3}),
        (["--master_p", "29501", "--inc", "localhost:0"], {"master_port": 29501, "include": "localhost:0"}),
        (["--enable_each", "logs"], {"log_dir": Path("logs")}),
        (["--enable_each_rank_log", "None"], {"log_dir": None}),
        (["--enable_each_rank_log=None"], {"log_dir": None}),
        (["--num_nodes", "-1", "--num_gpus", "-1"], {"num_nodes": None, "nproc": None}),
        (["--num_nodes", "0", "--num_gpus=0"], {"num_nodes": None, "nproc": None}),
        (["--include", "", "--exclude", ""], {"include": None, "exclude": None}),
        (["--include=", "--num_gpus", "2"], {"include": None, "nproc": 2}),
        (["--master_port", "0"], {"master_port": None}),
        (["--launcher", "SLURM"], {"launcher": "slurm"}),
        (["--launcher=OpenMPI"], {"launcher": "openmpi"}),
        (["--launcher", "PDSH", "--launcher_a", "-F x"], {"launcher": "pdsh", "launcher_args": "-F x"}),
    ],
)
def test_options_mean_what_they_mean_to_deepspeed(options: list[str], wanted: dict[str, object], script: str) -> None:
    given = launch_arguments([*options, script, "--num_gpu", "7", "--local_rank", "x"])
    assert {name: getattr(given, name) for name in wanted} == wanted
    assert (given.script, given.arguments) == (script, ["--num_gpu", "7", "--local_rank", "x"])


@pytest.mark.parametrize("options", [["--num", "2"], ["--master", "a"], ["--no_such"], ["--num_gpus", "x"]])
def test_what_no_option_begins_with_or_several_do_is_refused(options: list[str], script: str) -> None:
    with pytest.raises(SystemExit) as raised:
        launch_arguments([*options, script])
    assert raised.value.code == 2


@pytest.mark.parametrize("launcher", ["pdsh", "OPENMPI", "mpich", "Slurm", "mvapich", "impi"])
def test_a_launcher_for_several_hosts_is_not_asked_for_on_one(
    launcher: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(
        "polyaccel.launch.local.LocalLauncher.run", lambda launcher, job: started.append(job) or JobResult(0)
    )
    assert launch(["--launcher", launcher, "--num_gpus", "2", script]) == 0
    assert [made.world_size for made in started] == [2]


def test_options_of_a_launcher_with_an_open_quote_are_one_error(script: str) -> None:
    with pytest.raises(LaunchError) as raised:
        job(launch_arguments(["--launcher_args", "'-F x", "--num_gpus", "1", script]))
    assert raised.value.value == "'-F x"


def test_other_hosts_find_modules_of_this_folder(
    hostfile: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/of/mine")
    made = job(launch_arguments(["--hostfile", hostfile, script]))
    assert made.exports["PYTHONPATH"] == f"{tmp_path}:/of/mine"
    assert "PYTHONPATH" not in job(launch_arguments(["--num_gpus", "1", script])).exports


@pytest.mark.parametrize("on_cluster", [False, True])
def test_a_clusters_own_devices_of_the_network_stay(
    hostfile: str, script: str, monkeypatch: pytest.MonkeyPatch, on_cluster: bool
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0")
    if on_cluster:
        monkeypatch.setenv("AISC_JOB_NAME", "x")
    exports = job(launch_arguments(["--hostfile", hostfile, script])).exports
    assert ("UCX_NET_DEVICES" in exports) is not on_cluster


def test_a_pod_of_dlts_names_its_task(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pod.env"
    file.write_text("export FC_TASKROLE_NAME=worker\nexport FC_TASK_INDEX=3\nexport OTHER=1\n# x\n")
    monkeypatch.setenv("DLTS_POD_ENV_PATH", str(file))
    exports = job(launch_arguments([script])).exports
    assert {name: exports[name] for name in exports if name in ("FC_TASKROLE_NAME", "FC_TASK_INDEX", "OTHER")} == {
        "FC_TASKROLE_NAME": "worker",
        "FC_TASK_INDEX": "3",
    }
