"""`polyaccel config check FILE` and `polyaccel config schema`; `polyaccel config new` is in `config_new`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

from polyaccel.cli import config_new
from polyaccel.cli.parser import add_hidden_aliases, describe
from polyaccel.errors import ConfigError, Problem
from polyaccel.redaction import redact_tree

if TYPE_CHECKING:
    from polyaccel.config import Config, ResolvedConfig
    from polyaccel.config.section import Section


READERS = "polyaccel.config_readers"
"""Entry points of packages that read configs of other tools: functions from a source, a number of ranks and the
arguments of `--set` to a config and sentences about what was altered."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `config` with its own verbs `new`, `check` and `schema`."""
    summary = "write a config, check one, or print the schema of all keys"
    parser = subparsers.add_parser("config", help=summary, description=summary)
    verbs = parser.add_subparsers(dest="config_verb", required=True, metavar="VERB")
    config_new.add_parser(verbs)
    what = "report everything that is wrong with a config, or what it resolves to"
    check = verbs.add_parser("check", help=what, description=what)
    check.add_argument("file", metavar="FILE", help="path of the config, or base64 of its JSON")
    ranks = check.add_argument(
        "-n",
        "--ranks",
        dest="world_size",
        type=int,
        metavar="N",
        help="ranks that will train (default: what the batch sizes imply, else 1)",
    )
    add_hidden_aliases(check, ranks, ["--world-size"])
    check.add_argument(
        "--deepspeed",
        action="store_true",
        help="read the config as the drop-in `deepspeed` does, and show what it would train with",
    )
    check.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help='an argument that decides an "auto", by its name in TrainingArguments (learning_rate=1e-4)',
    )
    describe(
        check,
        examples=("polyaccel config check ds_config.json --ranks 8",),
        codes={0: "the config is valid", 1: "it is not; all problems are on standard error"},
    )
    check.set_defaults(func=_check)
    what = "print the JSON Schema of configs, for editors"
    schema = verbs.add_parser("schema", help=what, description=what)
    schema.set_defaults(func=_print_schema)


def _check(args: argparse.Namespace) -> int:
    """Print the resolved batch sizes and every setting that is not a default; 1 with all problems on stderr."""
    from polyaccel.cli.start_checks import start_problems
    from polyaccel.config.load import draft_config
    from polyaccel.config.resolve import resolve_draft

    try:
        settings = dict(map(_setting, args.settings))
        source, sentences, world_size = args.file, list[str](), args.world_size
        if args.deepspeed:
            source, sentences = _as_deepspeed(args.file, world_size or 1, settings)
        draft = draft_config(source, source_name=args.file)
        if world_size is None:
            world_size = _implied_world_size(draft.config)
        config = resolve_draft(draft, world_size, settings)
        if problems := start_problems(config):
            raise ConfigError(problems, source=draft.source)
    except ConfigError as error:
        is_absent = isinstance(error.__cause__, FileNotFoundError)
        print(f"{args.file}: no such file" if is_absent else error, file=sys.stderr)
        return 1
    _report(config, draft.source, world_size, sentences)
    return 0


def _setting(text: str) -> tuple[str, Any]:
    """The name and the value of a `--set`. Raises ConfigError for text of another form."""
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise ConfigError([Problem("--set", text, "should be NAME=VALUE", "write learning_rate=1e-4")], source="--set")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _as_deepspeed(file: str, world_size: int, settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the drop-in's form of a config, and a sentence for each change."""
    found = [point for point in metadata.entry_points(group=READERS) if point.name == "deepspeed"]
    if not found:
        hint = "pip install ./plugins/polyaccel-deepspeed"
        raise ConfigError(
            [Problem("--deepspeed", True, "needs the drop-in, which is not installed", hint)], source=file
        )
    try:
        tree, sentences = found[0].load()(file, world_size, settings)
    except ConfigError as error:
        raise ConfigError(error.problems, source=file) from None
    return dict(tree), list(sentences)


def _implied_world_size(config: Config) -> int:
    """Return the ranks for which the batch sizes agree, or the least of `elasticity`; 1 if undetermined."""
    from polyaccel.config.elastic import compute_elastic_config

    if config.elasticity.enabled:
        return compute_elastic_config(config.elasticity).world_sizes[0]
    train, micro, gas = (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )
    if train is None or micro is None or gas is None or train % (micro * gas):
        return 1
    return train // (micro * gas)


def _report(config: ResolvedConfig, source: str, world_size: int, sentences: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from polyaccel.config.elastic import compute_elastic_config

    table = Table("setting", "value", box=None, pad_edge=False)
    table.add_row("train_batch_size", str(config.train_batch_size))
    table.add_row("train_micro_batch_size_per_gpu", str(config.train_micro_batch_size_per_gpu))
    table.add_row("gradient_accumulation_steps", str(config.gradient_accumulation_steps))
    if config.elasticity.enabled:
        sizes = compute_elastic_config(config.elasticity).world_sizes
        table.add_row("numbers of ranks", ", ".join(map(str, sizes)))
    for key, value in _settings(config):
        table.add_row(Text(key), Text(json.dumps(redact_tree({key: value})[key])))
    console = Console(soft_wrap=True)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    console.print(Text(f"{source}: valid for {ranks}"))
    console.print(table)
    for sentence in (*sentences, *config.without_effect):
        console.print(Text(sentence))


def _settings(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values under `section` that are not defaults, the batch sizes excepted."""
    from polyaccel.config.keys import json_name
    from polyaccel.config.section import Section

    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if field.is_required() and not prefix:
            continue
        key = f"{prefix}{json_name(name, field)}"
        if isinstance(value, Section):
            yield from _settings(value, f"{key}.")
        elif isinstance(value, dict):
            yield from ((f"{key}.{argument}", setting) for argument, setting in value.items())
        elif value != field.get_default(call_default_factory=True):
            yield key, value


def _print_schema(args: argparse.Namespace) -> int:
    from polyaccel.config import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
