"""Modules of flax and equinox as functions of their parameters, so that the engine handles functions only.

The batch is passed as to a module of torch: a mapping as named arguments, a tuple or list as positional ones, anything
else as the one argument; it returns its loss, or (loss, auxiliary output). The module is in training mode where there
is a random key, and in evaluation mode elsewhere, by its own switch (`model.eval()` of nnx, `inference_mode` of
equinox) and by arguments like `train`. A function may get the module in place of parameters (`FunctionOfModule`), as
losses of nnx and equinox do. Its repeated blocks are units (`polyaccel.jax.program.module_units`). Its state
is carried (`polyaccel.jax.program.carried`): collections of linen other than "params", variables of nnx that are not
`Param` or random, and `equinox.nn.State`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from polyaccel.errors import InvariantError, PolyaccelError
from polyaccel.jax.program.carried import with_new_state
from polyaccel.jax.program.function import LossFn
from polyaccel.jax.program.module_calls import LinenStreams, ModuleCall, missing_stream
from polyaccel.jax.program.module_units import blocks_of, equinox_with_units, linen_interceptor, nnx_with_units


@dataclass(frozen=True)
class FunctionOfModule:
    """A function `fn(module, batch, rng)`, and the module of nnx or equinox, or the modules, that it gets."""

    function: Any
    module: Any


def function_of_module(model: Any, params: Any) -> tuple[Any, Any]:
    """Return model and params, with a function and the module that is its params as one `FunctionOfModule`."""
    nnx = sys.modules.get("flax.nnx")
    is_function = callable(model) and _library_of(model) is None
    if not is_function or params is None:
        return model, params
    has_optimizer = nnx is not None and isinstance(params, nnx.ModelAndOptimizer)
    return (FunctionOfModule(model, params), None) if has_optimizer or _library_of(params) else (model, params)


def _library_of(module: Any) -> str | None:
    """The library of a module, or of a collection of modules, that has its parameters inside."""
    nnx, equinox = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if nnx is not None:
        own = list(module.values()) if isinstance(module, dict) else module
        own = list(own) if isinstance(own, (list, tuple)) else [own]
        if own and all(isinstance(one, nnx.Module) for one in own):
            return "nnx"
    if equinox is not None:

        def is_module(node: Any) -> bool:
            return isinstance(node, equinox.Module)

        if any(map(is_module, jax.tree.leaves(module, is_leaf=is_module))):
            return "equinox"
    return None


def as_function(model: Any, params: Any, state: Any = None, *, with_units: bool = True) -> tuple[LossFn, Any, Any]:
    """Return function, parameters and state of `model`, whose repeated blocks are units `with_units`.

    flax.linen needs `params` from `model.init`. With state the function is `fn(params, state, batch, rng)`.
    """
    if isinstance(model, FunctionOfModule):
        convert = _from_nnx if _library_of(model.module) == "nnx" else _from_equinox
        return convert(model.module, params, state, with_units, model.function)
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
            return convert(model, params, state, with_units)
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
    _require_arguments(model, state)
    return model, params, state


def trained_part(model: Any, params: Any) -> Any:
    """Return the trained arrays of a module that has its own, else `params`."""
    if params is not None:
        return params
    model = model.module if isinstance(model, FunctionOfModule) else model
    library = _library_of(model)
    if library == "nnx":
        from flax import nnx

        return nnx.split(model, nnx.Param, ...)[1]
    if library == "equinox":
        import equinox

        return equinox.filter(model, equinox.is_inexact_array)
    return None


def with_params(model: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a module of nnx or equinox whose trained arrays `convert` has made; others as they are."""
    if isinstance(model, FunctionOfModule):
        return replace(model, module=with_params(model.module, convert))
    library = _library_of(model)
    if library == "nnx":
        from flax import nnx

        graph, own, rest = nnx.split(model, nnx.Param, ...)
        return nnx.merge(graph, convert(own), rest)
    if library == "equinox":
        import equinox

        own, rest = equinox.partition(model, equinox.is_inexact_array)
        return equinox.combine(convert(own), rest)
    return model


def _require_arguments(function: Any, state: Any) -> None:
    """Raise PolyaccelError for a function that takes a state and gets none, or the other way round."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    if _takes(signature, 3) and not _takes(signature, 4) and state is not None:
        hint = "take the state as fn(params, state, batch, rng), and return (loss, new_state)"
        raise PolyaccelError("a function of three arguments got state=", hint=hint, value=str(signature))
    if _takes(signature, 4) and not _takes(signature, 3) and state is None:
        hint = "pass state= to initialize, or let the function be fn(params, batch, rng)"
        raise PolyaccelError("a function of four arguments got no state=", hint=hint, value=str(signature))
    wanted = "fn(params, batch, rng)" if state is None else "fn(params, state, batch, rng)"
    if not _takes(signature, 3 if state is None else 4):
        hint = f"let it be {wanted}; rng is a random key, and None in evaluation"
        raise PolyaccelError(f"the function takes {signature}, not {wanted}", hint=hint, value=str(signature))


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _from_linen(model: Any, params: Any, state: Any, with_units: bool) -> tuple[LossFn, Any, Any]:
    from flax import linen
    from flax.errors import InvalidRngError

    if params is None:
        raise PolyaccelError("a flax.linen module has no parameters", hint="pass params=model.init(key, ...)")
    if state is not None and not isinstance(state, Mapping):
        kind, hint = type(state).__name__, 'pass a mapping of collections: state={"batch_stats": ...}'
        raise PolyaccelError(f"the state of a flax.linen module is a {kind}", hint=hint, value=kind)
    interceptor = linen_interceptor(blocks_of(params) if with_units else ())
    of_call, streams = ModuleCall(type(model)), LinenStreams()

    def run(params: Any, collections: Mapping[str, Any], batch: Any, rng: Any) -> Any:
        args, named = of_call.arguments(batch, trains=rng is not None)
        mutable: Any = list(collections) if collections else False

        def call(rngs: Any) -> Any:
            return model.apply({"params": params, **collections}, *args, rngs=rngs, mutable=mutable, **named)

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

    if not state:
        return lambda params, batch, rng: run(params, {}, batch, rng), params, None

    def carrying(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        found, updates = run(params, state, batch, rng)
        return with_new_state(found, updates)

    return carrying, params, state


def _from_nnx(model: Any, params: Any, state: Any, with_units: bool, function: Any = None) -> tuple[LossFn, Any, Any]:
    from flax import nnx

    _require_own(params, state)
    modules = list(model.values()) if isinstance(model, dict) else model
    modules = modules if isinstance(modules, (list, tuple)) else [modules]
    for module in modules:
        module.eval()
    still, *_ = nnx.split(model, nnx.Param, nnx.RngState, ...)
    for module in modules:
        module.train()
    moving, trained, rest, others = nnx.split(model, nnx.Param, nnx.RngState, ...)
    # whose paths are the names of layers, without the variables around the arrays
    named, carried = nnx.to_pure_dict(trained), nnx.to_pure_dict(others)
    for pure, whole in ((named, trained), (carried, others)):
        if any(one is not other for one, other in zip(jax.tree.leaves(pure), jax.tree.leaves(whole), strict=True)):
            raise InvariantError("flax orders a state and its pure dict differently")
    blocks = blocks_of(named) if with_units else ()
    of_params, of_state = jax.tree.structure(trained), jax.tree.structure(others)
    leaves, structure = jax.tree.flatten(rest)
    is_key = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    call = _call_of(model, function)

    def run(params: Any, state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        drawn = [
            jax.random.fold_in(rng, at) if fresh and rng is not None else leaf
            for at, (leaf, fresh) in enumerate(zip(leaves, is_key, strict=True))
        ]
        graph = still if rng is None else moving
        variables = jax.tree.unflatten(of_params, jax.tree.leaves(params))
        kept = jax.tree.unflatten(of_state, jax.tree.leaves(state))
        merged = nnx_with_units(nnx.merge(graph, variables, jax.tree.unflatten(structure, drawn), kept), blocks)
        found = call(merged, batch, rng)
        return found, nnx.to_pure_dict(nnx.state(merged, nnx.Not(nnx.Any(nnx.Param, nnx.RngState, nnx.Intermediate))))

    if not jax.tree.leaves(carried):
        return lambda params, batch, rng: run(params, {}, batch, rng)[0], named, None
    return lambda params, state, batch, rng: with_new_state(*run(params, state, batch, rng)), named, carried


def _call_of(model: Any, function: Any) -> Callable[[Any, Any, Any], Any]:
    """(module, batch, rng) -> what the function gives, or without one the module's own call."""
    if function is not None:
        _require_arguments(function, None)
        found: Callable[[Any, Any, Any], Any] = function
        return found
    of_call = ModuleCall(type(model))

    def call(module: Any, batch: Any, rng: Any) -> Any:
        args, named = of_call.arguments(batch, trains=rng is not None)
        return module(*args, **named)

    return call


def _from_equinox(
    model: Any, params: Any, state: Any, with_units: bool, function: Any = None
) -> tuple[LossFn, Any, Any]:
    import equinox

    _require_own(params, None)
    parts = jax.tree.leaves(model, is_leaf=lambda part: isinstance(part, equinox.nn.StateIndex))
    if state is None and any(isinstance(part, equinox.nn.StateIndex) for part in parts):
        kind = type(model).__name__
        raise PolyaccelError(
            f"a {kind} has state, and initialize got none",
            hint=f"model, state = equinox.nn.make_with_state({kind})(...), then initialize(model=model, state=state)",
            value=kind,
        )
    arrays, moving = equinox.partition(model, equinox.is_inexact_array)
    # A function whose tree is arrays alone may hold the other part of equinox.partition. equinox.combine needs the same
    # classes in both, and units have other classes. The switches of inference are in that other part.
    is_part = function is not None and all(map(equinox.is_array, jax.tree.leaves(model)))
    evaluated = model if is_part else equinox.nn.inference_mode(model)
    _, still = equinox.partition(evaluated, equinox.is_inexact_array)
    blocks = blocks_of(arrays) if with_units and not is_part else ()

    def combined(params: Any, rng: Any) -> Any:
        return equinox_with_units(equinox.combine(params, still if rng is None else moving), blocks)

    if function is not None:
        _require_arguments(function, state)
        if state is None:
            return lambda params, batch, rng: function(combined(params, rng), batch, rng), arrays, None
        carrying = lambda params, state, batch, rng: function(combined(params, rng), state, batch, rng)  # noqa: E731
        return carrying, arrays, state
    of_call = ModuleCall(type(model))
    if state is not None and "state" not in of_call.names:
        raise PolyaccelError(
            f"{of_call.name} has no argument state, and initialize got one",
            hint="take it as __call__(self, ..., state) and return (loss, state), or pass a function fn(params, state, "
            "batch, rng)",
            value=of_call.name,
        )

    def run(params: Any, carried: Mapping[str, Any], batch: Any, rng: Any) -> Any:
        key = {"key": rng} if "key" in of_call.names else {}
        args, named = of_call.arguments(batch, trains=rng is not None, **key, **carried)
        return combined(params, rng)(*args, **named)

    if state is None:
        return lambda params, batch, rng: run(params, {}, batch, rng), arrays, None
    return lambda params, state, batch, rng: run(params, {"state": state}, batch, rng), arrays, state


_KINDS: tuple[tuple[str, str, Callable[..., tuple[LossFn, Any, Any]]], ...] = (
    ("flax.linen", "Module", _from_linen),
    ("flax.nnx", "Module", _from_nnx),
    ("equinox", "Module", _from_equinox),
)


def _require_own(params: Any, state: Any) -> None:
    for name, given in (("params", params), ("state", state)):
        if given is not None:
            hint = f"leave {name} out"
            raise PolyaccelError(f"{name} were passed with a module that has its own", hint=hint, value=name)
