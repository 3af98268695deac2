"""The walk from a region's functions and arguments to the places that hold their state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor, nn

from polyaccel.torch.activation_checkpointing.globals_of import bound_by, names_used, of_class, of_function, values_used
from polyaccel.torch.activation_checkpointing.kinds import STATELESS, kind_of
from polyaccel.torch.activation_checkpointing.places import (
    Array,
    Attributes,
    Entries,
    Generator,
    Globals,
    Place,
    Tail,
    Variable,
)
from polyaccel.torch.activation_checkpointing.plans import ModulePlan, ModulePlans

LONGEST = 1000
"""Of a longer list the end is restored; other containers with more entries are left alone."""
LARGEST_ARRAY = 1 << 20
"""Bytes of the largest array of numpy that is copied before each first run."""

Owner = nn.Module | CodeType | None
"""What holds a value by a name: a module, or the code of a function. None: something else."""


class StatePlaces:
    """The places that functions and their arguments lead to: the modules among them and their parts, what methods are
    bound to, variables of enclosing functions and of Python modules, containers, and objects that modules hold."""

    def __init__(self, plans: ModulePlans | None = None) -> None:
        self.tensors: list[tuple[Tensor, Owner, str]] = []
        """With what holds one, and the name."""
        self.arrays: list[tuple[Any, Owner, str]] = []
        """Large arrays of numpy."""
        self.tuples: list[tuple[Any, ...]] = []
        """Tuples with tensors, the inner ones first."""
        self.unknown: list[tuple[Owner, str, str]] = []
        """What cannot be restored: what holds it, its name and its type."""
        self.modules: list[nn.Module] = []
        self.parameters: list[Tensor] = []
        """Those of `modules`."""
        self._plans = plans
        self._others: list[Place] = []
        self._attributes: list[dict[str, Any]] = []
        self._seen: set[int] = set()
        self._root: nn.Module | None = None

    def found(self) -> list[Place]:
        """The places, with what they hold now or held at the last walk, where that is the same."""
        return [Attributes(*self._attributes), *self._others] if self._attributes else self._others

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
                self._follow_function(value)
        elif isinstance(value, tuple):
            if len(value) <= LONGEST:
                self._follow_all(value)
        elif kind_of(type(value)) is object and id(value) not in self._seen:
            self._hold(value, None, "")
            self._follow_all(part for part in vars(value).values() if isinstance(part, _CALLABLE))
        elif not isinstance(value, Tensor):  # one that a function is given is the region's input
            self._hold(value, None, "")
            if isinstance(value, list) and len(value) <= LONGEST:
                self._follow_all(value)

    def _follow_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if kind_of(type(value)) is not Tensor:
                self.follow(value)

    def _follow_function(self, function: FunctionType) -> None:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if self._is_new(cell):
                self._follow_variable(cell, code, name)
        self._follow_all(function.__defaults__ or ())
        self._follow_all((function.__kwdefaults__ or {}).values())
        for each in of_function(function):
            self._follow_globals(each)
            self._follow_all(values_used(each, Generator, nn.Module))

    def _follow_globals(self, function: FunctionType) -> None:
        """Add the variables of its Python module that a function binds, and the tensors and arrays that it uses."""
        known, code = function.__globals__, function.__code__
        names = dict.fromkeys((*bound_by(function), *names_used(function, Tensor)))
        if names:
            place = Globals(known, names)
            self._others.append(place)
            for name, value in place.saved.items():
                self._hold(value, code, name)
        for name in names_used(function, Array):
            self._hold(known[name], code, name)

    def _follow_variable(self, cell: CellType, code: CodeType, name: str) -> None:
        place = Variable(cell)
        self._others.append(place)
        for value in place.saved:
            if isinstance(value, (Tensor, tuple, np.ndarray)):
                self._hold(value, code, name)
            if not isinstance(value, Tensor):
                self.follow(value)

    def _follow_module(self, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        is_first = not self.modules
        plan = self._plans.get(module) if is_first and self._plans is not None else None
        if plan is None:
            plan = ModulePlan(self._parts_of(module))
        self.modules += plan.parts
        self.parameters += plan.parameters
        self._seen.update(plan.ids)
        self._others.append(plan.attributes)
        for part, buffers in plan.buffers:
            self._others.append(buffers)
            for name, value in buffers.saved.items():
                self._hold(value, part, name)
        for value, part, name in plan.held:
            self._hold(value, part, name)
        for kind in plan.kinds:
            self._follow_class(kind)
        if is_first and self._plans is not None:
            self._plans.keep(module, plan)

    def _parts_of(self, module: nn.Module) -> list[nn.Module]:
        """The module and its parts that are new."""
        waiting: list[nn.Module | None] = [module]
        found: dict[int, nn.Module] = {}
        while waiting:
            part = waiting.pop()
            if part is not None and id(part) not in self._seen and id(part) not in found:
                found[id(part)] = part
                if part._modules:
                    waiting.extend(part._modules.values())
        return list(found.values())

    def _follow_class(self, kind: Any) -> None:
        """Add the generators that the methods of a class of modules use by name, and the variables that they bind."""
        for function in of_class(kind):
            if self._is_new(function.__code__):
                self._follow_globals(function)
                for generator in values_used(function, Generator):
                    self._hold(generator, None, "")

    def _hold(self, value: Any, owner: Owner, name: str) -> None:
        """Add what `owner` holds as `name`."""
        kind = kind_of(type(value))
        if kind is None:
            STATELESS.add(type(value))
            return
        if kind is nn.Module:
            if self._root is None or not _is_around(value, self._root):
                self._follow_module(value)
        elif not self._is_new(value):
            return
        elif kind is Tensor:
            self.tensors.append((value, owner, name))
        elif kind is tuple:
            self._hold_all(enumerate(value), owner, name)
            if any(isinstance(part, (Tensor, tuple)) for part in value):
                self.tuples.append(value)
        elif kind is Iterator:
            self.unknown.append((owner, name, type(value).__name__))
        elif kind is object:
            attributes = value.__dict__
            self._attributes.append(attributes)
            self._hold_all(list(attributes.items()), owner, name)
        elif kind is Array:
            if value.flags.writeable and value.nbytes <= LARGEST_ARRAY:
                self._others.append(Array(value))
            elif value.flags.writeable:
                self.arrays.append((value, owner, name))
        elif kind is Generator:
            self._others.append(Generator(value))
        elif len(value) <= LONGEST:
            place = kind(value)
            self._others.append(place)
            self._hold_all(place.saved.items() if kind is Entries else enumerate(place.saved), owner, name)
        elif isinstance(value, list):
            self._others.append(Tail(value))

    def _hold_all(self, values: Iterable[tuple[Any, Any]], owner: Owner, name: str) -> None:
        for at, value in values:
            if type(value) not in STATELESS:
                self._hold(value, owner, f"{name}[{at}]" if type(at) in (int, str) else name)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        return True


_CALLABLE = (nn.Module, MethodType, FunctionType, partial)
_AROUND: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, bool]] = WeakKeyDictionary()


def _is_around(module: nn.Module, root: nn.Module) -> bool:
    """Whether `root` is a part of `module`: parts often refer to the model that they are in."""
    known = _AROUND.setdefault(root, WeakKeyDictionary())
    if module not in known:
        known[module] = any(part is root for part in module.modules())
    return known[module]
