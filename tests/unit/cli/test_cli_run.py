"""The arguments of `polyaccel run` become the plan that a launcher gets."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyaccel.accelerators import detect
from polyaccel.cli import run as verb
from polyaccel.cli.main import main
from polyaccel.launch.affinity import Core
from polyaccel.launch.base import Launcher, LaunchPlan
from polyaccel.registry import PluginInfo
from polyaccel.types import Probe


class DryLauncher(Launcher):
    name = "local"
    plans: list[LaunchPlan]

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason="starts nothing")

    def run(self, plan: LaunchPlan) -> int:
        DryLauncher.plans.append(plan)
        return 5


class AbsentLauncher(DryLauncher):
    name = "cluster"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=False, reason="there is no cluster")


LAUNCHERS: dict[str, type[Launcher]] = {"local": DryLauncher, "acme": DryLauncher, "cluster": AbsentLauncher}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[LaunchPlan]:
    """What `polyaccel run` would start, in a directory that has a train.py."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(verb, "load_plugin", lambda group, name, *rest: LAUNCHERS[name])
    monkeypatch.setattr(verb, "find_plugin", lambda group, name: PluginInfo(group, name, "acme:Run", "acme", "1.5"))
    DryLauncher.plans = []
    return DryLauncher.plans


def test_options_stand_before_the_script_and_its_own_behind(plans: list[LaunchPlan]) -> None:
    options = ["--nproc", "3", "--grace", "0.5", "--stop-timeout", "0", "--log-dir", "logs", "--master-port", "auto"]
    assert main(["run", *options, "train.py", "--nproc", "9", "--", "x"]) == 5
    (plan,) = plans
    assert len(plan.ranks) == 3
    assert (plan.grace_s, plan.stop_timeout_s, plan.log_dir) == (0.5, 0.0, Path("logs"))
    assert {spec.command for spec in plan.ranks} == {(sys.executable, "train.py", "--nproc", "9", "--", "x")}
    assert {spec.environment["MASTER_PORT"] for spec in plan.ranks} == {str(plan.master_port)}


def test_defaults_are_those_of_the_contract(plans: list[LaunchPlan]) -> None:
    assert main(["run", "--nproc", "1", "--module", "json.tool"]) == 5
    (plan,) = plans
    assert (plan.grace_s, plan.stop_timeout_s, plan.log_dir) == (5.0, 60.0, None)
    assert plan.ranks[0].command == (sys.executable, "-m", "json.tool")


@pytest.mark.parametrize("arguments", [[], ["--nproc", "auto"]])
@pytest.mark.parametrize(("name", "expected"), [("cpu", 2), ("cuda", 4)])
def test_auto_is_one_rank_a_device_or_a_node_of_the_cpu(
    plans: list[LaunchPlan], monkeypatch: pytest.MonkeyPatch, arguments: list[str], name: str, expected: int
) -> None:
    accelerator = SimpleNamespace(name=name, device_count=lambda: 4)
    monkeypatch.setattr(detect, "choose_accelerator", lambda name: accelerator)
    monkeypatch.setattr(verb, "find_cores", lambda cpus: (Core(0, (0,)), Core(0, (1,)), Core(1, (2,))))
    assert main(["run", *arguments, "train.py"]) == 5
    assert len(plans[0].ranks) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0", "train.py"], "'0' is neither a number of ranks from 1 to 4096 nor auto"),
        (["--nproc", "9" * 20, "train.py"], "neither a number of ranks from 1 to 4096 nor auto"),
        (["--nproc", "two", "train.py"], "'two' is neither"),
        (["--master-port", "65536", "train.py"], "'65536' is neither a port"),
        (["--grace", "-1", "train.py"], "is not a number of seconds"),
        (["--stop-timeout", "inf", "train.py"], "'inf' is not a number of seconds"),
        (["--npr", "2", "train.py"], "--npr"),
        ([], "script"),
    ],
)
def test_wrong_options_start_nothing(
    plans: list[LaunchPlan], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert plans == []


def test_a_launcher_is_chosen_by_name(plans: list[LaunchPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAUNCHERS, "local", AbsentLauncher)
    assert main(["run", "--launcher", "acme", "--nproc", "2", "train.py"]) == 5
    assert len(plans) == 1


def test_a_launcher_that_cannot_be_used_starts_nothing(
    plans: list[LaunchPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--launcher", "cluster", "--nproc", "2", "train.py"]) == 1
    said = capsys.readouterr().err
    assert "launcher 'cluster' cannot be used here: there is no cluster" in said
    assert "choose another one: --launcher local" in said
    assert plans == []


def test_an_unknown_launcher_is_answered_with_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").touch()
    assert main(["run", "--launcher", "loca", "--nproc", "2", str(tmp_path / "train.py")]) == 1
    said = capsys.readouterr().err
    assert "no launcher plugin is called 'loca'; installed: local (polyaccel " in said
    assert "did you mean 'local'? Otherwise install the package that provides it" in said


def test_a_missing_script_starts_nothing(plans: list[LaunchPlan], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nproc", "2", "absent.py"]) == 1
    assert "polyaccel: error: no script 'absent.py' in " in capsys.readouterr().err
    assert plans == []


def test_a_rank_of_another_launcher_starts_nothing(
    plans: list[LaunchPlan], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["run", "train.py"]) == 1
    assert "WORLD_SIZE=4 is set" in capsys.readouterr().err
    assert plans == []
