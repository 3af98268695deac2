"""Where the functions and modules of a region keep state: attributes, buffers, containers, variables of enclosing
functions, and random generators."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from io import IOBase
from operator import is_
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

STRUCTURE = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes that make up a module, and are no state of a forward pass."""
LONGEST = 1000
"""Of a longer list the end is restored; other containers with more entries are left alone."""
LARGEST_ARRAY = 1 << 20
"""Bytes of the largest array of numpy that is restored."""
_LIBRARIES = frozenset({"torch", "numpy", "polyaccel", "transformers", "jax"}) | sys.stdlib_module_names
"""Objects of their classes are not looked into."""


class Place:
    """Something that holds values under names or in an order: `saved` are those of its first run."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.saved = self.contents()

    def contents(self) -> Any:
        """What it holds now; what it holds later does not change this."""
        raise NotImplementedError

    def put(self, contents: Any, instead: Mapping[int, Tensor]) -> None:
        """Make it hold `contents`, but for each tensor whose id is a key of `instead` the one there."""
        raise NotImplementedError


class Attributes(Place):
    """The attributes of a module or of another object, by its `__dict__`. Those that make up a module stay."""

    def contents(self) -> dict[str, Any]:
        return dict(self.holder)

    def put(self, contents: dict[str, Any], instead: Mapping[int, Tensor]) -> None:
        holder = self.holder
        if self._holds(contents) and (not instead or instead.keys().isdisjoint(map(id, contents.values()))):
            return
        for name in [name for name in holder if name not in contents and name not in STRUCTURE]:
            del holder[name]
        for name, value in contents.items():
            wanted = instead.get(id(value), value)
            if name not in STRUCTURE and (name not in holder or holder[name] is not wanted):
                holder[name] = wanted

    def _holds(self, contents: dict[str, Any]) -> bool:
        """Whether all values are these very objects: nearly always, so without a loop of Python's."""
        holder = self.holder
        return holder.keys() == contents.keys() and all(map(is_, holder.values(), contents.values()))


class Entries(Place):
    """A dict: the buffers of a module, or one of the user's."""

    def contents(self) -> dict[Any, Any]:
        return dict(self.holder)

    def put(self, contents: dict[Any, Any], instead: Mapping[int, Tensor]) -> None:
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

    def put(self, contents: list[Any], instead: Mapping[int, Tensor]) -> None:
        self.holder.clear()
        self.holder.extend([instead.get(id(value), value) for value in contents])


class Tail(Place):
    """A long list: what is appended to it."""

    def __init__(self, holder: list[Any]) -> None:
        self._length = len(holder)
        super().__init__(holder)

    def contents(self) -> list[Any]:
        return list(self.holder[self._length :])

    def put(self, contents: list[Any], instead: Mapping[int, Tensor]) -> None:
        self.holder[self._length :] = contents


class Members(Place):
    """A set."""

    def contents(self) -> set[Any]:
        return set(self.holder)

    def put(self, contents: set[Any], instead: Mapping[int, Tensor]) -> None:
        self.holder.clear()
        self.holder.update(contents)


class Array(Place):
    """An array of numpy."""

    def contents(self) -> Any:
        return self.holder.copy()

    def put(self, contents: Any, instead: Mapping[int, Tensor]) -> None:
        self.holder[...] = contents


class Variable(Place):
    """A variable of an enclosing function."""

    def contents(self) -> list[Any]:
        try:
            return [self.holder.cell_contents]
        except ValueError:  # not set yet
            return []

    def put(self, contents: list[Any], instead: Mapping[int, Tensor]) -> None:
        if contents:
            self.holder.cell_contents = instead.get(id(contents[0]), contents[0])
        elif self.contents():
            del self.holder.cell_contents


class Generator(Place):
    """A random generator of torch, Python or numpy."""

    def contents(self) -> Any:
        holder = self.holder
        if isinstance(holder, torch.Generator):
            return holder.get_state()
        if isinstance(holder, random.Random):
            return holder.getstate()
        return holder.get_state(legacy=False) if isinstance(holder, _Legacy) else holder.bit_generator.state

    def put(self, contents: Any, instead: Mapping[int, Tensor]) -> None:
        holder = self.holder
        if isinstance(holder, torch.Generator):
            holder.set_state(contents)
        elif isinstance(holder, random.Random):
            holder.setstate(contents)
        elif isinstance(holder, _Legacy):
            holder.set_state(contents)
        else:
            holder.bit_generator.state = contents


_Legacy = np.random.RandomState
_KINDS: tuple[tuple[Any, Any], ...] = (
    ((int, float, complex, str, bytes, type, nn.Parameter, np.generic, random.SystemRandom, FunctionType), None),
    (Tensor, Tensor),
    (nn.Module, nn.Module),
    (dict, Entries),
    ((list, deque), Elements),
    (set, Members),
    (tuple, tuple),
    (np.ndarray, Array),
    ((torch.Generator, random.Random, np.random.Generator, _Legacy), Generator),
    (IOBase, None),
    (Iterator, Iterator),
    (SimpleNamespace, object),
)


_known: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _kind(of: Any) -> Any:
    """How values of the type `of` are looked into: None for those without state."""
    if of not in _known:
        library, is_open = of.__module__.partition(".")[0], bool(of.__dictoffset__)
        other = object if is_open and library not in _LIBRARIES else None
        _known[of] = next((kind for types, kind in _KINDS if issubclass(of, types)), other)
    return _known[of]


class StatePlaces:
    """The places that functions and their arguments lead to: the modules among them and their parts, what methods are
    bound to, variables of enclosing functions, containers, and objects that modules hold."""

    def __init__(self) -> None:
        self.found: list[Place] = []
        self.tensors: list[tuple[Tensor, nn.Module | None, str]] = []
        """With the module that holds one directly, and the name."""
        self.unknown: list[tuple[nn.Module | None, str, str]] = []
        """What cannot be restored: the module that holds it, its name and its type."""
        self.parameters: list[tuple[Tensor, nn.Module, str]] = []
        self._seen: set[int] = set()
        self._root: nn.Module | None = None

    def follow(self, value: Any) -> None:
        """Add what a function, an argument or a variable leads to."""
        if isinstance(value, nn.Module):
            self._root = self._root or value
            self._follow_module(value)
        elif isinstance(value, MethodType):
            self.follow(value.__self__)
            self.follow(value.__func__)
        elif isinstance(value, partial):
            self._follow_all((value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, FunctionType):
            if self._is_new(value):
                for cell in value.__closure__ or ():
                    self._follow_variable(cell)
                self._follow_all(value.__defaults__ or ())
                self._follow_all((value.__kwdefaults__ or {}).values())
                self._follow_all(_globals_of(value))
        elif _kind(type(value)) is object and id(value) not in self._seen:
            self._hold(value, None, "")
            self._follow_all(part for part in vars(value).values() if isinstance(part, _CALLABLE))
        elif not isinstance(value, Tensor):  # one that a function is given is the region's input
            self._hold(value, None, "")
            if isinstance(value, (tuple, list)) and len(value) <= LONGEST:
                self._follow_all(value)

    def _follow_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if _kind(type(value)) is not Tensor:
                self.follow(value)

    def _follow_variable(self, cell: CellType) -> None:
        if self._is_new(cell):
            place = Variable(cell)
            self.found.append(place)
            for value in place.saved:
                if isinstance(value, Tensor):
                    self._hold(value, None, "")
                else:
                    self.follow(value)

    def _follow_module(self, module: nn.Module) -> None:
        waiting = [module]
        while waiting:
            module = waiting.pop()
            if not self._is_new(module):
                continue
            attributes = module.__dict__
            if attributes["_buffers"]:
                buffers = Entries(attributes["_buffers"])
                self.found.append(buffers)
                for name, value in buffers.saved.items():
                    self._hold(value, module, name)
            place = Attributes(attributes)
            self.found.append(place)
            for name, value in place.saved.items() if _may_have_state(attributes) else ():
                if name not in STRUCTURE:
                    self._hold(value, module, name)
            for name, parameter in attributes["_parameters"].items():
                if parameter is not None:
                    self.parameters.append((parameter, module, name))
            for generator in _globals_of_class(type(module)):
                self._hold(generator, None, "")
            waiting.extend(part for part in attributes["_modules"].values() if part is not None)

    def _hold(self, value: Any, module: nn.Module | None, name: str) -> None:
        """Add what a module (None: something else) holds as `name`."""
        kind = _kind(type(value))
        if kind is None:
            _STATELESS.add(type(value))
            return
        if kind is nn.Module:
            if self._root is None or not _is_around(value, self._root):
                self._follow_module(value)
        elif not self._is_new(value):
            return
        elif kind is Tensor:
            self.tensors.append((value, module, name))
        elif kind is tuple:
            self._hold_all(part for part in value if not isinstance(part, Tensor))  # they cannot be replaced in it
        elif kind is Iterator:
            self.unknown.append((module, name, type(value).__name__))
        elif kind is object:
            self._place(Attributes(value.__dict__))
        elif kind is Array:
            if value.flags.writeable and value.nbytes <= LARGEST_ARRAY:
                self.found.append(Array(value))
        elif kind is Generator:
            self.found.append(Generator(value))
        elif len(value) <= LONGEST:
            self._place(kind(value))
        elif isinstance(value, list):
            self.found.append(Tail(value))

    def _place(self, place: Place) -> None:
        self.found.append(place)
        self._hold_all(place.saved.values() if isinstance(place.saved, dict) else place.saved)

    def _hold_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._hold(value, None, "")

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        return True


def _may_have_state(attributes: dict[str, Any]) -> bool:
    """Whether a module has attributes beside those of each module, and not only numbers and the like."""
    names = tuple(attributes)
    if names[: len(_ORDER)] != _ORDER:
        return True
    return not _STATELESS.issuperset(map(type, tuple(attributes.values())[len(_ORDER) :]))


_ORDER = tuple(nn.Module().__dict__)
_STATELESS: set[type] = set()
"""Types of kind None, as they were met."""
_CALLABLE = (nn.Module, MethodType, FunctionType, partial)
_AROUND: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, bool]] = WeakKeyDictionary()


def _is_around(module: nn.Module, root: nn.Module) -> bool:
    """Whether `root` is a part of `module`: parts often know the model that they are in."""
    known = _AROUND.setdefault(root, WeakKeyDictionary())
    if module not in known:
        known[module] = any(part is root for part in module.modules())
    return known[module]


_of_classes: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()


def _globals_of_class(kind: Any) -> tuple[Any, ...]:
    """The generators of their Python modules that the methods of a class of modules use by name."""
    if kind not in _of_classes:
        _of_classes[kind] = _globals_of_methods(kind)
    return _of_classes[kind]


def _globals_of_methods(kind: Any) -> tuple[Any, ...]:
    bases = (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in _LIBRARIES)
    methods = (method for base in bases for method in vars(base).values() if isinstance(method, FunctionType))
    used = (value for method in methods for value in _globals_of(method) if not isinstance(value, nn.Module))
    return tuple({id(value): value for value in used}.values())


def _globals_of(function: FunctionType) -> list[Any]:
    """The generators and modules of its Python module that a function uses by name."""
    known = function.__globals__
    found = (known.get(name) for name in function.__code__.co_names)
    return [value for value in found if value is not None and _kind(type(value)) in (Generator, nn.Module)]
