"""The arguments of `polyaccel run` become the job that a launcher gets."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyaccel.accelerators import detect
from polyaccel.cli import job as options_to_job
from polyaccel.cli import run as verb
from polyaccel.cli.main import main
from polyaccel.core.types import Probe
from polyaccel.launch.affinity import Core
from polyaccel.launch.base import Job, JobResult, Launcher, noop
from polyaccel.launch.local import LocalLauncher
from polyaccel.registry import PluginInfo


class DryLauncher(LocalLauncher):
    name = "local"
    jobs: list[Job]

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason="starts nothing")

    def run(self, job: Job, look: Callable[[], object] = noop) -> JobResult:
        DryLauncher.jobs.append(job)
        return JobResult(5)


class AbsentLauncher(DryLauncher):
    name = "cluster"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=False, reason="there is no cluster")


LAUNCHERS: dict[str, type[Launcher]] = {"local": DryLauncher, "acme": DryLauncher, "cluster": AbsentLauncher}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Job]:
    """What `polyaccel run` would start, in a directory that has a train.py."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(options_to_job, "load_plugin", lambda group, name, *rest: LAUNCHERS[name])
    monkeypatch.setattr(verb, "find_plugin", lambda group, name: PluginInfo(group, name, "acme:Run", "acme", "1.5"))
    DryLauncher.jobs = []
    return DryLauncher.jobs


def test_options_stand_before_the_script_and_its_own_behind(jobs: list[Job]) -> None:
    options = [
        "--nproc",
        "3",
        "--grace-period",
        "0.5",
        "--stop-timeout",
        "0",
        "--log-dir",
        "logs",
        "--master-port",
        "auto",
    ]
    assert main(["run", *options, "train.py", "--nproc", "9", "--", "x"]) == 5
    (job,) = jobs
    assert job.hosts == {"localhost": (0, 1, 2)}
    assert (job.grace_s, job.stop_timeout_s, job.log_dir, job.master_port) == (0.5, 0.0, "logs", None)
    assert (job.command, job.arguments) == ((sys.executable, "train.py"), ("--nproc", "9", "--", "x"))


def test_defaults_are_those_of_the_contract(jobs: list[Job]) -> None:
    assert main(["run", "-n", "1", "--module", "json.tool"]) == 5
    (job,) = jobs
    assert (job.grace_s, job.stop_timeout_s, job.log_dir, job.node) == (5.0, 60.0, None, None)
    assert job.command == (sys.executable, "-m", "json.tool")


@pytest.mark.parametrize("arguments", [[], ["--nproc", "auto"]])
@pytest.mark.parametrize(("name", "expected"), [("cpu", 2), ("cuda", 4)])
def test_auto_is_one_rank_a_device_or_a_node_of_the_cpu(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, arguments: list[str], name: str, expected: int
) -> None:
    accelerator = SimpleNamespace(name=name, device_count=lambda: 4)
    monkeypatch.setattr(detect, "choose_accelerator", lambda name: accelerator)
    monkeypatch.setattr(verb, "find_cores", lambda cpus: (Core(0, (0,)), Core(0, (1,)), Core(1, (2,))))
    assert main(["run", *arguments, "train.py"]) == 5
    assert jobs[0].world_size == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0", "train.py"], "'0' is neither a number of ranks from 1 to 4096 nor auto"),
        (["--nproc", "9" * 20, "train.py"], "neither a number of ranks from 1 to 4096 nor auto"),
        (["--nproc", "two", "train.py"], "'two' is neither"),
        (["--master-port", "65536", "train.py"], "'65536' is not a port"),
        (["--grace-period", "-1", "train.py"], "is not a number of seconds"),
        (["--stop-timeout", "inf", "train.py"], "'inf' is not a number of seconds"),
        (["--npr", "2", "train.py"], "--npr"),
        ([], "script"),
    ],
)
def test_wrong_options_start_nothing(
    jobs: list[Job], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert jobs == []


def test_a_launcher_is_chosen_by_name(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAUNCHERS, "local", AbsentLauncher)
    assert main(["run", "--launcher", "acme", "--nproc", "2", "train.py"]) == 5
    assert len(jobs) == 1


def test_a_launcher_that_cannot_be_used_starts_nothing(jobs: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--launcher", "cluster", "--nproc", "2", "train.py"]) == 1
    said = capsys.readouterr().err
    assert "launcher 'cluster' cannot be used here: there is no cluster" in said
    assert re.search(r"choose another one: --launcher (\w+ or )*local or ", said)
    assert jobs == []


def test_an_unknown_launcher_is_answered_with_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").touch()
    assert main(["run", "--launcher", "loca", "--nproc", "2", str(tmp_path / "train.py")]) == 1
    said = capsys.readouterr().err
    assert "no launcher plugin is called 'loca'; installed: " in said
    assert ", local (polyaccel " in said
    assert "did you mean 'local'? Otherwise install the package that provides it" in said


def test_a_missing_script_starts_nothing(jobs: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nproc", "2", "absent.py"]) == 1
    assert "polyaccel: error: no script 'absent.py' in " in capsys.readouterr().err
    assert jobs == []


def test_a_rank_of_another_launcher_starts_nothing(
    jobs: list[Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert main(["run", "train.py"]) == 1
    assert "WORLD_SIZE=4 is set" in capsys.readouterr().err
    assert jobs == []


def test_numbers_of_pods_are_no_ranks(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "pod-0", "PET_NODE_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "--nproc", "2", "train.py"]) == 5
    assert [job.world_size for job in jobs] == [2]


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=4\n")
    return str(tmp_path / "hosts")


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ([], {"a": (0, 1), "b": (0, 1, 2, 3)}),
        (["--num-nodes", "1"], {"a": (0, 1)}),
        (["--num_gpus", "3"], {"a": (0, 1, 2), "b": (0, 1, 2)}),
        (["-i", "b:3,0-1"], {"b": (0, 1, 3)}),
        (["--exclude", "a@b:1"], {"b": (0, 2, 3)}),
    ],
)
def test_hosts_are_those_of_the_file_and_the_filters(
    jobs: list[Job],
    hostfile: str,
    options: list[str],
    hosts: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = SimpleNamespace(visible_devices_variable="SEEN", exported_variables=("ACME_",))
    monkeypatch.setattr(detect, "choose_accelerator", lambda name: accelerator)
    monkeypatch.setitem(LAUNCHERS, "ssh", DryLauncher)
    monkeypatch.setenv("ACME_FAST", "1")
    monkeypatch.setenv("PATH_OF_MINE", "1")
    assert main(["run", "-H", hostfile, *options, "train.py"]) == 5
    (job,) = jobs
    assert job.hosts == hosts
    assert job.node is None
    assert job.device_variable == ("SEEN" if options and options[0] in ("-i", "--exclude") else None)
    assert (job.exports.get("ACME_FAST"), job.exports.get("PATH_OF_MINE")) == ("1", None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--include", "z"], "--include z: 'z' is not a host of the job"),
        (["--include", "a", "--exclude", "b"], "--include and --exclude cannot be given together"),
        (["--include", "a", "--nproc", "1"], "--include and --ranks cannot be given together"),
        (["--num-nodes", "3"], "--num-nodes 3, and 2 hosts are given"),
        (["--no-ssh"], "--no-ssh, and 2 hosts"),
        (["--node-rank", "2"], "--node-rank 2, and 2 hosts"),
        (["--launcher", "local"], "the launcher 'local' starts ranks on this machine only"),
        (["--export", "NO_SUCH_VARIABLE"], "--export NO_SUCH_VARIABLE: the variable is not set"),
    ],
)
def test_what_cannot_be_started_is_one_sentence_and_a_cure(
    jobs: list[Job], hostfile: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--dry-run", "-H", hostfile, *options, "train.py"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"polyaccel: error: {said}")
    assert "hint: " in error
    assert jobs == []


def test_a_host_that_is_given_the_command_by_itself_has_its_number(jobs: list[Job], hostfile: str) -> None:
    assert main(["run", "-H", hostfile, "--node-rank", "1", "train.py"]) == 5
    (job,) = jobs
    assert (job.node, job.master_addr, job.master_port, job.secret) == (1, "a", 29500, "")


def test_ranks_of_a_host_with_a_user_meet_at_its_address(jobs: list[Job]) -> None:
    where = ["--hosts", "me@a:2,me@b:2,me@c:1", "--include", "me@b:0@me@c"]
    assert main(["run", *where, "--node-rank", "1", "--master-port", "0", "train.py"]) == 5
    (job,) = jobs
    assert (job.hosts, job.master_addr, job.master_port) == ({"me@b": (0,), "me@c": (0,)}, "b", 29500)


@pytest.mark.parametrize("text", ["", "@", "a:0@", "a@a:1"])
def test_a_filter_that_names_no_host_is_refused(jobs: list[Job], hostfile: str, text: str) -> None:
    assert main(["run", "-H", hostfile, "--include", text, "train.py"]) == 1
    assert jobs == []


def test_no_folder_is_called_none(jobs: list[Job]) -> None:
    assert main(["run", "--nproc", "1", "--enable_each_rank_log", "None", "train.py"]) == 5
    assert [job.log_dir for job in jobs] == [None]


def test_a_dry_run_shows_what_would_run(jobs: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--dry-run", "--nproc", "2", "--export", "A=b c", "train.py", "it's"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "A='b c' " in first
    assert "RANK=0 " in first
    assert "RANK=1 " in second
    assert first.endswith(f"{sys.executable} train.py 'it'\"'\"'s'")
    assert "SECRET" not in first
    assert jobs == []


def test_a_mistyped_option_gets_the_name_that_the_help_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nprocs", "2", "train.py"]) == 2
    assert "did you mean --ranks?" in capsys.readouterr().err
