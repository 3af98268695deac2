"""Hosts that come and go, without torch: what options allow, who trains, and a launcher beside an agent that is a
script."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyaccel.cli.elastic import elastic_job, refuse_elastic
from polyaccel.cli.options import add_options
from polyaccel.errors import LaunchError
from polyaccel.launch.base import ElasticHosts, Job
from polyaccel.launch.elastic import launcher as launcher_module
from polyaccel.launch.elastic.launcher import TorchElasticLauncher
from polyaccel.launch.elastic.torch_agent import hosts_that_train

JOB = Job(command=("true",), hosts={"localhost": (0, 1)})
SECRET = "a secret of this test, long enough"
STARTS = """
import os, signal, sys, uuid
from dataclasses import replace
from polyaccel.launch.base import Job
from polyaccel.launch.remote.control_messages import PAUSE

job = Job.from_json(sys.stdin.readline())

def start(number, **hosts):
    exports = {**job.exports, "POLYACCEL_RESTART_COUNT": str(number)}
    place = {"master_addr": "127.0.0.1", "master_port": 15000 + number, "node": 1}
    begun = replace(job, hosts=hosts, job_id=uuid.uuid4().hex, exports=exports, **place)
    print(begun.to_json())
    print(PAUSE, flush=True)  # no heartbeat follows: the time of ranks is the machine's

"""
SAYS = """
import os, sys
names = "RANK LOCAL_RANK WORLD_SIZE CROSS_RANK MASTER_PORT"
start = os.environ["POLYACCEL_RESTART_COUNT"]
with open(os.path.join(sys.argv[1], start + "." + os.environ["RANK"]), "w") as file:
    file.write(" ".join(os.environ[name] for name in names.split()))
sys.exit(3 if start == "0" and os.environ["RANK"] == "2" else 0)
"""
WAITS = """
import os, signal, sys
signal.alarm(100)
with open(os.path.join(sys.argv[1], "pid"), "w") as file:
    file.write(str(os.getpid()))
os.kill(int(sys.argv[2]), signal.SIGUSR1)
signal.pause()
"""


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args([*options, "train.py"])


def test_options_say_how_many_hosts_there_may_be() -> None:
    job = elastic_job(JOB, parsed("--elastic_training", "--max_elastic_nodes", "4"), (1, 2, 4), {})
    assert job.elastic == ElasticHosts(least=1, most=4, restarts=3, sizes=(1, 2, 4))
    job = elastic_job(JOB, parsed("--min-elastic-nodes", "2", "--max-restarts", "0"), None, {})
    assert job.elastic == ElasticHosts(least=2, most=2, restarts=0)
    assert Job.from_json(job.to_json()) == job


def test_only_a_secret_that_all_hosts_are_told_is_one() -> None:
    two = parsed("--max-elastic-nodes", "2")
    assert elastic_job(JOB, two, None, {}).secret == ""
    assert elastic_job(JOB, two, None, {"POLYACCEL_JOB_SECRET": SECRET}).secret == SECRET
    assert elastic_job(JOB, parsed(), None, {}).secret == JOB.secret


def test_fewer_hosts_at_most_than_at_least_are_refused() -> None:
    with pytest.raises(LaunchError) as caught:
        elastic_job(JOB, parsed("--min-elastic-nodes", "3", "--max-elastic-nodes", "2"), None, {})
    assert caught.value.value == (3, 2)


@pytest.mark.parametrize("options", [["--elastic-training"], ["--max-elastic-nodes", "2"]])
def test_other_launchers_have_no_use_for_the_options(options: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        refuse_elastic(parsed(*options), "ssh")
    assert caught.value.value == "ssh"
    assert str(options[0]) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hosts": {"a": (0,), "b": (0,)}}, "--master-addr"),
        ({"hosts": {"another.example": (0,)}}, "--master-addr"),
        ({"node": 1}, "--master-addr"),
        ({"elastic": ElasticHosts(least=1, most=2)}, "--master-addr"),
    ],
)
def test_a_job_that_is_none_of_elastic_hosts_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LaunchError) as caught:
        TorchElasticLauncher().plan(replace(JOB, **changes))
    assert named in str(caught.value)


def test_as_many_ranks_train_as_the_config_allows() -> None:
    job = replace(JOB, elastic=ElasticHosts(most=3, sizes=(1, 2, 4)))
    three = [{"name": name, "slots": [0, 1]} for name in ("a", "b", "c")]
    assert hosts_that_train(job, three) == {"a": (0, 1), "b": (0, 1)}
    assert hosts_that_train(job, [three[0], {"name": "a", "slots": [3]}]) == {"a": (0, 1)}
    assert hosts_that_train(job, [{"name": "a", "slots": [2, 3, 5]}]) == {"a": (2, 3)}
    unlimited = replace(JOB, elastic=ElasticHosts(most=3))
    assert hosts_that_train(unlimited, [three[0], {"name": "a", "slots": [3]}]) == {"a": (0, 1), "a#1": (3,)}
    assert hosts_that_train(replace(JOB, elastic=ElasticHosts(sizes=(4,))), three[:1]) == {}


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the job of a script beside an agent that does these lines. Returns the end, and the folder it is told."""

    def run(agent: str, script: str, *arguments: str) -> Any:
        (tmp_path / "scripted_agent.py").write_text(STARTS + agent)
        (tmp_path / "train.py").write_text(script)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(launcher_module, "_AGENT", "scripted_agent")
        command = (launcher_module.sys.executable, str(tmp_path / "train.py"), str(tmp_path), *arguments)
        return TorchElasticLauncher().run(replace(JOB, command=command, grace_s=1.0)), tmp_path

    return run


def test_ranks_are_started_with_the_hosts_that_there_are(beside: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Twice: with two hosts, when one rank fails, and alone, when all end well."""
    agent = """
start(0, a=(0,), b=(4, 5))
assert sys.stdin.readline() == "ended 3\\n"
start(1, a=(0, 1, 2), b=(5,))
assert sys.stdin.readline() == "ended 0\\n"
"""
    end, folder = beside(agent, SAYS)
    assert (end.code, end.cause) == (0, "")
    found = {file.name: file.read_text() for file in folder.glob("[01].*")}
    assert found == {"0.1": "1 0 3 1 15000", "0.2": "2 1 3 1 15000", "1.3": "3 0 4 1 15001"}
    assert "polyaccel: rank 2 (pid " in capfd.readouterr().err


def test_the_last_ranks_decide_where_no_restart_is_left(beside: Any) -> None:
    end, _ = beside('start(0, a=(0,), b=(4, 5))\nassert sys.stdin.readline() == "ended 3\\n"\nsys.exit(3)', SAYS)
    assert end.code == 3
    assert end.cause.startswith("rank 2 (pid ")


def test_ranks_are_ended_when_hosts_come_or_go(beside: Any) -> None:
    agent = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
start(0, a=(), b=(0,))
signal.sigwait([signal.SIGUSR1])
print("end", flush=True)
assert sys.stdin.readline() == "ended 143\\n"
sys.exit(0)
"""
    end, folder = beside(agent.replace("start(0", "job = replace(job, arguments=(str(os.getpid()),))\nstart(0"), WAITS)
    assert end.code == 0
    assert not Path("/proc", (folder / "pid").read_text()).exists()


def test_an_agent_that_is_killed_ends_this_hosts_ranks(beside: Any, capfd: pytest.CaptureFixture[str]) -> None:
    agent = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
job = replace(job, arguments=(str(os.getpid()),))
start(0, a=(), b=(0,))
signal.sigwait([signal.SIGUSR1])
os.kill(os.getpid(), signal.SIGKILL)
"""
    end, folder = beside(agent, WAITS)
    assert end.code == 137
    assert end.cause == "the elastic agent was killed by SIGKILL"
    assert not Path("/proc", (folder / "pid").read_text()).exists()
    assert "the elastic agent was killed by SIGKILL" in capfd.readouterr().err


def test_a_signal_ends_a_host_that_waits_for_others(beside: Any) -> None:
    end, _ = beside("os.kill(os.getppid(), signal.SIGTERM)\nsys.stdin.read()", SAYS)
    assert (end.code, end.was_asked) == (143, True)
