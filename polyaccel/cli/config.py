"""`polyaccel config check FILE` and `polyaccel config schema`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from polyaccel.errors import ConfigError
from polyaccel.redaction import redact_tree

if TYPE_CHECKING:
    from polyaccel.config import Config, ResolvedConfig
    from polyaccel.config.section import Section


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `config` with its own verbs `check` and `schema`."""
    parser = subparsers.add_parser("config", help="check a config, or print its JSON Schema")
    verbs = parser.add_subparsers(dest="config_verb", required=True, metavar="VERB")
    check = verbs.add_parser("check", help="report everything that is wrong with a config, or what it resolves to")
    check.add_argument("file", help="path of the config, or base64 of its JSON")
    check.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks that will train (default: what the batch sizes imply, else 1)",
    )
    check.set_defaults(func=_check)
    schema = verbs.add_parser("schema", help="print the JSON Schema of configs, for editors")
    schema.set_defaults(func=_print_schema)


def _check(args: argparse.Namespace) -> int:
    """Print the resolved batch sizes and every setting that is not a default; 1 with all problems on stderr."""
    from polyaccel.cli.start_checks import start_problems
    from polyaccel.config import load_resolved
    from polyaccel.config.load import draft_config

    try:
        draft = draft_config(args.file)
        world_size = _implied_world_size(draft.config) if args.world_size is None else args.world_size
        config = load_resolved(args.file, world_size=world_size)
        if problems := start_problems(config):
            raise ConfigError(problems, source=draft.source)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    _report(config, draft.source, world_size)
    return 0


def _implied_world_size(config: Config) -> int:
    """The number of ranks for which three given batch sizes agree, or the least that `elasticity` has; 1 when they
    leave it open or never agree."""
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


def _report(config: ResolvedConfig, source: str, world_size: int) -> None:
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
    for sentence in config.without_effect:
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
