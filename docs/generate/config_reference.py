"""The reference of the config, from the models that check it: each key with type, default and meaning.

`python docs/generate/config_reference.py` prints it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from polyaccel.config import Config, json_schema
from polyaccel.config.keys import Key, json_name, nested_models, walk_keys
from polyaccel.config.section import Section
from polyaccel.config.sections.optimizer import OPTIMIZER_PARAMS
from polyaccel.config.sections.scheduler import SCHEDULER_PARAMS
from polyaccel.config.sections.zero import UNBOUNDED
from polyaccel.config.unsupported_keys import ABSENT, BELOW, Absent

Schema = Mapping[str, Any]

_LONGEST = 60
"""Characters of a default that stands beside its key."""


def config_reference() -> str:
    """The tables of the page, as Markdown."""
    lines = [*_top_level(), *_sections()]
    lines += _named("optimizer", OPTIMIZER_PARAMS)
    lines += _named("scheduler", SCHEDULER_PARAMS)
    lines += [*_tuning(), *_absent()]
    return "\n".join(lines)


def _top_level() -> Iterator[str]:
    schema = json_schema()
    yield "## Top level { #top-level }\n"
    for key in walk_keys(Config):
        if "." not in key.dotted and not key.is_section:
            yield from _entry(key.dotted, key, _property(key, schema))


def _sections() -> Iterator[str]:
    """Every section under a heading of its own, parents before children."""
    schema = json_schema()
    keys = list(walk_keys(Config))
    for section in (key for key in keys if key.is_section):
        (model,) = nested_models(section.field.annotation)
        yield f"{'###' if '.' in section.dotted else '##'} `{section.dotted}` {{ #{section.dotted} }}\n"
        yield f"{_one_line(section.field.description)}\n"
        if (about := _one_line(model.__doc__)) != _one_line(section.field.description):
            yield f"{about}\n"
        for key in keys:
            parent, _, _ = key.dotted.rpartition(".")
            if parent in (section.dotted, f"{section.dotted}[]") and not key.is_section:
                yield from _entry(key.dotted, key, _property(key, schema))


def _named(section: str, models: Mapping[str, type[Section]]) -> Iterator[str]:
    """What `params` takes for each type that is known by name."""
    yield f"## `{section}.params`, by type {{ #{section}.params }}\n"
    yield "A type that is not listed here gets its arguments as they are.\n"
    for name, model in models.items():
        schema = model.model_json_schema(by_alias=True)
        yield f"### `{name}` {{ #{section}.{name} }}\n"
        yield f"{_one_line(model.__doc__)}\n"
        for field_name, field in model.model_fields.items():
            key = Key(f"{section}.params.{field_name}", model, field_name, field)
            written = schema["properties"].get(json_name(field_name, field), {})
            yield from _entry(f"{section}.{name}.{field_name}", key, written)


def _tuning() -> Iterator[str]:
    yield "## Tuning keys without effect { #tuning }\n"
    yield "They choose how the same numbers are computed. Any value is accepted; the log has the reason.\n"
    for entry in ABSENT:
        if entry.is_tuning:
            yield f"- {_patterns(entry)}: {entry.feature}."
    yield ""


def _absent() -> Iterator[str]:
    yield "## Keys whose feature does not exist { #absent }\n"
    yield (
        "They may stand in a config as long as they ask for nothing, which DeepSpeed's defaults do, and so does every "
        "option of a feature that is not enabled. Any other value is an error that names the feature.\n"
    )
    for entry in ABSENT:
        if not entry.is_tuning:
            yield f"- {_patterns(entry)}: {entry.feature}. Cure: {entry.hint}."
    yield ""


def _patterns(entry: Absent) -> str:
    return ", ".join(f"`{pattern.removesuffix(BELOW)}`" for pattern in entry.keys)


def _entry(anchor: str, key: Key, written: Schema) -> Iterator[str]:
    """A key as an item of a definition list."""
    facts = [_type(written), "required" if key.field.is_required() else f"default {_default(key)}"]
    yield f'<span id="{anchor}"></span>`{key.dotted.rpartition(".")[2]}`{{ .key }} {" · ".join(facts)}'
    yield f":   {_one_line(key.field.description)}"
    if facts[1] == "default below":
        yield "".join(f"\n    - `{item}`" for item in key.field.default)
    yield ""


def _property(key: Key, schema: Schema) -> Schema:
    """The key's place in the JSON Schema."""
    owner = schema if key.model is Config else schema["$defs"][key.model.__name__]
    found: Schema = owner["properties"][json_name(key.name, key.field)]
    return found


def _default(key: Key) -> str:
    value = key.field.get_default(call_default_factory=True)
    if value == UNBOUNDED:
        return "unbounded"
    written = json.dumps(value)
    return f"`{written}`" if len(written) < _LONGEST else "below"


_OF_64_BITS = 2**63 - 1  # a bound that goes without saying


def _type(written: Schema) -> str:
    """A JSON Schema in a few words."""
    if "anyOf" in written:
        return " or ".join(dict.fromkeys(_type(option) for option in written["anyOf"]))
    if "enum" in written or "const" in written:
        return " or ".join(f"`{json.dumps(value)}`" for value in written.get("enum", [written.get("const")]))
    kind = written.get("type")
    if kind == "array" and "prefixItems" in written:
        return f"list of {len(written['prefixItems'])}: {_type(written['prefixItems'][0])} each"
    if kind == "array":
        return f"list of {_type(written['items'])}" if written.get("items") else "list"
    if kind in ("integer", "number"):
        bounds = {"exclusiveMinimum": "> ", "minimum": "≥ ", "exclusiveMaximum": "< ", "maximum": "≤ "}
        told = {word: written[word] for word in bounds if word in written and written[word] != _OF_64_BITS}
        stated = [f"{bounds[word]}{bound:g}" for word, bound in told.items()]
        return " ".join([kind, ", ".join(stated)]).strip()
    return {"null": "null", "boolean": "boolean", "string": "string", "object": "object"}.get(str(kind), "any")


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    print(config_reference())
