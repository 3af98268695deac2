"""Plain values as YAML, as people write manifests: blocks, and strings quoted where YAML would read something else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""What YAML takes for something else than a string."""


def as_yaml(value: Mapping[str, Any]) -> str:
    """A document of mappings with names as keys, sequences, strings, integers and booleans; nothing else."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, under in value.items():
            if _is_block(under):
                yield f"{_scalar(key)}:"
                yield from (f"  {line}" for line in _lines(under))
            else:
                yield f"{_scalar(key)}: {_scalar(under)}"
        return
    for item in value:
        first, *rest = _lines(item) if _is_block(item) else [_scalar(item)]
        yield f"- {first}"
        yield from (f"  {line}" for line in rest)


def _is_block(value: Any) -> bool:
    return isinstance(value, (Mapping, Sequence)) and not isinstance(value, str) and len(value) > 0


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in quoted)
