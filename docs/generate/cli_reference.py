"""The reference of the command line, from the parsers of its verbs: usage, options, examples and exit codes.

`python docs/generate/cli_reference.py` prints it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from polyaccel.cli.main import GROUPS, VERBS, full_parser
from polyaccel.cli.parser import JobParser

_INTRODUCTION = """\
# Command line

This page lists every verb and option of `polyaccel`, made from the parsers that read them. `polyaccel help VERB` prints
the same in a terminal, and `polyaccel completion SHELL` lets a shell complete them. `-v`, before or behind the verb,
shows more, and the traceback of an error.
"""


def cli_reference() -> str:
    """The page, as Markdown."""
    verbs = _actions(full_parser())
    lines = [_INTRODUCTION]
    for group in GROUPS:
        lines += [f"## {group}\n", "| verb | what it does |", "|---|---|"]
        named = [name for name, verb in VERBS.items() if verb.group == group]
        lines += [f"| [`{name}`](#{name}) | {_text(VERBS[name].help)} |" for name in named]
        lines.append("")
        for name in named:
            lines += _verb(verbs[name], name)
    return "\n".join(lines)


def _actions(parser: argparse.ArgumentParser) -> dict[str, JobParser]:
    """The parsers of a parser's verbs, by name."""
    choices = (each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return {name: each for found in choices for name, each in (found or {}).items()}


def _verb(parser: JobParser, anchor: str) -> Iterator[str]:
    yield f"### `{parser.prog}` {{ #{anchor} }}\n"
    actions = _actions(parser)
    if parser.description:
        yield f"{_text(parser.description)}\n"
    if not actions:
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        yield f"```text\n{_wrapped(usage)}\n```\n"
    for group in parser._action_groups:
        shown = [each for each in group._group_actions if each.help != argparse.SUPPRESS and not _is_common(each)]
        if shown and not actions:
            yield f"**{(group.title or '').capitalize()}**\n"
            for action in shown:
                yield f"`{_spelling(action)}`{{ .key }}"
                yield f":   {_text(_help(parser, action))}{_aliases(parser, action)}\n"
    if parser.examples:
        yield "**Examples**\n"
        yield "```text\n{}\n```\n".format("\n".join(map(_wrapped, parser.examples)))
    if not actions:
        yield f"**Exit codes:** {'; '.join(f'`{code}` {meaning}' for code, meaning in parser.exit_codes.items())}\n"
    for name, action_parser in actions.items():
        yield from _verb(action_parser, f"{anchor}-{name}")


def _is_common(action: argparse.Action) -> bool:
    return isinstance(action, argparse._HelpAction | argparse._SubParsersAction)


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    value = (
        "" if action.nargs == 0 else str(action.metavar or (action.dest if action.choices is None else _set(action)))
    )
    names = ", ".join(action.option_strings)
    return f"{names} [{value}]" if action.nargs == "?" else f"{names} {value}".rstrip()


def _set(action: argparse.Action) -> str:
    return "{" + ",".join(map(str, action.choices or ())) + "}"


def _aliases(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Other names that work: one of each, those with underscores apart."""
    names = [name for name, each in parser._option_string_actions.items() if each is action]
    others = [name for name in names if name not in action.option_strings and "_" not in name]
    return f" Also {', '.join(f'`{name}`' for name in sorted(others))}." if others else ""


def _help(parser: JobParser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action)
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _wrapped(line: str, width: int = 88) -> str:
    """A command over several lines of at most `width` columns where it is longer."""
    lines, rest = list[str](), line
    while len(rest) > width:
        cut = rest.rfind(" ", 0, width - 2)
        lines.append(rest[:cut] + " \\")
        rest = f"    {rest[cut + 1 :]}"
    return "\n".join([*lines, rest])


def _text(text: str) -> str:
    """Plain text as Markdown: what looks like a tag or emphasis is escaped outside of code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([*_<|\[\]])", r"\\\1", part) for part in parts)


if __name__ == "__main__":
    print(cli_reference())
