"""Lossless JSON encoding of plain Python values, for object collectives and checkpoint metadata.

None, bool, int, float, str, list, tuple, bytes and dict with str keys come back equal and of the same type. A
value that JSON does not have is written as an object with a single key that starts with `$`: `{"$tuple": [1, 2]}`,
`{"$float": "nan"}`, `{"$bytes": "AAE="}` (base64), `{"$int": "0x10000000000000000"}` beyond 64 bits, and
`{"$dict": [[key, value], ...]}` for a dict in which a key starts with `$` itself. Reading these bytes makes these types
and nothing else: no class is looked up and no code is run, as a pickle's reader would.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from polyaccel.errors import PolyaccelError

MAX_DEPTH = 200
"""Containers inside containers. Deeper values are refused, among them those that contain themselves."""
_MARK = "$"
_NOT_FINITE = ("nan", "inf", "-inf")


class SerializationError(PolyaccelError, ValueError):
    """A value that is not plain, or bytes that are not a plain value."""


def encode(value: Any, where: str) -> Any:
    """Encode plain values as a JSON tree for `decode`; errors name it `where`. Subclasses are refused."""
    return _encode(value, where, 0)


def is_serializable(value: Any) -> bool:
    """Whether `encode` takes `value`."""
    try:
        encode(value, "")
    except SerializationError:
        return False
    return True


def bytes_in(value: Any, where: str) -> str:
    """The dotted name of the first bytes in `value`, which is called `where`; empty where there are none."""
    if isinstance(value, (bytes, bytearray)):
        return where
    items: Any = ()
    if isinstance(value, Mapping):
        items = ((f"{where}.{key}", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = ((f"{where}[{index}]", item) for index, item in enumerate(value))
    try:
        return next(filter(None, (bytes_in(item, name) for name, item in items)), "")
    except RecursionError:  # it contains itself, which saving refuses
        return ""


def decode(tree: Any) -> Any:
    """The inverse of `encode`. Raises SerializationError for a tree that `encode` does not make."""
    return _decode(tree, 0)


def to_bytes(value: Any, where: str) -> bytes:
    """`value` as one line of ASCII. Raises SerializationError as `encode` does."""
    return json.dumps(encode(value, where), separators=(",", ":"), allow_nan=False).encode("ascii")


def from_bytes(data: bytes) -> Any:
    """The inverse of `to_bytes`. Raises SerializationError for any other bytes."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SerializationError(
            f"{len(data)} bytes that are not a plain value: {str(error)[:200]}", value=bytes(data[:32])
        ) from error
    return decode(tree)


def _encode(value: Any, where: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise SerializationError(
            f"{where[:60]}... is nested deeper than {MAX_DEPTH} levels, or contains itself", hint="give a flatter value"
        )
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return (
            value if value.bit_length() <= 64 else {"$int": hex(value)}
        )  # str() of huge ints is limited, hex() is not
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if kind in (list, tuple):
        items = [_encode(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is dict:
        return _encode_dict(value, where, depth)
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise SerializationError(
        f"{where} is a {name}, which is not a plain value",
        hint="convert it to None, bool, int, float, str, bytes, list, tuple or dict first "
        "(a one-element tensor or numpy value: .item(), a larger one: .tolist())",
        value=name,
    )


def _encode_dict(value: dict[Any, Any], where: str, depth: int) -> Any:
    for key in value:
        if type(key) is not str:
            raise SerializationError(
                f"{where} has the key {key!r} of type {type(key).__qualname__}",
                hint="keys must be str: use str(key)",
                value=key,
            )
    items = {key: _encode(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    return {"$dict": [list(pair) for pair in items.items()]} if any(map(_is_mark, items)) else items


def _decode(tree: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise SerializationError(f"a value nested deeper than {MAX_DEPTH} levels")
    if isinstance(tree, list):
        return [_decode(item, depth + 1) for item in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        raise SerializationError(f"a value {tree} where only finite numbers stand", value=tree)
    if not isinstance(tree, dict):
        return tree
    marks = [key for key in tree if _is_mark(key)]
    if not marks:
        return {key: _decode(item, depth + 1) for key, item in tree.items()}
    mark, content = marks[0], tree[marks[0]]
    decode = _MARKED.get(mark)
    if decode is None or len(tree) != 1:
        raise SerializationError(
            f"a value marked {mark!r:.60}, which this version does not support",
            hint="read it with the version of polyaccel that wrote it, or a later one",
            value=mark,
        )
    try:
        return decode(content, depth + 1)
    except SerializationError:
        raise
    except (ValueError, TypeError) as error:
        raise SerializationError(
            f"a value marked {mark!r} that cannot be understood: {str(error)[:200]}", value=mark
        ) from error


def _decode_tuple(content: Any, depth: int) -> tuple[Any, ...]:
    return tuple(_decode(item, depth) for item in _list(content))


def _decode_float(content: Any, depth: int) -> float:
    if content not in _NOT_FINITE:
        raise ValueError(f"{content!r:.40} is not one of {', '.join(_NOT_FINITE)}")
    return float(content)


def _decode_bytes(content: Any, depth: int) -> bytes:
    return base64.b64decode(content, validate=True)


def _decode_int(content: Any, depth: int) -> int:
    return int(content, 16)


def _decode_dict(content: Any, depth: int) -> dict[str, Any]:
    pairs = [_list(pair) for pair in _list(content)]
    if any(len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        raise ValueError("its items are not pairs of a text and a value")
    return {key: _decode(item, depth) for key, item in pairs}


_MARKED: Mapping[str, Callable[[Any, int], Any]] = {
    "$tuple": _decode_tuple,
    "$float": _decode_float,
    "$bytes": _decode_bytes,
    "$int": _decode_int,
    "$dict": _decode_dict,
}


def _list(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError(f"it holds a {type(content).__name__}, not a list")
    return content


def _is_mark(key: str) -> bool:
    return key.startswith(_MARK)
