"""The config's JSON Schema, for editors that complete and check while one types."""

from __future__ import annotations

from typing import Any

from polyaccel.config.auto import AUTO, RULES
from polyaccel.config.keys import walk_keys
from polyaccel.config.root import Config


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of `Config`, with every docstring, and `"auto"` where it is allowed."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for key in walk_keys(Config):
        if key.dotted in RULES:
            owner = schema if key.model is Config else schema["$defs"][key.model.__name__]
            name = key.field.alias or key.name
            _allow_auto(owner["properties"], name)
    return schema


def _allow_auto(properties: dict[str, Any], name: str) -> None:
    written = properties[name]
    outer = {word: written.pop(word) for word in ("description", "default", "title") if word in written}
    options = written["anyOf"] if set(written) == {"anyOf"} else [written]
    properties[name] = {**outer, "anyOf": [*options, {"const": AUTO}]}
