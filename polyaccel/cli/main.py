"""The frame of the `polyaccel` command: finds the verb, imports its module and no other, and shows errors.

A verb's module has `add_parser(subparsers)`, which adds a parser of the verb's name with the default
`func(args) -> int`, the verb itself; what it returns is the exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from types import MappingProxyType

from polyaccel.cli.parser import JobParser
from polyaccel.cli.streams import drop_output, flush_output, open_closed_streams
from polyaccel.errors import PolyaccelError


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: the module that has it, and its line in `polyaccel --help`."""

    module: str
    help: str


VERBS: Mapping[str, Command] = MappingProxyType(
    {
        "run": Command("polyaccel.cli.run", "start the ranks of a training script"),
        "config": Command("polyaccel.cli.config", "check a config file, or print the schema of all keys"),
        "plan": Command(
            "polyaccel.cli.plan.command", "show what training will need in memory, traffic and disk, by setting"
        ),
        "tune": Command("polyaccel.cli.tune", "find the fastest settings of a config that fit, by short trials"),
        "verify": Command("polyaccel.cli.verify", "compare the first steps of a training with plain torch"),
        "build": Command("polyaccel.cli.build", "compile the part of a comm backend that its library needs here"),
        "plugins": Command(
            "polyaccel.cli.plugins.command", "list the installed plugins, check one, or begin a new one"
        ),
        "ckpt": Command("polyaccel.cli.ckpt.command", "list, inspect, verify, compare, export and import checkpoints"),
        "comm": Command("polyaccel.cli.comm", "measure collectives, or show where the ranks of a failed job diverged"),
        "trace": Command("polyaccel.cli.trace", "show where the time of traced steps went"),
        "watch": Command("polyaccel.cli.watch", "show runs on a page of this machine, while they train or later"),
        "doctor": Command("polyaccel.cli.doctor.command", "show what works on this machine and what does not"),
    }
)

_EXIT_FAILURE = 1
_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `argv` (None: this process's); return 1 for errors, 2 for wrong arguments."""
    open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser(arguments).parse_args(arguments)
    except SystemExit as exit_:  # argparse has printed why
        return exit_.code if isinstance(exit_.code, int) else _EXIT_FAILURE
    try:
        code = args.func(args)
    except PolyaccelError as error:
        if args.debug or os.environ.get("POLYACCEL_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        else:
            print(f"polyaccel: error: {error}", file=sys.stderr)
        return _EXIT_FAILURE
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        drop_output()
        return _EXIT_FAILURE
    return int(code) if flush_output() else int(code) or _EXIT_FAILURE


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the whole command. Only the verb that `arguments` names is imported; the rest are lines of help."""
    parser = argparse.ArgumentParser(prog="polyaccel", description="One training engine for any accelerator.")
    parser.add_argument("--version", action="version", version=f"polyaccel {metadata.version('polyaccel')}")
    parser.add_argument("-v", "--verbose", dest="debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=JobParser)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, verb in VERBS.items():
        if name == chosen:
            import_module(verb.module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=verb.help)
    return parser
