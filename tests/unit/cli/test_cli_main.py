"""The frame of the command: imports what the verb needs, shows errors as messages, returns exit codes."""

from __future__ import annotations

import argparse
import os
import re
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
        parser.add_argument("--file")
        parser.set_defaults(func=lambda args: fake.func(args))

    module = SimpleNamespace(add_parser=add_parser)
    monkeypatch.setattr(frame, "VERBS", {**VERBS, "fake": frame.Command("fake_module", "for the test", "Train")})
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    shown, _, loaded = done.stdout.partition("LOADED ")
    assert all(f"\n  {name} " in shown for name in VERBS)
    assert loaded.strip() == "['polyaccel.cli.parser', 'polyaccel.cli.streams', 'polyaccel.cli.main']"


def test_the_package_runs_as_the_command() -> None:
    run = [sys.executable, "-m", "polyaccel", "--version"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("polyaccel ")


@pytest.mark.parametrize(
    ("arguments", "usage", "meant"),
    [
        (["absent"], "polyaccel [", None),
        (["--absent"], "polyaccel [", None),
        (["--versoin"], "polyaccel [", "--version"),
        (["doctro"], "polyaccel [", "doctor"),
        (["fake", "--absent"], "polyaccel fake", None),
        (["fake", "--flie", "x"], "polyaccel fake", "--file"),
    ],
)
def test_wrong_arguments_are_code_2_with_the_usage_of_their_verb_and_the_nearest_word(
    verb: SimpleNamespace, arguments: list[str], usage: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: {usage}")
    assert re.findall(r"did you mean (\S+)\?", error) == ([meant] if meant else [])


@pytest.mark.parametrize("arguments", [["ckpt"], ["ckpt", "absent"], ["config"], ["comm"], ["completion"]])
def test_what_is_missing_or_unknown_is_answered_with_what_there_is(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = next(
        action.choices[arguments[0]]
        for action in frame.full_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    choices = next(action.choices for action in parser._actions if action.choices)
    assert main(arguments) == 2
    assert ", ".join(choices) in capsys.readouterr().err.splitlines()[-1]


def test_without_a_verb_it_shows_the_groups_of_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"\n{group}:\n") for group in frame.GROUPS]
    assert places == sorted(places)
    assert main(["help"]) == 0
    assert capsys.readouterr().out == shown


def test_help_and_a_verb_is_the_help_of_the_verb(verb: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fake", "--help"]) == 0
    shown = capsys.readouterr().out
    assert main(["help", "fake"]) == 0
    assert capsys.readouterr().out == shown
    assert "exit codes:\n  0 " in shown


def test_every_verb_has_one_spelling_of_an_option_exit_codes_and_a_summary() -> None:
    """Names that differ in dashes and underscores alone, or that only other tools have, are not in the help."""
    found = 0
    waiting = [frame.full_parser()]
    while waiting:
        parser = waiting.pop()
        assert set(parser.exit_codes) >= {0, 1, 2}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()
                continue
            long = [name for name in action.option_strings if name.startswith("--")]
            assert len(long) <= 1, (parser.prog, action.option_strings)
            assert "_" not in "".join(long)
            assert action.help, (parser.prog, action.dest)
            found += 1
    assert found > 150


def test_a_shell_completes_options_of_the_verb(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("argcomplete")
    line = "polyaccel watch --exp"
    shell = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": os.devnull, "COMP_LINE": line}
    code = """
import os, sys, tempfile
out = tempfile.mktemp()
os.environ["_ARGCOMPLETE_STDOUT_FILENAME"] = out
from polyaccel.cli.main import main
try:
    main([])
except SystemExit:
    pass
finally:
    print(open(out).read())
"""
    environment = {**os.environ, **shell, "COMP_POINT": str(len(line)), "IFS": "\n"}
    code = code.replace("main([])", "sys.modules['os']._exit = sys.exit; main([])")
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "--export-html" in done.stdout, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_names_the_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("argcomplete")
    assert main(["completion", shell]) == 0
    assert "polyaccel" in capsys.readouterr().out


def test_a_verbs_code_is_the_exit_code(verb: SimpleNamespace) -> None:
    verb.func = lambda args: 137
    assert main(["fake"]) == 137


def test_an_error_is_one_message_without_a_traceback(
    verb: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POLYACCEL_DEBUG", raising=False)
    verb.func = fail
    assert main(["fake"]) == 1
    assert capsys.readouterr().err == "polyaccel: error: rank 3 is not there\n  hint: look for it\n"


@pytest.mark.parametrize(("arguments", "debug"), [(["-v", "fake"], "0"), (["fake", "-v"], "0"), (["fake"], "1")])
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
        [sys.executable, "-c", code], stdout=write_fd, stderr=subprocess.PIPE, timeout=120, check=False
    )
    os.close(write_fd)
    assert (done.returncode, done.stderr) == (1, b"")
