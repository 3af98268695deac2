"""The kinds of values that functions and modules hold, by what is done to restore them."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from io import IOBase
from itertools import islice
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from polyaccel.torch.activation_checkpointing.places import (
    Array,
    Elements,
    Entries,
    Generator,
    LegacyGenerator,
    Members,
)

LIBRARIES = frozenset({"torch", "numpy", "polyaccel", "transformers", "jax"}) | sys.stdlib_module_names
"""Objects of their classes are not looked into, nor are their functions."""


def is_of_library(module: Any) -> bool:
    """Whether a Python module's name is that of a library."""
    return isinstance(module, str) and module.partition(".")[0] in LIBRARIES


_KINDS: tuple[tuple[Any, Any], ...] = (
    ((int, float, complex, str, bytes, type, nn.Parameter, np.generic, random.SystemRandom, FunctionType), None),
    (Tensor, Tensor),
    (nn.Module, nn.Module),
    (dict, Entries),
    ((list, deque), Elements),
    (set, Members),
    (tuple, tuple),
    (np.ndarray, Array),
    ((torch.Generator, random.Random, np.random.Generator, LegacyGenerator), Generator),
    (IOBase, None),
    (Iterator, Iterator),
    (SimpleNamespace, object),
)


_known: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def kind_of(of: Any) -> Any:
    """How values of the type `of` are looked into: None for those without state."""
    if of not in _known:
        other = object if of.__dictoffset__ and not is_of_library(of.__module__) else None
        _known[of] = next((kind for types, kind in _KINDS if issubclass(of, types)), other)
    return _known[of]


STATELESS: set[type] = set()
"""Types of kind None, as they were found."""
ORDER = tuple(nn.Module().__dict__)
LENGTH = len(ORDER)
"""Of the attributes that each module has, in their order."""


def may_have_state(attributes: dict[str, Any]) -> bool:
    """Whether a module has attributes of its class that may hold state."""
    if tuple(islice(attributes, LENGTH)) != ORDER:
        return True
    return not STATELESS.issuperset(map(type, islice(attributes.values(), LENGTH, None)))
