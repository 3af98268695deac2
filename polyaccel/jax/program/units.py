"""Units of a function: parts whose parameters, where those are sharded, are gathered for their own computation only.

    def fn(params, batch, rng):
        hidden = embed(params, batch)
        for layer in params["layers"]:
            hidden = polyaccel.jax.unit(block)(layer, hidden)
        return loss(params, hidden, batch)

Everywhere else, at stages 0 to 2 and outside of an engine, a unit is a plain call, so one function serves all stages.
A parameter that the function uses outside of units is gathered before the first unit and freed after the last; a
function without units is one unit, gathered as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jax


class UnitTracer(ABC):
    """Takes over the units of a function while it is traced."""

    @property
    @abstractmethod
    def is_at_home(self) -> bool:
        """Whether the function itself is being traced, not a transformation within it. Only there calls can be
        units."""

    @abstractmethod
    def call(self, block: Callable[..., Any], params: Any, args: tuple[Any, ...]) -> Any:
        """`block(params, *args)`."""

    @abstractmethod
    def scan(self, block: Callable[..., Any], carry: Any, stacked: Any, xs: Any) -> Any:
        """`carry` after every layer of `stacked`; None for `xs` that there are not."""


_tracer: ContextVar[UnitTracer | None] = ContextVar("unit_tracer", default=None)


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
    return tracer is not None and tracer.is_at_home


def unit(block: Callable[..., Any]) -> Callable[..., Any]:
    """`block(params, *args)` as a unit: `params` is a pytree of parameters as the function got them.

    Where parameters are sharded, those in `params` are gathered for the call and freed after it, gathered again for its
    backward pass, and their gradients reduced and freed at once; other intermediate values are kept for backward
    as always (`jax.checkpoint` inside the block works too). It may close over other values; numbers of Python and
    everything that is no array reach it as they are. Called inside scan, cond, checkpoint, vmap, jit or grad of the
    function's own, it raises PolyaccelError: `scan_units` is the loop over layers.

    Repeated blocks of modules (`polyaccel.jax.program.module_units`) are units without being marked.
    """

    @wraps(block)
    def call(params: Any, *args: Any) -> Any:
        tracer = _tracer.get()
        return block(params, *args) if tracer is None else tracer.call(block, params, args)

    return call


def scan_units(block: Callable[..., Any], carry: Any, stacked: Any, xs: Any = None) -> Any:
    """`carry` after `carry = block(layer, carry)` for every layer of `stacked`, each a unit: compiled once.

    `stacked` is a pytree of parameters with a leading axis over layers; where parameters are sharded, the engine has to
    know that from the beginning: `initialize(..., stacked=["layers"])`, their place in `params`. With `xs`, arrays with
    the same leading axis, such as random keys, the block gets a layer's part as its third argument. The carry keeps its
    structure, shapes and types. Raises PolyaccelError as `unit` does, and for parameters that are not stacked.
    """
    tracer = _tracer.get()
    if tracer is not None:
        return tracer.scan(block, carry, stacked, xs)
    carry, _ = jax.lax.scan(lambda carry, part: (call_layer(block, carry, *part), None), carry, (stacked, xs))
    return carry


def call_layer(block: Callable[..., Any], carry: Any, layer: Any, x: Any) -> Any:
    """The carry after one layer."""
    return block(layer, carry) if x is None else block(layer, carry, x)
