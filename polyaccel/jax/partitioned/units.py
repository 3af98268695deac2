"""Units of a function on a mesh: JAX's own collectives gather their leaves, and reduce the gradients of these.

A token goes through all units, as in `polyaccel.jax.program.gathered_units`. Here it holds the gradients that have been
reduced so far, which its cotangent collects on the way back.

[Note: Late gathers]
Nothing but the leaf itself is an operand of its gather, so XLA may gather every leaf at the beginning, and do once what
forward and backward passes ask for. `jax.lax.optimization_barrier` prevents neither on the CPU, where XLA drops it
early. So what is gathered depends on what the unit waits for, by a choice that XLA cannot foresee: a number of the step
that is never negative. It costs a pass over a device's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyaccel.jax.program.params import Leaf


class Token(NamedTuple):
    """What goes from unit to unit."""

    never: Any
    """A number that is never negative, in float32."""
    gradients: dict[int, Any]
    """The reduced gradients of trained leaves, by the index of the leaf."""


class Exchange(NamedTuple):
    """How leaves are gathered and gradients reduced."""

    gather: Callable[[Leaf, Any], Any]
    """(leaf, what a device holds of it, or of a layer) -> the whole."""
    reduce: Callable[[Sequence[tuple[Leaf, Any]]], list[Any]]
    """((leaf, gradient of it, or of a layer), ...) -> what a device keeps of each reduced one."""
    is_local: bool
    """Whether a device traces its own part, of which it can read a number without the others."""


class MeshMembers:
    """The leaves of one unit; with `is_scanned`, of each layer of a scan. As `UnitMembers`."""

    def __init__(self, leaves: Sequence[Leaf], exchange: Exchange, *, is_scanned: bool) -> None:
        self._leaves = tuple(leaves)
        self._exchange = exchange
        self._is_scanned = is_scanned

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """As `UnitMembers.leaves`."""
        return self._leaves

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """As `UnitMembers.structs`."""
        return [
            jax.ShapeDtypeStruct(leaf.shape[self._is_scanned :], jnp.dtype(leaf.dtype.value)) for leaf in self._leaves
        ]

    def fetch(self, token: Any, index: Any, whole: Sequence[Any], after: Sequence[Any]) -> tuple[Any, list[Any]]:
        """As `UnitMembers.fetch`. `whole` are the parts that a device holds."""
        found = []
        for leaf, part in zip(self._leaves, whole, strict=True):
            held = jax.lax.dynamic_index_in_dim(part, index, keepdims=False) if self._is_scanned else part
            found.append(self._exchange.gather(leaf, self._awaiting(held, after, token.never)))
        return token, found

    def _awaiting(self, value: Any, awaited: Sequence[Any], never: Any) -> Any:
        """`value`, once everything that was `awaited` is there. See [Note: Late gathers]."""
        floats = [one for one in awaited if jnp.issubdtype(one.dtype, jnp.floating) and one.size]
        if not floats:
            return value
        if not self._exchange.is_local:
            return jax.lax.optimization_barrier((value, floats))[0]
        other = jnp.stack([one.reshape(-1)[0].astype(jnp.float32) for one in floats]).max()
        return jnp.where(never < 0.0, other.astype(value.dtype), value)

    def reduce(self, token: Any, index: Any, cotangents: Sequence[Any]) -> Any:
        """As `UnitMembers.reduce`."""
        gradients = dict(token.gradients)
        pairs = [pair for pair in zip(self._leaves, cotangents, strict=True) if pair[0].is_trained]
        for (leaf, _), reduced in zip(pairs, self._exchange.reduce(pairs), strict=True):
            before = gradients[leaf.index]
            gradients[leaf.index] = before.at[index].add(reduced) if self._is_scanned else before + reduced
        return token._replace(gradients=gradients)


def unit_leaves(leaves: Sequence[Leaf], stacked: Sequence[str]) -> list[Leaf]:
    """The leaves as programs on a mesh have them: a device holds a part of each, and subtrees `stacked` have layers."""
    found = []
    for leaf in leaves:
        is_stacked = any(leaf.fqn == name or leaf.fqn.startswith(f"{name}.") for name in stacked)
        layers = leaf.shape[0] if is_stacked and leaf.shape else 1
        found.append(replace(leaf, is_whole=True, is_stacked=is_stacked, names=(leaf.fqn,) * layers))
    return found
