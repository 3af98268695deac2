"""Units of a function: parts whose parameters, where those are sharded, are gathered for their own computation only.

`unit` makes one, `scan_units` loops over stacked ones. At stages 0 to 2 and outside of an engine a unit is a plain
call, so one function serves all stages. A parameter that the function uses outside of units is gathered before the
first unit and freed after the last; a function without units is one unit, gathered as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jax
import numpy as np


class UnitTracer(ABC):
    """Takes over the units of a function while it is traced."""

    @property
    @abstractmethod
    def is_at_home(self) -> bool:
        """Return whether the function itself is traced, not a transformation in it: calls can be units only there."""

    @abstractmethod
    def call(self, block: Callable[..., Any], params: Any, args: tuple[Any, ...]) -> Any:
        """`block(params, *args)`."""

    @abstractmethod
    def scan(self, block: Callable[..., Any], carry: Any, stacked: Any, xs: Any) -> Any:
        """`carry` after every layer of `stacked`; None for `xs` that there are not."""


class UnitRecomputation:
    """Units whose intermediate values are computed again in backward. With `keeps_products` the results of matrix
    products are kept. `count` is the number of units so far."""

    def __init__(self, *, keeps_products: bool) -> None:
        self.count = 0
        self._policy = jax.checkpoint_policies.dots_saveable if keeps_products else None

    def wrap(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """`block`, recomputed; what is not an array among its arguments reaches it as it is."""

        def call(*args: Any) -> Any:
            self.count += 1
            values, structure = jax.tree.flatten(args)
            places = [at for at, value in enumerate(values) if isinstance(value, _ARRAYS)]

            def run(arrays: Sequence[Any]) -> Any:
                found = dict(zip(places, arrays, strict=True))
                with recomputed_by(None):  # a unit inside is recomputed with this one
                    return block(*jax.tree.unflatten(structure, [found.get(at, one) for at, one in enumerate(values)]))

            return jax.checkpoint(run, policy=self._policy)([values[at] for at in places])

        return call


_ARRAYS = (jax.Array, np.ndarray, np.generic)
_tracer: ContextVar[UnitTracer | None] = ContextVar("unit_tracer", default=None)
_recomputation: ContextVar[UnitRecomputation | None] = ContextVar("unit_recomputation", default=None)


@contextmanager
def recomputed_by(recomputation: UnitRecomputation | None) -> Iterator[None]:
    """Recompute the units that are called within; with None keep their values."""
    before = _recomputation.set(recomputation)
    try:
        yield
    finally:
        _recomputation.reset(before)


@contextmanager
def traced_by(tracer: UnitTracer | None) -> Iterator[None]:
    """Let `tracer` take over the units that are called within; with None they are plain calls."""
    before = _tracer.set(tracer)
    try:
        yield
    finally:
        _tracer.reset(before)


def is_unit_here() -> bool:
    """Whether a unit that is called now is more than a plain call."""
    tracer = _tracer.get()
    return _recomputation.get() is not None if tracer is None else tracer.is_at_home


def unit(block: Callable[..., Any]) -> Callable[..., Any]:
    """Make a block of layers a unit, whose sharded parameters are gathered for its own computation only.

    They are gathered for the call and freed after it, gathered again for its backward pass, and their gradients are
    reduced and freed at once. Other intermediate values are kept for the backward pass, or recomputed if
    `activation_checkpointing.enabled` (`jax.checkpoint` inside the block works too). Without sharded parameters a unit
    is a plain call. Repeated blocks of modules (`polyaccel.jax.program.module_units`) are units without a mark.

    Args:
        block: Function `block(params, *args)`, where `params` is a pytree of parameters as the loss function got them.
            It may close over other values.
            Arguments that are not arrays reach it as they are.

    Returns:
        Function with the same arguments and results. It raises PolyaccelError inside scan, cond, checkpoint, vmap, jit
        or grad of the loss function's own; `scan_units` loops over layers.

    Example:
        ```python
        def loss_fn(params, batch, rng):
            hidden = embed(params, batch)
            for layer in params["layers"]:
                hidden = polyaccel.jax.unit(block)(layer, hidden)
            return loss(params, hidden, batch)
        ```
    """

    @wraps(block)
    def call(params: Any, *args: Any) -> Any:
        tracer, run = _tracer.get(), _recomputed(block)
        return run(params, *args) if tracer is None else tracer.call(run, params, args)

    return call


def scan_units(block: Callable[..., Any], carry: Any, stacked: Any, xs: Any = None) -> Any:
    """Loop over stacked layers, each of which is a unit: `carry = block(layer, carry)`, compiled once.

    Args:
        block: Function `block(layer, carry)`, or `block(layer, carry, x)` with `xs`. It returns the next carry.
        carry: Initial value, a pytree. Its structure, shapes and dtypes stay the same.
        stacked: Pytree of parameters with a leading axis over layers. If parameters are sharded, `initialize(...,
            stacked=["layers"])` names its place in `params`.
        xs: Pytree of arrays with the same leading axis, such as random keys; the block gets the slice of its layer.

    Returns:
        Carry after the last layer.

    Raises:
        PolyaccelError: It is called inside a transformation, as for `unit`, or the parameters are not stacked.
    """
    tracer, block = _tracer.get(), _recomputed(block)
    if tracer is not None:
        return tracer.scan(block, carry, stacked, xs)
    carry, _ = jax.lax.scan(lambda carry, part: (call_layer(block, carry, *part), None), carry, (stacked, xs))
    return carry


def _recomputed(block: Callable[..., Any]) -> Callable[..., Any]:
    recomputation = _recomputation.get()
    return block if recomputation is None else recomputation.wrap(block)


def call_layer(block: Callable[..., Any], carry: Any, layer: Any, x: Any) -> Any:
    """The carry after one layer."""
    return block(layer, carry) if x is None else block(layer, carry, x)
