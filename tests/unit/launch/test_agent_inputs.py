"""Lines to agents: they wait for room, and each ssh of pdsh gets those of its own agent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job
from polyaccel.launch.remote.control_messages import AgentPipe, MessageFilter
from polyaccel.launch.remote.pdsh import PdshLauncher, pdsh_command

SSH = f"""#!{sys.executable} -IS
import json, sys
if "-G" in sys.argv:
    sys.exit()
if "gone" in sys.argv:
    sys.exit(3)
print(json.dumps([sys.stdin.read(), sys.argv[1:]]))
sys.exit(3)
"""
LOST = 255


def test_lines_wait_for_a_reader_and_for_room() -> None:
    pipe = AgentPipe()
    pipe.send("first")
    pipe.send("x" * 300_000)
    assert pipe.has_unsent
    with open(pipe.path, "rb", buffering=0) as reader:
        text = b""
        while pipe.has_unsent:
            text += os.read(reader.fileno(), 1 << 16)
            pipe.flush()
        pipe.close()
        assert text + reader.read() == b"first\n" + b"x" * 300_000 + b"\n"


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("PDSH_SSH_ARGS", "PDSH_SSH_ARGS_APPEND"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("fake_ssh")
@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh (Debian: apt install pdsh)")
@pytest.mark.parametrize("chosen", [None, "-q -l%u", "-q -J gate %h -v"])
def test_each_ssh_of_pdsh_has_its_host_user_number_and_input(
    chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-F my_config")
    if chosen is not None:
        monkeypatch.setenv("PDSH_SSH_ARGS", chosen)
    hosts = ["h0", "localhost", "$(id>bad)", "ben@h3"]
    job = Job(command=("train",), hosts=dict.fromkeys(hosts, (0,)), folder="/a b%h'c", ssh_port=2222)
    paths = {}
    for number in (0, 2, 3):
        paths[number] = str(tmp_path / f"the input's {number}")
        Path(paths[number]).write_text(f"for {number}")
    done = subprocess.run(pdsh_command(job, paths), capture_output=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 3
    words: list[dict[str, int]] = []
    said = sorted(json.loads(line) for line in MessageFilter(words.append).feed(done.stdout).splitlines())
    assert sorted(words, key=str) == [{"number": number, "way": 3} for number in paths]
    assert [text for text, _ in said] == ["for 0", "for 2", "for 3"]
    command = f"cd '/a b%h'\"'\"'c' && exec {sys.executable} -m polyaccel.launch.remote.agent "
    for (_, given), host, user, number in zip(said, ["h0", hosts[2], "h3"], [None, None, "ben"], paths, strict=True):
        options, remote = given[: given.index("--")], given[given.index("--") + 1 :]
        assert remote == [f"{command}{number}"]
        assert options[:2] == ["-F", "my_config"]
        assert options[options.index("-p") + 1] == "2222"
        assert options.count(host) == 1
        assert ("-q" in options) is (chosen is not None)
        assert (options[-2:] == ["-l", str(user)]) is ("-l" in options) is (user is not None)
    assert not (tmp_path / "bad").exists()


@pytest.mark.usefixtures("fake_ssh")
@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh (Debian: apt install pdsh)")
def test_an_ssh_that_ends_without_its_agent_ends_the_job() -> None:
    assert PdshLauncher().run(Job(command=("train",), hosts={"gone": (0,)})).code == LOST


def test_no_other_module_of_pdsh_is_chosen() -> None:
    job = Job(command=("train",), hosts={"a": (0,)}, launcher_args=("-t", "5", "-R", "rsh"))
    with pytest.raises(LaunchError) as caught:
        pdsh_command(job, {0: "PIPE"})
    assert caught.value.value == job.launcher_args


@pytest.mark.usefixtures("fake_ssh")
@pytest.mark.parametrize(("modules", "usable"), [("ssh,rsh,exec (default: rsh)", True), ("ssh", False), ("", False)])
def test_pdsh_needs_its_module_exec(modules: str, usable: bool, tmp_path: Path) -> None:
    (tmp_path / "pdsh").write_text(f"#!/bin/sh\necho pdsh-2.34\necho 'rcmd modules: {modules}'\n")
    (tmp_path / "pdsh").chmod(0o755)
    assert PdshLauncher.probe().usable is usable
