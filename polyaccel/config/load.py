"""From a file, a dict or base64 to a `Config`, or to all that is wrong with it."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyaccel.config.arguments import check_optimizer, check_scheduler
from polyaccel.config.auto import take_auto
from polyaccel.config.conflicts import conflict_problems
from polyaccel.config.jsonc import parse_json
from polyaccel.config.root import Config
from polyaccel.config.spellings import migrate_deprecated, respell_mesh
from polyaccel.config.validation import pop_unsupported, validate_tree
from polyaccel.errors import ConfigError, InvariantError, Problem
from polyaccel.job.trial_env import TRIAL_VARIABLE, deep_merge, trial_changes

Source = str | Path | Mapping[str, Any] | Config
MAX_DEPTH = 64
"""Containers inside containers. No key stands deeper than five; options of plugins may."""
_BASE64 = re.compile(r"[A-Za-z0-9_+/-]+={0,2}\s*")


@dataclass(frozen=True, slots=True)
class Draft:
    """A config with what is wrong with it; the keys in question stand at their defaults."""

    config: Config
    problems: tuple[Problem, ...]
    source: str


def load_config(source: Source, *, source_name: str | None = None) -> Config:
    """Read and check a config.

    Args:
        source: Path of a JSON file (comments and trailing commas are allowed), a mapping (never changed), url-safe
            base64 of such JSON, or a `Config`, which is returned unchecked.
        source_name: Name of the source in errors. None uses the path or the kind of source.

    Returns:
        The typed config. Its `"auto"` values and batch sizes are still open; `resolve_config` decides them.

    Raises:
        ConfigError: The config cannot be read or is wrong; the error lists every problem.
    """
    draft = draft_config(source, source_name=source_name)
    if draft.problems:
        raise ConfigError(draft.problems, source=draft.source)
    return draft.config


def draft_config(source: Source, *, source_name: str | None = None) -> Draft:
    """Load a config and return its problems; in a tuner's trial with the trial's changes."""
    if isinstance(source, Config):
        return Draft(source, (), source_name or "config")
    tree, problems, name = read_tree(source, source_name)
    if not isinstance(tree, dict):
        problem = Problem("config", tree, "should be an object", 'write {"train_batch_size": ...}')
        raise ConfigError([problem], source=name)
    problems += migrate_deprecated(tree)
    mesh_keys, contradictions = respell_mesh(tree)
    problems += contradictions
    changes = trial_changes(os.environ)
    replaced = dict(_replaced(tree, changes, ""))
    deep_merge(tree, changes)
    absent, without_effect = pop_unsupported(Config, tree)
    problems += absent
    without_effect |= replaced
    config, found = check_tree(tree, take_auto(tree), without_effect, mesh_keys)
    return Draft(config, (*problems, *found), name)


def _replaced(tree: Mapping[str, Any], changes: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """The keys whose values in `tree` a trial of the tuner replaces by others, with a sentence each."""
    for name, value in changes.items():
        written, key = tree.get(name), f"{prefix}{name}"
        if isinstance(written, Mapping) and isinstance(value, Mapping):
            yield from _replaced(written, value, f"{key}.")
        elif written is not None and written != value:
            yield key, f"{key} = {written!r} is replaced by {value!r} ({TRIAL_VARIABLE})"


def check_tree(
    tree: dict[str, Any], auto_keys: frozenset[str], without_effect: Mapping[str, str], mesh_keys: Mapping[str, str]
) -> tuple[Config, list[Problem]]:
    """Return the typed config of a canonical `tree`, offending keys at defaults, and its problems."""
    config, found = validate_tree(Config, tree)
    if config is None:
        raise InvariantError("a config without its offending keys is still refused", value=found)
    config._auto, config._is_checked = auto_keys, True
    config._without_effect, config._mesh_keys = dict(without_effect), dict(mesh_keys)
    return config, found + _config_problems(config)


def _config_problems(config: Config) -> list[Problem]:
    """The problems of a typed config: contradictions, arguments of named types."""
    return [
        *conflict_problems(config),
        *check_optimizer(config.optimizer, config.auto_keys)[1],
        *check_scheduler(config.scheduler, config.auto_keys)[1],
    ]


def read_tree(source: object, source_name: str | None = None) -> tuple[Any, list[Problem], str]:
    """Return what `source` holds, unchecked, in new containers; problems of its text; its name."""
    problems: list[Problem] = []
    if isinstance(source, Mapping):
        return _plain(source, "", problems), problems, source_name or "config dict"
    if not isinstance(source, str | Path):
        problem = Problem("config", source, "should be a path, a dict or base64 of JSON", "pass one of these")
        raise ConfigError([problem], source=source_name or "config")
    path = Path(source)
    text = _decoded(source) if isinstance(source, str) and not _is_file(path) else None
    name = source_name or (str(path) if text is None else "base64 config")
    if text is None:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except FileNotFoundError as error:
            hint = "pass the path of a JSON file, a dict, or base64 of JSON"
            raise ConfigError([Problem("config", str(source), "no such file", hint)], source=name) from error
        except (OSError, UnicodeDecodeError) as error:
            hint = "pass the path of a JSON file, a dict, or base64 of JSON"
            raise ConfigError([Problem("config", str(source), f"cannot be read: {error}", hint)], source=name) from None
    tree, problems = parse_json(text, source=name)
    return _plain(tree, "", problems), problems, name


def _is_file(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # base64 may be longer than a file name can be
        return False


def _decoded(source: str) -> str | None:
    """The JSON object that `source` is the base64 of, or None when it is something else (a path, most likely)."""
    if not _BASE64.fullmatch(source):
        return None
    body = source.strip().rstrip("=").replace("+", "-").replace("/", "_")
    try:
        text = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return text if text.lstrip().startswith(("{", "/", "#")) else None


def _plain(value: Any, where: str, problems: list[Problem], depth: int = 0) -> Any:
    """Copy `value` into dicts and lists. Raises ConfigError for deep nesting and cycles."""
    key = where.removeprefix(".") or "config"
    if depth > MAX_DEPTH:
        expected = f"is nested deeper than {MAX_DEPTH} levels, or contains itself"
        raise ConfigError([Problem(f"{key[:60]}...", "...", expected, "write a flatter config")])
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                problems.append(Problem(key, name, "has a key that is not a string", "quote the key"))
        return {
            name: _plain(child, f"{where}.{name}", problems, depth + 1)
            for name, child in value.items()
            if isinstance(name, str)
        }
    if isinstance(value, list | tuple):
        return [_plain(child, f"{where}[{index}]", problems, depth + 1) for index, child in enumerate(value)]
    if isinstance(value, str) and "\0" in value:
        problems.append(Problem(key, value, "contains a null character", "remove it"))
    return value
