"""How modules of flax and equinox are called on a batch: arguments, flags of training, and random streams."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from types import CodeType
from typing import Any
from zlib import crc32

import jax

from polyaccel.errors import PolyaccelError
from polyaccel.jax.program.units import recomputed_by, traced_by

_FLAGS = {
    **dict.fromkeys(("train", "training", "is_training"), True),
    **dict.fromkeys(("deterministic", "inference", "use_running_average"), False),
}
"""The value in training of the arguments by which modules of the field switch between training and evaluation."""


class ModuleCall:
    """`kind.__call__` as its signature is: the batch and the flags that belong to its arguments."""

    def __init__(self, kind: Any) -> None:
        self.name = f"{kind.__name__}.__call__"
        self._signature = inspect.signature(kind.__call__)
        self._params = list(self._signature.parameters.values())[1:]
        self.names = tuple(self._signature.parameters)

    def arguments(self, batch: Any, *, trains: bool, **extra: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for `batch`, with flags like `train` and `extra` where it has none.

        A state among `extra` does not belong to the batch, in whatever place `__call__` has it.
        """
        args: tuple[Any, ...] = () if isinstance(batch, Mapping) else _as_args(batch)
        named = {str(name): value for name, value in batch.items()} if isinstance(batch, Mapping) else {}
        places = [param.name for param in self._params]
        if "state" in extra and (at := places.index("state")) < len(args):
            args = (*args[:at], extra.pop("state"), *args[at:])
        given = {*places[: len(args)]} | named.keys()
        flags = {
            param.name: _FLAGS[param.name] is trains
            for param in self._params
            if param.name in _FLAGS and param.name not in given and _may_be_bool(param)
        }
        named = {**extra, **flags, **named}
        try:
            self._signature.bind(None, *args, **named)
        except TypeError as error:
            raise PolyaccelError(
                f"the batch does not fit {self.name}{self._signature}: {error}",
                hint="pass a mapping of its arguments, or a tuple in their order; or a function fn(params, batch, rng) "
                "that calls the module as you like",
                value=str(error),
            ) from error
        return args, named


def _as_args(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def _may_be_bool(param: inspect.Parameter) -> bool:
    is_open = param.annotation is param.empty or "bool" in str(param.annotation)
    has_array = not (param.default is param.empty or param.default is None or isinstance(param.default, bool))
    return is_open and not has_array and param.kind in (param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY)


# The random streams of flax.linen.


class LinenStreams:
    """The random streams that a linen module draws from: "dropout", and those that its classes name.

    A module may ask whether a stream is there before it draws, so the streams must be found before a call, by a call
    for shapes alone: from the code of the classes that it uses, and from flax's errors.
    """

    def __init__(self) -> None:
        self._names: set[str] | None = None

    def keys(self, rng: Any, call: Callable[[Any], Any]) -> dict[str, Any]:
        """A key for each stream; that of "dropout" is `rng`. `call(keys)` runs the module."""
        if self._names is None:
            self._names = self._found(rng, call)
        return {name: _key(rng, name) for name in sorted(self._names)}

    def _found(self, rng: Any, call: Callable[[Any], Any]) -> set[str]:
        from flax import linen
        from flax.errors import InvalidRngError

        kinds: set[Any] = set()
        names = {"dropout"}

        def intercept(proceed: Any, args: Any, named: Any, context: Any) -> Any:
            if type(context.module) not in kinds:
                kinds.add(type(context.module))
                names.update(_streams_of(context.module))
            return proceed(*args, **named)

        def keys() -> dict[str, Any]:
            return {name: _key(rng, name) for name in sorted(names)}

        while True:
            before = set(names)
            try:
                with linen.intercept_methods(intercept), traced_by(None), recomputed_by(None):
                    jax.eval_shape(lambda: call(keys()))
            except InvalidRngError as error:
                names.add(missing_stream(error))
            if names == before:
                return names


def missing_stream(error: Exception) -> str:
    """The name of the stream that an InvalidRngError of flax is about."""
    found = re.search(r'PRNG for "([^"]+)"', str(error))
    return found[1] if found else "params"


def _key(rng: Any, name: str) -> Any:
    return rng if name == "dropout" else jax.random.fold_in(rng, crc32(name.encode()))


def _streams_of(module: Any) -> Iterator[str]:
    """The names that a module's class may ask for: texts in its functions that draw, and in its fields."""
    from flax import linen

    own = [kind for kind in type(module).__mro__ if kind not in linen.Module.__mro__]
    codes = [code for kind in own for function in vars(kind).values() for code in _codes(function)]
    drawing = [code for code in codes if {"make_rng", "has_rng"} & set(code.co_names)]
    if not drawing:
        return
    texts = [text for code in drawing for text in code.co_consts if isinstance(text, str)]
    texts += [value for field in fields(module) if isinstance(value := getattr(module, field.name, None), str)]
    yield from (text for text in texts if text.isidentifier() and text != "params")


def _codes(function: Any) -> Iterator[CodeType]:
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    waiting = [code] if code is not None else []
    while waiting:
        found = waiting.pop()
        yield found
        waiting += [const for const in found.co_consts if isinstance(const, CodeType)]
