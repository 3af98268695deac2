"""The variables of Python modules that functions use by name, and the functions that they call by name."""

from __future__ import annotations

from dis import get_instructions
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from polyaccel.torch.activation_checkpointing.kinds import is_of_library, kind_of
from polyaccel.torch.activation_checkpointing.places import Array, Generator

_MOST = 64
"""So many functions are followed from one."""


class _Reach(NamedTuple):
    binds: tuple[str, ...]
    """The variables of its Python module that the function binds."""
    helpers: tuple[ref[FunctionType], ...]
    """The functions that it reaches by the names of variables."""


def reached_by(function: FunctionType) -> list[FunctionType]:
    """`function`, and the functions of no library that it reaches by the names of variables."""
    return [function, *(helper for each in _reach(function).helpers if (helper := each()) is not None)]


def bound_by(function: FunctionType) -> tuple[str, ...]:
    """The names that `function` itself binds by `global`."""
    return _reach(function).binds


def _reach(function: FunctionType) -> _Reach:
    code = function.__code__
    known = _REACHES.get(code)
    if known is None:
        known = _NOTHING if is_of_library(function.__module__) else _Reach(_binds(code), _helpers_of(function))
        _REACHES[code] = known
    return known


def _helpers_of(function: FunctionType) -> tuple[ref[FunctionType], ...]:
    found: dict[int, FunctionType] = {id(function): function}
    waiting = [function]
    while waiting:
        each = waiting.pop()
        for name in each.__code__.co_names:
            value = each.__globals__.get(name)
            if not isinstance(value, FunctionType) or id(value) in found or len(found) >= _MOST:
                continue
            if not is_of_library(value.__module__):
                found[id(value)] = value
                waiting.append(value)
    del found[id(function)]
    return tuple(map(ref, found.values()))


def _binds(code: CodeType) -> tuple[str, ...]:
    found = [
        instruction.argval
        for instruction in get_instructions(code)
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
    ]
    for inner in code.co_consts:
        found += _binds(inner) if isinstance(inner, CodeType) else ()
    return tuple(dict.fromkeys(found))


_NOTHING = _Reach((), ())
_REACHES: WeakKeyDictionary[CodeType, _Reach] = WeakKeyDictionary()


_Functions = tuple[ref[FunctionType], ...]
_of_classes: WeakKeyDictionary[Any, _Functions] = WeakKeyDictionary()
"""The methods of a class of modules, and the functions that they reach, that use variables with state."""
_of_functions: WeakKeyDictionary[CodeType, _Functions] = WeakKeyDictionary()
"""The functions that a function reaches."""


def of_function(function: FunctionType) -> list[FunctionType]:
    """`function`, and the functions that it reaches that use variables with state."""
    code = function.__code__
    if code not in _of_functions:
        _of_functions[code] = tuple(ref(each) for each in reached_by(function)[1:] if _uses(each))
    return [function, *_present(_of_functions[code])]


def of_class(kind: Any) -> list[FunctionType]:
    """The methods of a class of modules, and the functions that they reach, that use variables with state."""
    if kind not in _of_classes:
        _of_classes[kind] = _functions_with_globals(kind)
    return _present(_of_classes[kind])


def uses_globals(kind: Any) -> bool:
    """Whether methods of a class of modules use variables with state."""
    return bool(of_class(kind))


def _functions_with_globals(kind: Any) -> _Functions:
    bases = (base for base in kind.__mro__ if not is_of_library(base.__module__))
    methods = (method for base in bases for method in vars(base).values() if isinstance(method, FunctionType))
    reached = {id(each): each for method in methods for each in reached_by(method)}
    return tuple(ref(each) for each in reached.values() if _uses(each))


def _uses(function: FunctionType) -> bool:
    """Whether a function binds variables of its Python module, or uses some with state."""
    return bool(bound_by(function) or names_used(function, Tensor, Array, Generator, nn.Module))


def _present(functions: _Functions) -> list[FunctionType]:
    return [function for each in functions if (function := each()) is not None]


def names_used(function: FunctionType, *kinds: Any) -> list[str]:
    """The variables of its Python module that a function uses, and that hold something of `kinds`."""
    known = function.__globals__
    return [name for name in function.__code__.co_names if name in known and kind_of(type(known[name])) in kinds]


def values_used(function: FunctionType, *kinds: Any) -> list[Any]:
    return [function.__globals__[name] for name in names_used(function, *kinds)]
