"""The frame of the command: imports what the verb needs, shows errors as messages, returns exit codes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from polyaccel.cli import main as frame
from polyaccel.cli.main import VERBS, main
from polyaccel.errors import LaunchError

_HEAVY = ("torch", "jax", "numpy", "pydantic", "rich", "stevedore")


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A verb `fake` whose function is `verb.func`."""
    fake = SimpleNamespace(func=lambda args: 0)

    def add_parser(subparsers: Any) -> None:
        parser: argparse.ArgumentParser = subparsers.add_parser("fake")
        parser.add_argument("-v", "--verbose", action="store_true")
        parser.set_defaults(func=lambda args: fake.func(args))

    module = SimpleNamespace(add_parser=add_parser)
    monkeypatch.setattr(frame, "VERBS", {**VERBS, "fake": frame.Command("fake_module", "for the test")})
    monkeypatch.setattr(frame, "import_module", {"fake_module": module}.__getitem__)
    return fake


def fail(args: argparse.Namespace) -> int:
    raise LaunchError("rank 3 is not there", hint="look for it")


def test_help_lists_every_verb_and_imports_none() -> None:
    code = f"""
import sys
from polyaccel.cli.main import main
assert main(["--help"]) == 0
print("LOADED", [m for m in sys.modules if m.split(".")[0] in {_HEAVY} or m.startswith("polyaccel.cli.")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    shown, _, loaded = done.stdout.partition("LOADED ")
    assert all(f"\n    {name} " in shown for name in VERBS)
    assert loaded.strip() == "['polyaccel.cli.parser', 'polyaccel.cli.streams', 'polyaccel.cli.main']"


def test_the_package_runs_as_the_command() -> None:
    run = [sys.executable, "-m", "polyaccel", "--version"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.startswith("polyaccel ")


@pytest.mark.parametrize("arguments", [[], ["absent"], ["--absent"], ["fake", "--absent"]])
def test_wrong_arguments_are_code_2(
    verb: SimpleNamespace, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "usage: polyaccel" in capsys.readouterr().err


def test_a_verbs_code_is_the_exit_code(verb: SimpleNamespace) -> None:
    verb.func = lambda args: 137
    assert main(["fake"]) == 137


def test_an_error_is_one_message_without_a_traceback(
    verb: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POLYACCEL_DEBUG", raising=False)
    verb.func = fail
    assert main(["fake", "-v"]) == 1
    assert capsys.readouterr().err == "polyaccel: error: rank 3 is not there\n  hint: look for it\n"


@pytest.mark.parametrize(("arguments", "debug"), [(["-v", "fake"], "0"), (["fake"], "1")])
def test_the_traceback_is_there_on_request(
    verb: SimpleNamespace,
    arguments: list[str],
    debug: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POLYACCEL_DEBUG", debug)
    verb.func = fail
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert "rank 3 is not there" in shown


def test_a_bug_keeps_its_traceback(verb: SimpleNamespace) -> None:
    def bug(args: argparse.Namespace) -> int:
        raise KeyError("ours")

    verb.func = bug
    with pytest.raises(KeyError) as caught:
        main(["fake"])
    assert caught.value.args == ("ours",)


def test_ctrl_c_is_code_130(verb: SimpleNamespace) -> None:
    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    verb.func = interrupted
    assert main(["fake"]) == 130


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    code = """
import sys
from types import SimpleNamespace
from polyaccel.cli.main import main
add_parser = lambda subparsers: subparsers.add_parser("run").set_defaults(func=lambda args: print("to nobody") or 0)
sys.modules["polyaccel.cli.run"] = SimpleNamespace(add_parser=add_parser)
sys.exit(main(["run"]))
"""
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write_fd, stderr=subprocess.PIPE, timeout=30, check=False
    )
    os.close(write_fd)
    assert (done.returncode, done.stderr) == (1, b"")
