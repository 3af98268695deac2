"""Files of variables say what a shell's `export` says of the same lines."""

from __future__ import annotations

import codecs
import os
import subprocess
from pathlib import Path

import pytest

from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job
from polyaccel.launch.environment_file import read_environment

KNOWN = {"PATH": os.environ["PATH"], "HOME": "/home/me", "X": "x y", "EMPTY": ""}

AS_A_SHELL = [
    'A="two words"',
    "A='two words'",
    "A=$HOME/x",
    'A="$HOME/x":/y',
    "A='$HOME'",
    "A=${HOME}x",
    "A=pre$X",
    "A=",
    "A=$NOPE",
    "A=a${NOPE}b",
    'A="a\\"b\\\\c\\d\\$HOME"',
    "A=a\\ b\\\\c\\'",
    "A=~/x:~/y:z~",
    'A="~/x"',
    "A=1 # a comment",
    "A=a#b",
    "A=${NOPE:-other}/x",
    "A=${EMPTY:-other}${EMPTY-not}",
    "A=${HOME:+:$HOME}${EMPTY:+no}${NOPE+no}",
    'A="${NOPE:-$HOME}"',
    "A=1\nB=$A$A",
    "# c\n\n  A=1\n\tB=2  \n",
    "A=one\\\ntwo",
    'A="one\ntwo"',
    "A='one\ntwo'",
    "A=x=y=z",
    "A=a$",
    "A='it'\"'\"'s'",
    "A=ü日本",
]


def _read(folder: Path, text: str | bytes) -> dict[str, str]:
    file = folder / ".polyaccel_env"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_environment(file, KNOWN)


@pytest.mark.parametrize("with_export", [False, True], ids=["NAME=", "export NAME="])
@pytest.mark.parametrize("text", AS_A_SHELL)
def test_a_file_says_what_a_shell_exports(text: str, with_export: bool, tmp_path: Path) -> None:
    if with_export:
        text = text.replace("A=", "export A=", 1)
    words = ["bash", "-c", f"set -a\n{text}\nenv -0"]
    shown = subprocess.run(words, env=KNOWN, capture_output=True, timeout=120, check=True).stdout.decode()
    exported = dict(each.split("=", 1) for each in shown.split("\0") if each)
    found = _read(tmp_path, text)
    assert "A" in found
    assert found == {name: exported[name] for name in ("A", "B") if name in exported}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("export A=1 B='2 3' HOME", {"A": "1", "B": "2 3", "HOME": "/home/me"}),
        ("export A=1; export B=2;\nexport C=3 # c", {"A": "1", "B": "2", "C": "3"}),
        ("export NOPE\nA=1", {"A": "1"}),
        ("export=1", {"export": "1"}),
        ("A=two words  ", {"A": "two words"}),
        ("A = 1", {"A": "1"}),
        ("A=http://x/?a=1&b=(2)", {"A": "http://x/?a=1&b=(2)"}),
        ("A=1\r\nexport B='2'\r\n\r\n# c\r\n", {"A": "1", "B": "2"}),
        (codecs.BOM_UTF8 + b"A=1\nB=2", {"A": "1", "B": "2"}),
        (codecs.BOM_UTF16_LE + "A=ü\r\nB=2\r\n".encode("utf-16-le"), {"A": "ü", "B": "2"}),
        (b"A=M\xfcller", {"A": os.fsdecode(b"M\xfcller")}),
        ("", {}),
    ],
)
def test_what_other_files_say(text: str | bytes, found: dict[str, str], tmp_path: Path) -> None:
    assert _read(tmp_path, text) == found


def test_bytes_that_are_no_utf_8_reach_ranks_as_they_are(tmp_path: Path) -> None:
    job = Job(command=("train",), hosts={"a": (0,)}, exports=_read(tmp_path, b"A=M\xfcller"))
    assert os.fsencode(Job.from_json(job.to_json().encode().decode()).exports["A"]) == b"M\xfcller"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("A=1\nB\n", 2),
        ("A=1\n\nHF_TOKEN hunter2\n", 3),
        ("A='1\n", 1),
        ('A=1\nB="2\n', 2),
        ("A=it's", 1),
        ("A=$(id)", 1),
        ("A=`id`", 1),
        ('A="$(id)"', 1),
        ("A=a$1", 1),
        ("A=${X%y}", 1),
        ("A=${X", 1),
        ("1A=2", 1),
        ("=2", 1),
        ("export A=1 & id", 1),
        ("A-B=1", 1),
        (b"A=\x00", 1),
    ],
)
def test_what_cannot_be_read_names_its_line_and_shows_no_value(text: str | bytes, line: int, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as raised:
        _read(tmp_path, text)
    assert raised.value.value == line
    assert raised.value.hint
    assert "hunter2" not in str(raised.value)


def test_a_file_that_is_not_readable_is_a_launch_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as raised:
        read_environment(tmp_path, {})
    assert raised.value.value == str(tmp_path)
