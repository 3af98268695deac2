"""`ds_ssh`: what it starts for each host of a hostfile, and what it ends with."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from polyaccel_deepspeed.commands import ssh

SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do echo "option $1"; shift; done
echo "to $1"; [ "$2" = -- ] || exit 9
[ "$1" = sick ] && { echo "no such host" >&2; exit 255; }
exec sh -c "$3"
"""


@pytest.fixture(autouse=True)
def _ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another ssh, which runs the command here."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def _hostfile(folder: Path, *hosts: str) -> str:
    (folder / "hosts").write_text("".join(f"{host} slots=2\n" for host in hosts))
    return str(folder / "hosts")


def test_a_command_runs_on_every_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = socket.gethostname()
    file = _hostfile(tmp_path, "far", own)
    assert ssh(["-f", file, "--ssh_args=-Fconfig", "echo", "'two  words';", "echo", "$((1 + 2))"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("far: ")] == [
        *(f"far: option {option}" for option in ("-oBatchMode=yes", "-oConnectTimeout=10", "-Fconfig")),
        "far: to far",
        "far: two  words",
        "far: 3",
    ]
    assert [line for line in said if line.startswith(f"{own}: ")] == [f"{own}: two  words", f"{own}: 3"]


def test_the_largest_code_is_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ssh(["-f", _hostfile(tmp_path, "a", "b"), "exit", "7"]) == 7
    assert ssh(["-f", _hostfile(tmp_path, "a", "sick"), "true"]) == 255
    assert "sick: no such host" in capsys.readouterr().err


def test_what_cannot_be_done_is_one_sentence_and_a_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ssh(["-f", str(tmp_path / "absent"), "true"]) == 1
    assert ssh(["-f", _hostfile(tmp_path, "a")]) == 1
    said = capsys.readouterr().err
    assert "absent cannot be read" in said
    assert "ds_ssh: error: no command is given" in said
    assert said.count("hint: ") == 2
