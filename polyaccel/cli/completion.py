"""`polyaccel completion`: words that a shell completes, by argcomplete."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from polyaccel.cli.parser import describe
from polyaccel.errors import PolyaccelError

SHELLS = ("bash", "zsh", "fish")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "print the script that lets a shell complete verbs and options, by the package argcomplete"
    parser = subparsers.add_parser("completion", help=what, description=what)
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    examples = (
        'eval "$(polyaccel completion bash)"',
        "polyaccel completion fish > ~/.config/fish/completions/polyaccel.fish",
    )
    describe(parser, examples=examples, missing=f"give a shell: {', '.join(SHELLS)}")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the script; the exit code is 0. Raises PolyaccelError without argcomplete."""
    if find_spec("argcomplete") is None:
        raise PolyaccelError("argcomplete is not installed", hint="pip install argcomplete", value=args.shell)
    from argcomplete.shell_integration import shellcode

    print(shellcode(["polyaccel"], shell=args.shell))
    return 0
