"""The config's optimizers inside a program of JAX: from a group's hyperparameters to a traced update of flat slices."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from polyaccel.errors import ShardingError
from polyaccel.jax.native.rows import ParamRows
from polyaccel.jax.optax_optimizer import OptaxOptimizer, Program
from polyaccel.ops.base import Formula
from polyaccel.ops.jax import updated
from polyaccel.ops.optimizers import APPLY, OPTIMIZERS
from polyaccel.zero.plan.layout import Bucket
from polyaccel.zero.update.optimizers import (
    Group,
    RowOptimizer,
    SliceOptimizer,
    TrustRatioOptimizer,
    trust_bounds,
)

Arrays = Mapping[str, Any]


class Updated(NamedTuple):
    """The results of an update: a slice of master weights, and the states by name, those of one number for all
    apart."""

    master: Any
    states: dict[str, Any]
    numbers: Arrays = MappingProxyType({})


class SliceUpdate(Protocol):
    """One optimizer. `terms` and `variant` are asked on the host before each step, `apply` when JAX traces it."""

    def terms(self, group: Group, step: int) -> Any:
        """The numbers that update `step` of a parameter needs, as a pytree."""

    def variant(self, group: Group, bucket: Bucket) -> Hashable:
        """The settings that a program is compiled for; all others are among the terms."""

    def apply(
        self, variant: Any, master: Any, grad: Any, states: Arrays, terms: Any, grad_scale: Any, rows: ParamRows
    ) -> Updated:
        """Update a device's part of a bucket; `terms` are numbers or one an element, by parameter in `rows`."""


class RowUpdate:
    """An optimizer of `polyaccel.ops.optimizers`. With a trust ratio, a parameter's norms are over all of it, though it
    be cut over devices."""

    def __init__(self, optimizer: RowOptimizer) -> None:
        self._row = optimizer.row
        self._has_ratio = isinstance(optimizer, TrustRatioOptimizer)

    def terms(self, group: Group, step: int) -> Any:
        rule = self._row.rule(group, step)
        return rule.constants, (rule.settings["lr"], *trust_bounds(rule)) if self._has_ratio else ()

    def variant(self, group: Group, bucket: Bucket) -> Formula:
        return self._row.rule(group, 1).formula

    def apply(
        self, variant: Formula, master: Any, grad: Any, states: Arrays, terms: Any, grad_scale: Any, rows: ParamRows
    ) -> Updated:
        constants, of_ratio = terms
        names = variant.reads
        after, *kept = updated(variant, constants, master, grad, [states[name] for name in names], grad_scale)
        if self._has_ratio:
            lr, low, high = of_ratio
            direction = kept.pop()
            weight, length = (jnp.sqrt(rows.square_sums(of)) for of in (master.astype(direction.dtype), direction))
            usable = (weight > 0.0) & (length > 0.0) & jnp.isfinite(weight) & jnp.isfinite(length)
            ratio = jnp.where(usable, weight / jnp.where(usable, length, 1.0), 1.0)
            # The bounds, as everything of a group, are equal for all parameters of a bucket.
            bounded = jnp.where(usable, jnp.clip(ratio, jnp.min(low), jnp.max(high)), 1.0)
            (after,) = updated(APPLY, (rows.spread(bounded) * lr,), master, direction, (), 1.0)
        return Updated(after, {**states, **dict(zip(names, kept, strict=True))})


class OptaxUpdate:
    """The states of one number are terms, which every slice takes up and gives back in the same way."""

    def __init__(self, optimizer: OptaxOptimizer) -> None:
        self.optimizer = optimizer

    def terms(self, group: Group, step: int) -> dict[str, float]:
        return self.optimizer.numbers_for_update

    def variant(self, group: Group, bucket: Bucket) -> Program:
        return self.optimizer.programs[bucket.slots[0].param.fqn]

    def apply(
        self, variant: Program, master: Any, grad: Any, states: Arrays, terms: Any, grad_scale: Any, rows: ParamRows
    ) -> Updated:
        master, after = self.optimizer.step(variant, master, grad, states, terms, grad_scale)
        return Updated(master, {**states, **after}, self.optimizer.numbers_after(terms))


def slice_update(optimizer: SliceOptimizer) -> SliceUpdate:
    """The traced form of `optimizer`. Raises ShardingError for one that has none."""
    if isinstance(optimizer, OptaxOptimizer):
        return OptaxUpdate(optimizer)
    if isinstance(optimizer, RowOptimizer):
        return RowUpdate(optimizer)
    raise ShardingError(
        f"{optimizer.kind} has no form inside a program of JAX",
        hint=f"use one of {', '.join(OPTIMIZERS)} in the config",
        value=optimizer.kind,
    )


def stacked(terms: list[Any]) -> Any:
    """The terms of several parameters as one: arrays with a value each."""
    return jax.tree.map(lambda *values: jnp.asarray(values, jnp.float32), *terms)
