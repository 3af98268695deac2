"""Inputs that no writer of ours makes: JSON with some of its nodes replaced, removed, doubled or exchanged, and bytes
with some of them changed.

A mutation draws from a `random.Random`, which hypothesis provides too; so the same code serves a few examples in
`make test` and hundreds of thousands in `make test-fuzz`.
"""

from __future__ import annotations

import os
from copy import deepcopy
from random import Random
from typing import Any

COUNT = int(os.environ.get("TESTS_FUZZ", "2000"))
"""Inputs for the quickest parsers; slower ones get a part of it."""
SHARD = int(os.environ.get("TESTS_FUZZ_SHARD", "0"))
"""Shards have other inputs."""


def random_of(test: int) -> Random:
    """The generator of a test's inputs in this shard."""
    return Random(1000 * SHARD + test)


_STRANGERS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 10**40, 0.5, -0.0, 1e308, "", "0", "a", "../x", "\0"),
    *(
        [],
        {},
        [0],
        [[]],
        {"$tuple": [1]},
        {"$float": "nan"},
        {"$int": "0x1"},
        {"$what": 1},
        "rank00000.safetensors",
        "float32",
    ),
)


def forged(tree: Any, random: Random, most: int = 3) -> Any:
    """A copy of a JSON value with one to `most` of its nodes changed."""
    copy = deepcopy(tree)
    for _ in range(random.randint(1, most)):
        places = list(_places(copy))
        if not places:
            return random.choice(_STRANGERS)
        _change(*random.choice(places), places, random)
    return copy


def garbled(data: bytes, random: Random) -> bytes:
    """`data` with bytes changed, cut out, doubled, or cut off."""
    start, stop = sorted(random.randint(0, len(data)) for _ in range(2))
    match random.randint(0, 4):
        case 0:
            return data[:start]
        case 1:
            return data[:start] + data[stop:]
        case 2:
            return data[:stop] + data[start:]
        case 3:
            return data[:start] + random.randbytes(random.randint(1, 9)) + data[start:]
    flipped = bytearray(data or b"\0")
    for _ in range(random.randint(1, 4)):
        flipped[random.randrange(len(flipped))] ^= 1 << random.randint(0, 7)
    return bytes(flipped)


def _places(tree: Any) -> Any:
    """Every (container, key or index) in a JSON value."""
    if isinstance(tree, (dict, list)):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key])


def _change(holder: Any, key: Any, places: list[tuple[Any, Any]], random: Random) -> None:
    value = holder[key]
    match random.randint(0, 6):
        case 0:
            del holder[key]
        case 1:
            other, other_key = random.choice(places)
            holder[key] = deepcopy(other[other_key])
        case 2 if isinstance(holder, list):
            holder.insert(random.randint(0, len(holder)), deepcopy(value))
        case 3 if isinstance(value, int) and not isinstance(value, bool):
            holder[key] = value + random.choice((-64, -4, -1, 1, 4, 64))
        case 4 if isinstance(holder, list):
            random.shuffle(holder)
        case 5 if isinstance(holder, dict):
            holder[random.choice(("format", "x", "$tuple", ""))] = holder.pop(key)
        case _:
            holder[key] = deepcopy(random.choice(_STRANGERS))
