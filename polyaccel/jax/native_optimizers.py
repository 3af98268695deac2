"""The config's optimizers inside a program of JAX: from a group's hyperparameters to a traced update of flat slices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from polyaccel.errors import ShardingError
from polyaccel.jax.native_rows import Rows
from polyaccel.jax.optax_optimizer import OptaxOptimizer
from polyaccel.ops import jax_updates as updates
from polyaccel.zero.optimizers import Adagrad, Adam, Group, Lamb, Lion, Sgd, SliceOptimizer

Arrays = Mapping[str, Any]


class Updated(NamedTuple):
    """What an update gives: a slice of master weights, and the states by name, those of one number for all apart."""

    master: Any
    states: dict[str, Any]
    numbers: Arrays = MappingProxyType({})


class SliceUpdate(Protocol):
    """One optimizer. `terms` and `variant` are asked on the host before each step, `apply` when JAX traces it."""

    def terms(self, group: Group, step: int) -> Any:
        """What the update number `step` of a parameter needs: a pytree of numbers."""

    def variant(self, group: Group) -> Hashable:
        """What a program is compiled for."""

    def apply(
        self, variant: Any, master: Any, grad: Any, states: Arrays, terms: Any, grad_scale: Any, rows: Rows
    ) -> Updated:
        """The update of a device's part of a bucket. Each of `terms` is a number or has one an element; `rows` tells
        which parameter an element belongs to."""


class AdamUpdate:
    def terms(self, group: Group, step: int) -> Any:
        return updates.adam_terms(Adam.hyper(group, step))

    def variant(self, group: Group) -> bool:
        return Adam.hyper(group, 1).decoupled

    def apply(
        self, variant: bool, master: Any, grad: Any, states: Arrays, terms: Any, grad_scale: Any, rows: Rows
    ) -> Updated:
        m, v = states["exp_avg"], states["exp_avg_sq"]
        master, m, v = updates.adam(master, grad, m, v, terms, grad_scale, decoupled=variant)
        return Updated(master, {"exp_avg": m, "exp_avg_sq": v})


class SgdUpdate:
    def terms(self, group: Group, step: int) -> Any:
        return updates.sgd_terms(Sgd.hyper(group, step))

    def variant(self, group: Group) -> tuple[bool, bool]:
        hyper = Sgd.hyper(group, 1)
        return hyper.momentum != 0.0, hyper.nesterov

    def apply(
        self,
        variant: tuple[bool, bool],
        master: Any,
        grad: Any,
        states: Arrays,
        terms: Any,
        grad_scale: Any,
        rows: Rows,
    ) -> Updated:
        has_momentum, nesterov = variant
        average = states["momentum_buffer"]
        master, after = updates.sgd(
            master, grad, average if has_momentum else None, terms, grad_scale, nesterov=nesterov
        )
        return Updated(master, {"momentum_buffer": average if after is None else after})


class AdagradUpdate:
    def terms(self, group: Group, step: int) -> Any:
        return updates.adagrad_terms(Adagrad.hyper(group, step))

    def variant(self, group: Group) -> None:
        return None

    def apply(
        self, variant: None, master: Any, grad: Any, states: Arrays, terms: Any, grad_scale: Any, rows: Rows
    ) -> Updated:
        master, total = updates.adagrad(master, grad, states["sum"], terms, grad_scale)
        return Updated(master, {"sum": total})


class LionUpdate:
    def terms(self, group: Group, step: int) -> Any:
        return updates.lion_terms(Lion.hyper(group, step))

    def variant(self, group: Group) -> None:
        return None

    def apply(
        self, variant: None, master: Any, grad: Any, states: Arrays, terms: Any, grad_scale: Any, rows: Rows
    ) -> Updated:
        master, average = updates.lion(master, grad, states["exp_avg"], terms, grad_scale)
        return Updated(master, {"exp_avg": average})


class LambUpdate:
    """A parameter's norms are over all of it, though it be cut over devices."""

    def terms(self, group: Group, step: int) -> Any:
        return updates.adam_terms(Lamb.hyper(group, step)), Lamb.bounds(group)

    def variant(self, group: Group) -> None:
        return None

    def apply(
        self, variant: None, master: Any, grad: Any, states: Arrays, terms: Any, grad_scale: Any, rows: Rows
    ) -> Updated:
        adam, (low, high) = terms
        m, v = states["exp_avg"], states["exp_avg_sq"]
        direction, m, v = updates.lamb_direction(master, grad, m, v, adam, grad_scale)
        weight, update = (jnp.sqrt(rows.square_sums(of)) for of in (master.astype(direction.dtype), direction))
        usable = (weight > 0.0) & (update > 0.0) & jnp.isfinite(weight) & jnp.isfinite(update)
        ratio = jnp.where(usable, weight / jnp.where(usable, update, 1.0), 1.0)
        # The bounds, as everything of a group, are equal for all parameters of a bucket.
        bounded = jnp.where(usable, jnp.clip(ratio, jnp.min(low), jnp.max(high)), 1.0)
        master = updates.lamb_apply(master, direction, rows.spread(bounded) * adam.lr)
        return Updated(master, {"exp_avg": m, "exp_avg_sq": v})


class OptaxUpdate:
    """The states of one number are terms, which every slice takes up and gives back alike."""

    def __init__(self, optimizer: OptaxOptimizer) -> None:
        self._optimizer = optimizer

    def terms(self, group: Group, step: int) -> dict[str, float]:
        return self._optimizer.numbers

    def variant(self, group: Group) -> None:
        return None

    def apply(
        self, variant: None, master: Any, grad: Any, states: Arrays, terms: Any, grad_scale: Any, rows: Rows
    ) -> Updated:
        master, after = self._optimizer.step(master, grad, {**states, **terms}, grad_scale)
        return Updated(master, {name: after[name] for name in states}, {name: after[name] for name in terms})


_UPDATES: dict[type[SliceOptimizer], Callable[[], SliceUpdate]] = {
    Adam: AdamUpdate,
    Sgd: SgdUpdate,
    Adagrad: AdagradUpdate,
    Lion: LionUpdate,
    Lamb: LambUpdate,
}


def slice_update(optimizer: SliceOptimizer) -> SliceUpdate:
    """The traced form of `optimizer`. Raises ShardingError for one that has none."""
    if isinstance(optimizer, OptaxOptimizer):
        return OptaxUpdate(optimizer)
    try:
        return _UPDATES[type(optimizer)]()
    except KeyError:
        known = ", ".join(sorted(kind.__name__ for kind in _UPDATES))
        name = type(optimizer).__name__
        raise ShardingError(
            f"{name} has no form inside a program of JAX", cure=f"use one of {known} in the config", value=name
        ) from None


def stacked(terms: list[Any]) -> Any:
    """The terms of several parameters as one: arrays with a value each."""
    return jax.tree.map(lambda *values: jnp.asarray(values, jnp.float32), *terms)
