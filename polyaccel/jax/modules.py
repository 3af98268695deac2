"""Modules of flax and equinox as functions of their parameters, so that the engine handles functions only.

The batch is passed as to a module of torch: a mapping as named arguments, a tuple or list as positional ones, anything
else as the one argument; it returns its loss, or (loss, auxiliary output). The module is in training mode where there
is a random key, and in evaluation mode elsewhere, by its own switch (`model.eval()` of nnx, `inference_mode` of
equinox) and by arguments like `train`. Its repeated blocks are units (`polyaccel.jax.program.module_units`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax

from polyaccel.errors import InvariantError, PolyaccelError
from polyaccel.jax.program.function import LossFn
from polyaccel.jax.program.module_calls import LinenStreams, ModuleCall, missing_stream
from polyaccel.jax.program.module_units import blocks_of, equinox_with_units, linen_interceptor, nnx_with_units


def as_function(model: Any, params: Any, *, with_units: bool = True) -> tuple[LossFn, Any]:
    """Return function and parameters of `model`, whose repeated blocks are units `with_units`.

    flax.linen needs `params` from `model.init`.
    """
    kind = type(model).__name__
    for package, name, convert in _KINDS:
        loaded = sys.modules.get(package)
        if loaded is not None and isinstance(model, getattr(loaded, name)):
            if not callable(model):
                raise PolyaccelError(
                    f"a {kind} has no __call__ that gives the loss",
                    hint="pass a function fn(params, batch, rng) that uses its parts, and its parameters as params=",
                    value=kind,
                )
            return convert(model, params, with_units)
    if hasattr(model, "opt_state"):
        raise PolyaccelError(
            f"a {kind} is a training state, and no model",
            hint="pass the module or the function alone as model=, and the transformation as optimizer=: the engine "
            "makes its states",
            value=kind,
        )
    if not callable(model) or isinstance(model, type):
        raise PolyaccelError(f"a {kind} is not a function", hint="pass model=fn, fn(params, batch, rng)", value=kind)
    if params is None:
        raise PolyaccelError(
            "initialize was called without params", hint="pass the pytree of the function's parameters"
        )
    return model, params


def _from_linen(model: Any, params: Any, with_units: bool) -> tuple[LossFn, Any]:
    from flax import linen
    from flax.errors import InvalidRngError

    if params is None:
        raise PolyaccelError("a flax.linen module has no parameters", hint="pass params=model.init(key, ...)")
    others = sorted(set(params) - {"params"}) if "params" in params else []
    if others:
        raise _stateful(others)
    params = params.get("params", params)
    interceptor = linen_interceptor(blocks_of(params) if with_units else ())
    of_call, streams = ModuleCall(type(model)), LinenStreams()

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        args, named = of_call.arguments(batch, trains=rng is not None)

        def call(rngs: Any) -> Any:
            return model.apply({"params": params}, *args, rngs=rngs, **named)

        rngs = None if rng is None else streams.keys(rng, call)
        try:
            with linen.intercept_methods(interceptor):
                return call(rngs)
        except InvalidRngError as error:
            stream = missing_stream(error)
            raise PolyaccelError(
                f"the module draws random numbers in evaluation, of the stream {stream!r}, and there is no key",
                hint=f'draw where self.has_rng("{stream}") alone, or by an argument train; or pass a function that '
                "gives model.apply its rngs",
                value=stream,
            ) from error

    return loss, params


def _from_nnx(model: Any, params: Any, with_units: bool) -> tuple[LossFn, Any]:
    from flax import nnx

    _require_own(params)
    model.eval()
    still, *_ = nnx.split(model, nnx.Param, ...)
    model.train()
    moving, state, rest = nnx.split(model, nnx.Param, ...)
    named = nnx.to_pure_dict(state)  # whose paths are the names of layers, without the variables around the arrays
    if any(one is not other for one, other in zip(jax.tree.leaves(named), jax.tree.leaves(state), strict=True)):
        raise InvariantError("flax orders a state and its pure dict differently")
    blocks = blocks_of(named) if with_units else ()
    whole = jax.tree.structure(state)
    leaves, structure = jax.tree.flatten(rest)
    is_key = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    others = nnx.filter_state(rest, nnx.Not(nnx.RngState))
    if jax.tree.leaves(others):
        raise _stateful(sorted({".".join(map(str, path)) for path, _ in nnx.to_flat_state(others)}))
    of_call = ModuleCall(type(model))

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        drawn = [
            jax.random.fold_in(rng, at) if fresh and rng is not None else leaf
            for at, (leaf, fresh) in enumerate(zip(leaves, is_key, strict=True))
        ]
        graph = still if rng is None else moving
        variables = jax.tree.unflatten(whole, jax.tree.leaves(params))
        args, named = of_call.arguments(batch, trains=rng is not None)
        return nnx_with_units(nnx.merge(graph, variables, jax.tree.unflatten(structure, drawn)), blocks)(*args, **named)

    return loss, named


def _from_equinox(model: Any, params: Any, with_units: bool) -> tuple[LossFn, Any]:
    import equinox

    _require_own(params)
    parts = jax.tree.leaves(model, is_leaf=lambda part: isinstance(part, equinox.nn.StateIndex))
    if any(isinstance(part, equinox.nn.StateIndex) for part in parts):
        raise _stateful(["equinox.nn.State"])
    arrays, moving = equinox.partition(model, equinox.is_inexact_array)
    _, still = equinox.partition(equinox.nn.inference_mode(model), equinox.is_inexact_array)
    blocks = blocks_of(arrays) if with_units else ()
    of_call = ModuleCall(type(model))

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        args, named = of_call.arguments(batch, trains=rng is not None, **({"key": rng} if of_call.takes_key else {}))
        static = still if rng is None else moving
        return equinox_with_units(equinox.combine(params, static), blocks)(*args, **named)

    return loss, arrays


_KINDS: tuple[tuple[str, str, Callable[[Any, Any, bool], tuple[LossFn, Any]]], ...] = (
    ("flax.linen", "Module", _from_linen),
    ("flax.nnx", "Module", _from_nnx),
    ("equinox", "Module", _from_equinox),
)


def _require_own(params: Any) -> None:
    if params is not None:
        raise PolyaccelError("params were passed with a module that has its own", hint="leave params out")


def _stateful(names: list[str]) -> PolyaccelError:
    return PolyaccelError(
        f"the module has state that is not a parameter: {', '.join(names)}",
        hint="use layers without running statistics, or pass a function that keeps its state itself",
        value=names,
    )
