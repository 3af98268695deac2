"""Repeated blocks of modules as units, without a mark in the model.

The blocks are those of `repeated_blocks`, for example `blocks.3` or `Block_3`, which the engine's buckets follow too. A
block is a unit where the module's function calls it itself; inside vmap, scan, jit and the like it is a plain call, and
its parameters are gathered for the whole program.

No class of the user's is changed. flax.linen offers its method calls to interceptors. Modules of flax.nnx and equinox
are objects that are put together for each trace; there the blocks get their own class, derived from theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache, wraps
from typing import Any

import jax

from polyaccel.jax.program.stacking import repeated_blocks
from polyaccel.jax.program.units import is_unit_here, unit
from polyaccel.jax.pytree import named_leaves


def blocks_of(params: Any) -> tuple[str, ...]:
    """The names of the repeated blocks in a pytree of parameters."""
    return tuple(dict.fromkeys(name for name in repeated_blocks(named_leaves(params)[0]).values() if name))


# flax.linen.


def linen_interceptor(blocks: Sequence[str]) -> Callable[..., Any]:
    """Make calls of modules named `blocks` units of an unbound copy, with one random key at every stage."""
    from flax import linen

    names = frozenset(blocks)

    def intercept(proceed: Any, args: Any, named: Any, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__" or ".".join(module.path) not in names or _uses_others(module):
            return proceed(*args, **named)
        rngs = {"dropout": module.make_rng("dropout")} if module.has_rng("dropout") else {}
        if not rngs and not is_unit_here():
            return proceed(*args, **named)
        block, variables = module.unbind()
        mutable = module.scope.mutable

        def apply(variables: Any, rngs: Any, args: Any, named: Any) -> Any:
            found = block.apply(variables, *args, rngs=rngs, mutable=mutable, **named)
            return found if mutable is not False else (found, {})

        found, updates = (unit(apply) if is_unit_here() else apply)(variables, rngs, args, named)
        for collection, values in updates.items():
            for name, value in values.items():
                module.scope.put_variable(collection, name, value)
        return found

    def _uses_others(module: Any) -> bool:
        """Whether `module` calls modules that belong to another one, whose variables it does not have."""
        given = [getattr(module, field.name) for field in fields(module) if field.name != "parent"]
        parts = jax.tree.leaves(given, is_leaf=lambda part: isinstance(part, linen.Module))
        bound = [part for part in parts if isinstance(part, linen.Module) and part.scope is not None]
        return any(part.path[: len(module.path)] != module.path for part in bound)

    return intercept


# flax.nnx and equinox.


def nnx_with_units(model: Any, blocks: Sequence[str]) -> Any:
    """`model`, a module of flax.nnx that only the caller holds, after its `blocks` were made units."""
    from flax import nnx

    for name in blocks:
        block = _part(model, name)
        if isinstance(block, nnx.Module) and callable(block):
            object.__setattr__(block, "__class__", _derived(block.__class__, _call_nnx))
    return model


def equinox_with_units(model: Any, blocks: Sequence[str]) -> Any:
    """A copy of the equinox module `model` whose `blocks` are units."""
    import equinox

    names = [name for name in blocks if isinstance(_part(model, name), equinox.Module) and callable(_part(model, name))]
    units = [_equinox_unit(_part(model, name)) for name in names]
    return equinox.tree_at(lambda model: [_part(model, name) for name in names], model, units) if names else model


def _equinox_unit(block: Any) -> Any:
    made = object.__new__(_derived(block.__class__, _call_equinox))
    for field in fields(block):
        if hasattr(block, field.name):
            object.__setattr__(made, field.name, getattr(block, field.name))
    return made


def _call_equinox(kind: Any, block: Any, args: Any, named: Any) -> Any:
    return unit(lambda block, args, named: kind.__call__(block, *args, **named))(block, args, named)


def _call_nnx(kind: Any, block: Any, args: Any, named: Any) -> Any:
    """Call the unit as a copy, as a module may change only in its own trace; copy random counts and state back."""
    from flax import nnx

    graph, state = nnx.split(block)

    def call(state: Any, args: Any, named: Any) -> Any:
        inner = nnx.merge(graph, state)
        return kind.__call__(inner, *args, **named), nnx.state(inner, changing)

    changing = nnx.Any(nnx.RngCount, nnx.Not(nnx.Any(nnx.Param, nnx.RngState, nnx.Intermediate)))
    found, changed = unit(call)(state, args, named)
    nnx.update(block, changed)
    return found


@cache
def _derived(kind: Any, call_unit: Callable[[Any, Any, Any, Any], Any]) -> Any:
    """A class derived from `kind` whose calls are units, where units can be."""

    @wraps(kind.__call__)  # whose signature some models ask for
    def call(self: Any, *args: Any, **named: Any) -> Any:
        return call_unit(kind, self, args, named) if is_unit_here() else kind.__call__(self, *args, **named)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (kind,), names)


def _part(model: Any, name: str) -> Any:
    """The part of a module at a path with dots; None where it is missing."""
    for key in name.split("."):
        if isinstance(model, Mapping):
            model = model.get(key)
        elif hasattr(model, key):
            model = getattr(model, key)
        else:
            try:
                model = model[int(key)]
            except (TypeError, ValueError, LookupError):
                return None
    return model
