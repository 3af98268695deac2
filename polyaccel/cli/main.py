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

from polyaccel.cli.parser import EXIT_CODES, JobParser, RawHelpFormatter, describe
from polyaccel.cli.streams import drop_output, flush_output, open_closed_streams
from polyaccel.errors import PolyaccelError


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: the module that has it, its line in `polyaccel --help`, and the group of that line."""

    module: str
    help: str
    group: str


_TRAIN, _LOOK, _SET_UP = GROUPS = ("Train", "Look", "Set up")
VERBS: Mapping[str, Command] = MappingProxyType(
    {
        "run": Command("polyaccel.cli.run", "start the ranks of a training script", _TRAIN),
        "tune": Command(
            "polyaccel.cli.tune", "find the fastest settings of a config that fit, by short trials", _TRAIN
        ),
        "plan": Command("polyaccel.cli.plan.command", "show what training will need, by setting", _TRAIN),
        "config": Command("polyaccel.cli.config", "write a config, check one, or print the schema of all keys", _TRAIN),
        "verify": Command("polyaccel.cli.verify", "compare the first steps with plain torch or JAX", _TRAIN),
        "watch": Command(
            "polyaccel.cli.watch", "show runs on a page of this machine, while they train or later", _LOOK
        ),
        "trace": Command("polyaccel.cli.trace", "show where the time of traced steps went", _LOOK),
        "ckpt": Command("polyaccel.cli.ckpt.command", "list, inspect, verify, compare and convert checkpoints", _LOOK),
        "comm": Command(
            "polyaccel.cli.comm", "measure collectives, or show where ranks of a failed job diverged", _LOOK
        ),
        "doctor": Command("polyaccel.cli.doctor.command", "show what works on this machine and what does not", _SET_UP),
        "plugins": Command(
            "polyaccel.cli.plugins.command",
            "list the installed plugins, check or build one, or begin a new one",
            _SET_UP,
        ),
        "completion": Command("polyaccel.cli.completion", "print the script of a shell that completes words", _SET_UP),
    }
)
_ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType({"build": ("plugins", "build")})
"""Verbs of earlier versions."""

_COMPLETES = "_ARGCOMPLETE"
"""The variable by which a shell asks for completions, by argcomplete."""
_EXIT_FAILURE = 1
_EXIT_INTERRUPTED = 130
_EXAMPLES = ("polyaccel doctor", "polyaccel run --ranks 2 train.py", "polyaccel help run")
_CODES: Mapping[int | str, str] = {
    **EXIT_CODES,
    _EXIT_FAILURE: "an error, stated on standard error, or the answer no: nothing fits, files differ",
    _EXIT_INTERRUPTED: "interrupted by Ctrl-C",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `argv` (None: this process's); return 1 for errors, 2 for wrong arguments."""
    open_closed_streams()
    arguments = _written_out(list(sys.argv[1:] if argv is None else argv))
    if _COMPLETES in os.environ:
        return _complete()
    try:
        parser = _parser(_verb_of(arguments))
        args = parser.parse_args(arguments)
    except SystemExit as exit_:  # argparse has printed why
        return exit_.code if isinstance(exit_.code, int) else _EXIT_FAILURE
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    if args.verb is None:
        parser.print_help()
        return 0
    try:
        code = args.func(args)
    except PolyaccelError as error:
        if args.verbose or os.environ.get("POLYACCEL_DEBUG", "0") not in ("", "0"):
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


def full_parser() -> JobParser:
    """Return the parser with the arguments of every verb, for documentation. It imports all verbs."""
    return _parser(*VERBS)


def _written_out(arguments: list[str]) -> list[str]:
    """The arguments with `help VERB` as `VERB --help`, and a verb of earlier versions as that of today. Without a verb
    the help is asked for."""
    if not arguments or arguments == ["help"]:
        return ["--help"]
    if arguments[0] == "help":
        return [*arguments[1:], "--help"]
    verb = _verb_of(arguments)
    place = arguments.index(verb) if verb in _ALIASES else len(arguments)
    return [*arguments[:place], *_ALIASES.get(verb, ()), *arguments[place + 1 :]]


def _verb_of(arguments: Sequence[str]) -> str:
    return next((argument for argument in arguments if not argument.startswith("-")), "")


def _complete() -> int:
    """Write completions of the line in the environment for the shell that asks; the process ends here."""
    try:
        import argcomplete
    except ImportError:
        return _EXIT_FAILURE
    argcomplete.autocomplete(_parser(_verb_of(os.environ.get("COMP_LINE", "").split()[1:])))
    return 0


def _parser(*chosen: str) -> JobParser:
    """The parser of the whole command. Only the verbs that are named are imported; the rest are lines of help."""
    lines = ["One training engine for any accelerator."]
    for group in GROUPS:
        verbs = [f"  {name:<12}{verb.help}" for name, verb in VERBS.items() if verb.group == group]
        lines += ["", f"{group}:", *verbs]
    parser = JobParser(
        prog="polyaccel",
        usage="polyaccel [-v] VERB ...",
        description="\n".join(lines),
        formatter_class=RawHelpFormatter,
    )
    describe(parser, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("--version", action="version", version=f"polyaccel {metadata.version('polyaccel')}")
    parser.set_defaults(verbose=False)
    subparsers = parser.add_subparsers(
        dest="verb", metavar="VERB", prog="polyaccel", parser_class=JobParser, help=argparse.SUPPRESS
    )
    for name, verb in VERBS.items():
        if name in chosen:
            import_module(verb.module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=verb.help)
    return parser
