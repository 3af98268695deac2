"""The argument parser of all verbs: help by groups with examples and exit codes, and errors that name the nearest word.

An option may leave its value out although a script follows: `--debugpy train.py` is not a port. Aliases work without a
line in the help.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

EXIT_CODES: Mapping[int | str, str] = {0: "success", 1: "an error, stated on standard error", 2: "wrong arguments"}
"""Exit codes of a verb that has no others."""
_MOST_COLUMNS = 100
_NEAR = 0.6
_MISSING = "the following arguments are required: "


class HelpFormatter(argparse.HelpFormatter):
    """Shows an option as `-n, --ranks N`, with its metavar once."""

    def __init__(self, prog: str, **named: Any) -> None:
        columns = min(_MOST_COLUMNS, shutil.get_terminal_size().columns)
        super().__init__(prog, **{"max_help_position": 28, "width": columns - 2, **named})

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class RawHelpFormatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description too."""


class JobParser(argparse.ArgumentParser):
    """Gives an option with an optional value (`nargs="?"`) the next word only where the option's `type` takes it, and
    looks no further than the first word that is not an option's. Of `abbreviated`, names of options, a beginning that
    only one of them has stands for it. What is left over is this parser's error, with its own usage."""

    abbreviated: Sequence[str] = ()
    keeps_words = False
    """Whether the words that were parsed are kept, as `words` of the namespace."""
    missing = ""
    """What to give, in place of argparse's list of arguments that are required."""
    examples: Sequence[str] = ()
    """Commands at the end of the help."""
    exit_codes: Mapping[int | str, str] = EXIT_CODES

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **named})
        what = "show more, and the traceback of an error"
        self.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help=what)

    def retype(self, name: str, type_: Callable[[str], Any]) -> None:
        """Let `type_` read the value of the option of that name from now on."""
        self._option_string_actions[name].type = type_

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        found, left = super().parse_known_args(None if args is None else self._settled(list(args)), namespace)
        if self.keeps_words:
            found.words = tuple(args or ())
        if left:
            word = next((word for word in left if word.startswith("-")), left[0])
            found_name = nearest(word.partition("=")[0], self._option_string_actions)
            # The alias of another program is known, and the name that the help shows is taught.
            names = self._option_string_actions[found_name].option_strings if found_name else [""]
            self.error(f"unrecognized argument: {word}{_hint(max(names, key=len))}")
        return found, left

    def format_help(self) -> str:
        examples = [f"  {example}" for example in self.examples]
        codes = [f"  {code:<5}{meaning}" for code, meaning in self.exit_codes.items()]
        parts = [super().format_help().rstrip("\n")]
        parts += [
            "\n".join([title, *lines]) for title, lines in (("examples:", examples), ("exit codes:", codes)) if lines
        ]
        return "\n\n".join(parts) + "\n"

    def error(self, message: str) -> Any:
        if message.startswith(_MISSING):
            verbs = [each for each in self._actions if isinstance(each, argparse._SubParsersAction)]
            message = self.missing or (f"give a verb: {', '.join(verbs[0].choices)}" if verbs else message)
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = list(map(str, action.choices))
        if isinstance(action, argparse._SubParsersAction):
            hint = near(str(value), known) or f"\n  hint: choose from {', '.join(known)}"
            raise argparse.ArgumentError(None, f"unknown command: {value}{hint}")
        raise argparse.ArgumentError(action, f"expected one of {', '.join(known)}: {value}{near(str(value), known)}")

    def _settled(self, words: list[str]) -> list[str]:
        settled: list[str] = []
        while words and words[0].startswith("-") and words[0] != "--":
            settled.append(word := self._whole(words.pop(0)))
            action = self._option_string_actions.get(word)  # not `--name=value`, which has its value
            if action is None:
                continue
            if action.nargs == "?":
                has_value = bool(words) and _takes(action, words[0])
                settled[-1] = f"{word}={words.pop(0) if has_value else action.const}"
            elif action.nargs is None and words:
                settled.append(words.pop(0))
        return settled + words

    def _whole(self, word: str) -> str:
        """`word` with the name that it begins in place of the beginning."""
        by_name = self._option_string_actions
        begun, mark, value = word.partition("=")
        if begun in by_name or not begun.startswith("--"):
            return word
        names = [name for name in self.abbreviated if name.startswith(begun)]
        meant = {id(by_name[name]) for name in names}
        if len(meant) > 1:
            self.error(f"ambiguous option: {begun} could match {', '.join(names)}")
        return f"{names[0]}{mark}{value}" if names else word


def describe(
    parser: argparse.ArgumentParser,
    *,
    examples: Sequence[str] = (),
    codes: Mapping[int | str, str] | None = None,
    missing: str = "",
    verbose: str = "",
) -> None:
    """Give a verb's parser its examples, exit codes that are not `EXIT_CODES`, a sentence for arguments that are
    missing, and the help of `--verbose`."""
    if isinstance(parser, JobParser):
        parser.examples, parser.missing = tuple(examples), missing
        parser.exit_codes = {**EXIT_CODES, **(codes or {})}
        if verbose:
            parser._option_string_actions["--verbose"].help = verbose


def add_hidden_aliases(
    container: argparse.ArgumentParser | argparse._ArgumentGroup, action: argparse.Action, names: Iterable[str]
) -> None:
    """Let an option be written in other ways, which neither the help nor the usage shows."""
    container._option_string_actions.update(dict.fromkeys(names, action))


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word nearest to `word`; "" without one."""
    return next(iter(get_close_matches(word, list(known), 1, _NEAR)), "")


def near(word: str, known: Iterable[str]) -> str:
    """Return the hint that names the known word nearest to `word`; "" without one."""
    return _hint(nearest(word, known))


def _hint(name: str) -> str:
    return f"\n  hint: did you mean {name}?" if name else ""


def _takes(action: argparse.Action, word: str) -> bool:
    try:
        return not callable(action.type) or action.type(word) is not None
    except (argparse.ArgumentTypeError, ValueError):
        return False
