"""The keys that exist: dotted names, a walk over the models, and the nearest name to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from polyaccel.config.section import Section

Path = tuple[str | int, ...]


def dotted(path: Sequence[str | int]) -> str:
    """A path as users read it: `optimizer.params.betas[1]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "config"


@dataclass(frozen=True)
class Key:
    """A key of the config: its dotted name (as in JSON, `[]` for list items), its model, and its field there."""

    dotted: str
    model: type[Section]
    name: str
    field: FieldInfo

    @property
    def is_section(self) -> bool:
        return bool(nested_models(self.field.annotation))


def value_of(tree: Any, key: str) -> Any:
    """Return what stands in `tree` under a dotted `key`, None where there is nothing; "" is `tree` itself."""
    for name in key.split(".") if key else ():
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def parent_of(tree: Any, key: str) -> tuple[dict[str, Any], str]:
    """Return the table in `tree` that a dotted `key` belongs to, {} where there is none, and the key's name in it."""
    parent, _, name = key.rpartition(".")
    table = value_of(tree, parent)
    return table if isinstance(table, dict) else {}, name


def json_name(name: str, field: FieldInfo) -> str:
    """The JSON key of a field."""
    return field.alias or name


def walk_keys(model: type[Section], prefix: str = "") -> Iterator[Key]:
    """Every key under `model`, parents before children."""
    for name, field in model.model_fields.items():
        here = f"{prefix}{json_name(name, field)}"
        yield Key(here, model, name, field)
        for child in nested_models(field.annotation):
            listed = "[]" if not _is_direct(field.annotation) else ""
            yield from walk_keys(child, f"{here}{listed}.")


def nested_models(annotation: Any) -> tuple[type[Section], ...]:
    """The sections that a field's type mentions."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(model for part in get_args(annotation) for model in nested_models(part))


def _is_direct(annotation: Any) -> bool:
    """Whether the section stands there itself (or null), not in a list."""
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return all(_is_direct(part) for part in get_args(annotation) if nested_models(part))
    return isinstance(annotation, type)


@cache
def _children(model: type[Section]) -> dict[str, dict[str, Key]]:
    """Keys by the dotted name of the section they belong to; the root's is empty."""
    sections: dict[str, dict[str, Key]] = {}
    for key in walk_keys(model):
        parent, _, leaf = key.dotted.rpartition(".")
        sections.setdefault(parent, {})[leaf] = key
    return sections


def section_names(model: type[Section]) -> frozenset[str]:
    """The dotted names of all sections under `model`."""
    return frozenset(key.dotted for key in walk_keys(model) if key.is_section)


def suggest_key(model: type[Section], path: Path, others: Iterable[str] = ()) -> str:
    """Return a hint for an unknown key: a similar sibling, else where it exists; `others` count as keys."""
    *parents, unknown = path
    parent = "".join("[]" if isinstance(part, int) else f".{part}" for part in parents).removeprefix(".")
    sections = {section: list(names) for section, names in _children(model).items()}
    for other in others:
        parts = other.split(".")
        for length in range(1, len(parts) + 1):
            section = sections.setdefault(".".join(parts[: length - 1]), [])
            if parts[length - 1] not in section:
                section.append(parts[length - 1])
    siblings = sections.get(parent, [])
    for cutoff in (0.8, 0.6):
        if near := difflib.get_close_matches(str(unknown), siblings, n=1, cutoff=cutoff):
            return f"did you mean {dotted([*parents, near[0]])!r}?"
        elsewhere = [f"{section}.{unknown}".removeprefix(".") for section, keys in sections.items() if unknown in keys]
        if elsewhere:
            return f"did you mean {' or '.join(map(repr, elsewhere[:3]))}?"
    return f"the keys here are {', '.join(siblings)}" if 0 < len(siblings) <= 12 else "remove it"


def suggest_word(word: str, known: Sequence[str]) -> str:
    """A hint for an unknown choice, or nothing when none resembles it."""
    lowered = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), list(lowered), n=1)
    return f"did you mean {lowered[near[0]]!r}?" if near else ""
