"""`polyaccel plugins`: what is installed, from metadata alone. Whether it works is the business of `doctor`, whether it
keeps its contract that of `plugins check`; `plugins new` writes one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from polyaccel.cli.plugins import build as plugins_build
from polyaccel.cli.plugins import check as plugins_check
from polyaccel.cli.plugins import new as plugins_new
from polyaccel.registry import PluginGroup, PluginInfo, list_plugins


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "list the installed plugins, check or build one, or begin a new one"
    parser = subparsers.add_parser("plugins", help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.set_defaults(func=run)
    actions = parser.add_subparsers(dest="action", metavar="VERB", help="default: list")
    what = "list the installed plugins without importing any (the default)"
    listing = actions.add_parser("list", help=what, description=what)
    listing.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON list")
    plugins_check.add_parser(actions)
    plugins_new.add_parser(actions)
    plugins_build.add_parser(actions)


def run(args: argparse.Namespace) -> int:
    """Print the plugins; the exit code is 0."""
    plugins = [info for group in PluginGroup for info in list_plugins(group)]
    print(json.dumps([as_json(info) for info in plugins], indent=2) if args.json else as_text(plugins))
    return 0


def as_json(info: PluginInfo) -> dict[str, str]:
    return {
        "group": info.group.value,
        "name": info.name,
        "package": info.package,
        "version": info.version,
        "value": info.value,
    }


def as_text(plugins: Iterable[PluginInfo]) -> str:
    """A table of name, package with version, and class, under each group's name."""
    plugins = list(plugins)
    name_width = max((len(info.name) for info in plugins), default=0)
    source_width = max((len(info.source) for info in plugins), default=0)
    lines = []
    for group in PluginGroup:
        lines.append(group.value)
        rows = [info for info in plugins if info.group is group]
        lines += [f"  {info.name:<{name_width}}  {info.source:<{source_width}}  {info.value}" for info in rows]
        lines += [] if rows else ["  none"]
    return "\n".join(lines)
