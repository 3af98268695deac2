"""Plain Python values as JSON, exactly: counters, hyperparameters, and the user's client state.

None, bool, int, float, str, list, tuple, bytes and dict with str keys come back equal and of the same type. A
value that JSON does not have is written as an object with a single key that starts with `$`: `{"$tuple": [1, 2]}`,
`{"$float": "nan"}`, `{"$bytes": "AAE="}` (base64), `{"$int": "0x10000000000000000"}` beyond 64 bits, and
`{"$dict": [[key, value], ...]}` for a dict in which a key starts with `$` itself.
"""

from __future__ import annotations

import base64
import math
from typing import Any

from polyaccel.errors import CheckpointError

MAX_DEPTH = 200
"""Containers inside containers. Deeper values are refused, among them those that contain themselves."""


def encode_plain(value: Any, where: str) -> Any:
    """`value` as a tree that `json` writes and `decode_plain` takes back.

    `where` is the dotted name of `value` in messages. Raises CheckpointError, naming the dotted key and the type, for
    anything but plain values. Subclasses (numpy's floats, enums, named tuples) are refused, because they would come
    back as another type.
    """
    return _encode(value, where, 0)


def decode_plain(tree: Any) -> Any:
    """The inverse of `encode_plain`. Raises CheckpointError for a tree that it does not give, or a mark that this
    version does not know."""
    try:
        return _decode(tree)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"the manifest holds a value that cannot be understood: {type(error).__name__}: {str(error)[:200]}",
            cure="load another tag",
        ) from error


def _decode(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_decode(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    mark = next(iter(tree), "")
    if not mark.startswith("$"):
        return {key: _decode(item) for key, item in tree.items()}
    match mark, list(tree.values()):
        case "$tuple", [list(items)]:
            return tuple(_decode(item) for item in items)
        case "$float", [str(text)]:
            return float(text)
        case "$bytes", [str(text)]:
            return base64.b64decode(text, validate=True)
        case "$int", [str(text)]:
            return int(text, 16)
        case "$dict", [list(pairs)]:
            found = {key: _decode(item) for key, item in pairs}
            if all(isinstance(key, str) for key in found):
                return found
    raise CheckpointError(
        f"the manifest holds a value marked {mark!r:.60}, which this version does not know",
        cure="load it with the version of polyaccel that wrote it, or a later one",
        value=mark,
    )


def _encode(value: Any, where: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CheckpointError(
            f"{where[:60]}... is nested deeper than {MAX_DEPTH} levels, or contains itself",
            cure="save a flatter value",
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
    raise CheckpointError(
        f"{where} is a {name}, which a checkpoint cannot hold",
        cure="convert it to None, bool, int, float, str, bytes, list, tuple or dict first "
        "(a one-element tensor or numpy value: .item(), a larger one: .tolist())",
        value=name,
    )


def _encode_dict(value: dict[Any, Any], where: str, depth: int) -> Any:
    for key in value:
        if type(key) is not str:
            raise CheckpointError(
                f"{where} has the key {key!r} of type {type(key).__qualname__}",
                cure="keys must be str: use str(key)",
                value=key,
            )
    items = {key: _encode(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    return {"$dict": [list(pair) for pair in items.items()]} if any(key.startswith("$") for key in items) else items
