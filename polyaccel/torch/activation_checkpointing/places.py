"""What holds the state of a region's functions and modules: attributes, buffers, containers, arrays, variables, and
random generators."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

LegacyGenerator = np.random.RandomState
STRUCTURE = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes that make up a module, and are not state of a forward pass."""


class Place:
    """Something that holds values under names or in an order: `saved` are those of its first run."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.saved = self.contents()

    def contents(self) -> Any:
        """What it holds now; what it holds later does not change this."""
        raise NotImplementedError

    def put(self, contents: Any, instead: Mapping[int, Any]) -> None:
        """Make it hold `contents`, with `instead` of the value of each id that is a key there."""
        raise NotImplementedError

    @property
    def is_changed(self) -> bool:
        """Whether it holds anything else than what was saved."""
        return not _is_same(self.saved, self.contents())


def _is_same(old: Any, new: Any) -> bool:
    """Whether two contents are the same objects or plain values."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(_is_same(value, new[name]) for name, value in old.items())
    if isinstance(old, (list, tuple)):
        return len(old) == len(new) and all(map(_is_same, old, new))
    if isinstance(old, (np.ndarray, torch.Tensor)):
        return old.shape == new.shape and bool((old == new).all())
    return isinstance(old, (bool, int, float, complex, str, bytes, set)) and old == new


class Attributes(Place):
    """The attributes of modules or of another object, by each `__dict__`. Those that make up a module stay."""

    def __init__(self, *holders: dict[str, Any]) -> None:
        super().__init__(holders)

    def contents(self) -> list[dict[str, Any]]:
        return list(map(dict, self.holder))

    def put(self, contents: Sequence[dict[str, Any]], instead: Mapping[int, Any]) -> None:
        for holder, wanted in zip(self.holder, contents, strict=True):
            if not _holds(holder, wanted) or (instead and not instead.keys().isdisjoint(map(id, wanted.values()))):
                _put_attributes(holder, wanted, instead)


def _holds(holder: dict[str, Any], contents: dict[str, Any]) -> bool:
    """Whether all values are these very objects: nearly always, so without a loop of Python's."""
    return [*holder] == [*contents] and all(map(is_, holder.values(), contents.values()))


def _put_attributes(holder: dict[str, Any], contents: dict[str, Any], instead: Mapping[int, Any]) -> None:
    for name in [name for name in holder if name not in contents and name not in STRUCTURE]:
        del holder[name]
    for name, value in contents.items():
        wanted = instead.get(id(value), value)
        if name not in STRUCTURE and (name not in holder or holder[name] is not wanted):
            holder[name] = wanted


class Entries(Place):
    """A dict: the buffers of a module, or one of the user's."""

    def contents(self) -> dict[Any, Any]:
        return dict(self.holder)

    def put(self, contents: dict[Any, Any], instead: Mapping[int, Any]) -> None:
        holder = self.holder
        if list(holder) != list(contents):
            holder.clear()
        for name, value in contents.items():
            wanted = instead.get(id(value), value)
            if name not in holder or holder[name] is not wanted:
                holder[name] = wanted


class Elements(Place):
    """A list or deque."""

    def contents(self) -> list[Any]:
        return list(self.holder)

    def put(self, contents: list[Any], instead: Mapping[int, Any]) -> None:
        self.holder.clear()
        self.holder.extend([instead.get(id(value), value) for value in contents])


class Tail(Place):
    """A long list: what is appended to it."""

    def __init__(self, holder: list[Any]) -> None:
        self._length = len(holder)
        super().__init__(holder)

    def contents(self) -> list[Any]:
        return list(self.holder[self._length :])

    def put(self, contents: list[Any], instead: Mapping[int, Any]) -> None:
        self.holder[self._length :] = contents


class Members(Place):
    """A set."""

    def contents(self) -> set[Any]:
        return set(self.holder)

    def put(self, contents: set[Any], instead: Mapping[int, Any]) -> None:
        self.holder.clear()
        self.holder.update(contents)


class Array(Place):
    """An array of numpy."""

    def contents(self) -> Any:
        return self.holder.copy()

    def put(self, contents: Any, instead: Mapping[int, Any]) -> None:
        self.holder[...] = contents


class Variable(Place):
    """A variable of an enclosing function."""

    def contents(self) -> list[Any]:
        try:
            return [self.holder.cell_contents]
        except ValueError:  # not set yet
            return []

    def put(self, contents: list[Any], instead: Mapping[int, Any]) -> None:
        if contents:
            self.holder.cell_contents = instead.get(id(contents[0]), contents[0])
        elif self.contents():
            del self.holder.cell_contents


class Globals(Place):
    """Some variables of a Python module."""

    def __init__(self, holder: dict[str, Any], names: Iterable[str]) -> None:
        self._names = tuple(names)
        super().__init__(holder)

    def contents(self) -> dict[str, Any]:
        return {name: self.holder[name] for name in self._names if name in self.holder}

    def put(self, contents: dict[str, Any], instead: Mapping[int, Any]) -> None:
        for name in self._names:
            if name in contents:
                self.holder[name] = instead.get(id(contents[name]), contents[name])
            else:
                self.holder.pop(name, None)


class Generator(Place):
    """A random generator of torch, Python or numpy."""

    def contents(self) -> Any:
        holder = self.holder
        if isinstance(holder, torch.Generator):
            return holder.get_state()
        if isinstance(holder, random.Random):
            return holder.getstate()
        return holder.get_state(legacy=False) if isinstance(holder, LegacyGenerator) else holder.bit_generator.state

    def put(self, contents: Any, instead: Mapping[int, Any]) -> None:
        holder = self.holder
        if isinstance(holder, torch.Generator):
            holder.set_state(contents)
        elif isinstance(holder, random.Random):
            holder.setstate(contents)
        elif isinstance(holder, LegacyGenerator):
            holder.set_state(contents)
        else:
            holder.bit_generator.state = contents
