"""What a function refers to: copies of a model share its functions, so these must have nothing that trains."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, BuiltinFunctionType, torch.dtype)
_LIBRARIES = frozenset({"torch", "polyaccel", "transformers", *sys.stdlib_module_names})
_WRAPPED = ("__wrapped__", "_torchdynamo_orig_callable")
"""Attributes in which decorators of libraries keep a function."""
_MOST = 1000


def trained_part_of(function: Any, model: nn.Module) -> str | None:
    """What `function` refers to that copies of `model` would share and train, in words; None where it has no such.

    Methods of the model and arguments of partial functions are copied with the model.
    """
    seen: set[int] = set()
    queue = [function]
    while queue:
        one = queue.pop()
        if id(one) in seen or isinstance(one, _PLAIN) or one is model:
            continue
        seen.add(id(one))
        if len(seen) > _MOST:
            return "many objects"
        if isinstance(one, nn.Module):
            if any(True for _ in (*one.parameters(), *one.buffers())):
                return f"a {type(one).__name__}"
        elif isinstance(one, Tensor):
            if one.requires_grad:
                return "a trained tensor"
        elif isinstance(one, (torch.optim.Optimizer, torch.Generator)):
            return f"a {type(one).__name__}"
        else:
            queue.extend(_parts_of(one))
    return None


def _parts_of(value: Any) -> Iterator[Any]:
    """What a value refers to, apart from functions of libraries."""
    if isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        yield from (vars(value)[name] for name in _WRAPPED if name in vars(value))
        if value.__module__ is not None and value.__module__.partition(".")[0] in _LIBRARIES:
            return
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it is empty
                yield cell.cell_contents
        yield from (value.__defaults__ or ())
        yield from (value.__kwdefaults__ or {}).values()
        yield from (value.__globals__[name] for name in _names_in(value.__code__) if name in value.__globals__)
    elif isinstance(value, partial):
        yield value.func
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    else:
        yield from getattr(value, "__dict__", {}).values()


def _names_in(code: CodeType) -> Iterator[str]:
    """The names that a function and those inside of it look up."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names_in(one)


def facts_of(function: Any) -> str:
    """A function's name and the digest of its code and file, for a digest of what was proven."""
    inner = function
    while isinstance(inner, (partial, MethodType)):
        inner = inner.func if isinstance(inner, partial) else inner.__func__
    kind = inner if isinstance(inner, (FunctionType, BuiltinFunctionType, type)) else type(inner)
    name = f"{kind.__module__}.{getattr(kind, '__qualname__', kind)}"
    file = getattr(sys.modules.get(kind.__module__ or ""), "__file__", None)
    parts = [name]
    if isinstance(inner, FunctionType):
        cells = [cell.cell_contents for cell in inner.__closure__ or () if _is_filled(cell)]
        given = (*cells, *(inner.__defaults__ or ()))
        parts += [inner.__code__.co_code.hex(), *(repr(one) for one in given if isinstance(one, _PLAIN))]
    if isinstance(function, partial):
        parts += [repr(one) for one in (*function.args, *function.keywords.items()) if not isinstance(one, Tensor)]
    if file is not None and (kind.__module__ or "").partition(".")[0] not in _LIBRARIES:
        with suppress(OSError):
            parts.append(hashlib.sha256(Path(file).read_bytes()).hexdigest())
    return " ".join(parts)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
