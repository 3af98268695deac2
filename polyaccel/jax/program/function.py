"""The user's function, compiled: loss and gradients of one micro-batch, and the loss alone.

[Note: Constants of a program]
A value that a function closes over becomes a constant of the compiled program. A parameter there would keep the value
of the first call for good and have no gradient, so before a program runs for the first time its constants, and those of
the jitted functions in it, are compared with the memory of parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from polyaccel.errors import ConfigError, PolyaccelError, Problem, ShardingError
from polyaccel.jax.program.batches import cast_floats
from polyaccel.jax.program.carried import StateForm
from polyaccel.jax.program.units import UnitRecomputation, recomputed_by
from polyaccel.jax.views import ParamViews, address_of

LossFn = Callable[..., Any]
"""`fn(params, batch, rng)` -> a scalar loss, or (loss, auxiliary output). In evaluation `rng` is None. With state it is
`fn(params, state, batch, rng)`, see `polyaccel.jax.program.carried`."""


class LossFunction:
    """`fn` on parameters of the given tree structure, `is_trained` for each leaf.

    `cast_inputs` is the type that floating arrays of a batch are converted to; None leaves them as they are.
    `recomputation` computes its units again in backward; None keeps their values. With a `state` every batch is a
    `Carried`, and every auxiliary output a `Result`.
    """

    def __init__(
        self,
        fn: LossFn,
        structure: Any,
        is_trained: Sequence[bool],
        views: ParamViews,
        originals: Mapping[str, Any],
        cast_inputs: Any = None,
        recomputation: UnitRecomputation | None = None,
        state: StateForm | None = None,
    ) -> None:
        self._fn = fn
        self._state = state
        self._recomputation = recomputation
        self._structure = structure
        self._is_trained = tuple(is_trained)
        self._views = views
        self._originals = {fqn: ref(array) for fqn, array in originals.items()}
        self._cast_inputs = cast_inputs
        self._with_gradients = jax.jit(self.differentiate)
        self._without = jax.jit(self._evaluate)
        self._checked: set[Any] = set()
        self.own_meshes: Mapping[str, int] = {}
        """The operations by which the engine's own programs name a mesh, each with its number of devices."""
        self.must_use: Collection[str] = ()
        """Axes of the mesh that constraints of the function have to name."""

    def gradients(self, leaves: Sequence[Any], batch: Any, rng: Any, factor: float) -> tuple[Any, Any, list[Any]]:
        """Return (loss, auxiliary output, gradients of `loss * factor`), computed."""
        arguments = self._arguments(leaves, batch, rng, factor)
        self.check(self._with_gradients, arguments)
        loss, aux, gradients = jax.block_until_ready(self._with_gradients(*arguments))
        return loss, aux, gradients

    def evaluate(self, leaves: Sequence[Any], batch: Any) -> tuple[Any, Any]:
        """(loss, auxiliary output), computed, with None for `rng`. Raises as `gradients` does."""
        arguments = (list(leaves), batch)
        self.check(self._without, arguments)
        loss, aux = jax.block_until_ready(self._without(*arguments))
        return loss, aux

    def compiled(self, leaves: Sequence[Any], batch: Any, rng: Any, factor: float) -> jax.stages.Compiled:
        """The compiled program of `gradients`, with the memory and operations that it needs."""
        return self._with_gradients.lower(*self._arguments(leaves, batch, rng, factor)).compile()

    def _arguments(self, leaves: Sequence[Any], batch: Any, rng: Any, factor: float) -> tuple[Any, ...]:
        trained = [leaf for leaf, wanted in zip(leaves, self._is_trained, strict=True) if wanted]
        frozen = [leaf for leaf, wanted in zip(leaves, self._is_trained, strict=True) if not wanted]
        return trained, frozen, batch, rng, np.float32(factor)

    def differentiate(self, trained: Any, frozen: Any, batch: Any, rng: Any, factor: Any) -> Any:
        """The results of `gradients`, to be traced by JAX: leaves in tree order, the trained ones and the others."""

        def scaled(trained: Any) -> Any:
            remaining, others = iter(trained), iter(frozen)
            leaves = [next(remaining) if wanted else next(others) for wanted in self._is_trained]
            loss, aux = self.call(leaves, batch, rng)
            return loss * factor, (loss, aux)

        gradients, (loss, aux) = jax.grad(scaled, has_aux=True)(trained)
        return loss, aux, gradients

    def _evaluate(self, leaves: Any, batch: Any) -> Any:
        return self.call(leaves, batch, None)

    def call(self, leaves: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        """(loss as at least float32, auxiliary output), to be traced by JAX."""
        carried, state = batch, self._state
        batch = batch if state is None else carried.batch
        if self._cast_inputs is not None:
            batch = cast_floats(batch, self._cast_inputs)
        recomputation = None if rng is None else self._recomputation  # an evaluation keeps nothing
        before = () if state is None else (state.tree(carried.state),)
        with recomputed_by(recomputation):
            found = _run(self._fn, jax.tree_util.tree_unflatten(self._structure, leaves), *before, batch, rng)
        if recomputation is not None and not recomputation.count:
            key, expected = "activation_checkpointing.enabled", "the function has no units to recompute"
            hint = "wrap its blocks: polyaccel.jax.unit(block)(params['layers'][i], x); or use jax.checkpoint in it"
            raise ConfigError([Problem(key, True, expected, hint)])
        return loss_and_aux(found) if state is None else loss_and_aux(state.split(found))

    def check(self, compiled: Any, arguments: Any) -> None:
        """`refuse_closed_over` and `refuse_meshes` for a program that is new."""
        leaves, structure = jax.tree.flatten(arguments)
        signature = (id(compiled), structure, tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves))
        if signature in self._checked:
            return
        program = compiled.trace(*arguments).jaxpr
        self.refuse_closed_over(program)
        refuse_meshes(program, self.own_meshes)
        require_axes(program, self.must_use)
        self._checked.add(signature)

    def refuse_closed_over(self, program: ClosedJaxpr) -> None:
        """Raise ShardingError for closed-over parameters. See [Note: Constants of a program]."""
        require_no_parameter(program, self._owner_of)

    def _owner_of(self, constant: Any) -> str | None:
        address = address_of(constant)
        if address is None:
            return None
        found = (fqn for fqn, original in self._originals.items() if address_of(original()) == address)
        return self._views.owner_of(constant) or next(found, None)


def loss_and_aux(found: Any) -> tuple[Any, Any]:
    """Return (loss as float32 or wider, auxiliary output) of a user's function."""
    loss, aux = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(loss, (jax.Array, np.ndarray, np.generic, float, int)):
        kind = f"{type(loss).__name__} of {len(loss)}" if isinstance(loss, _CONTAINERS) else type(loss).__name__
        raise PolyaccelError(
            f"the function returned a {kind} where a scalar loss was expected",
            hint="return the one loss to train with, for example sum(losses.values()), or (loss, auxiliary output), of "
            "which the second is any pytree",
            value=kind,
        )
    if jnp.size(loss) != 1 or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise PolyaccelError(
            f"the function returned {jax.tree.map(jnp.shape, found)} where a scalar loss was expected",
            hint="return a scalar, for example losses.mean(), or (loss, auxiliary output)",
            value=jnp.shape(loss),
        )
    wide = jnp.promote_types(jnp.result_type(loss), jnp.float32)
    return jnp.reshape(loss, ()).astype(wide), aux


_CONTAINERS = (tuple, list, dict)


def _run(fn: LossFn, *arguments: Any) -> Any:
    """What `fn` gives. Raises PolyaccelError where it asks for a mesh that an engine's program does not have."""
    try:
        return fn(*arguments)
    except PolyaccelError:
        raise
    except (NameError, TypeError, ValueError) as error:
        if _OF_MESHES.search(str(error)) is None:
            raise
        raise PolyaccelError(
            f"the function uses a mesh or an axis that the engine's program lacks: {type(error).__name__}: {error}",
            hint=_NO_MESH,
            value=str(error),
        ) from error


_OF_MESHES = re.compile(r"mesh\b|axis name|NamedSharding|PartitionSpec|pspec", re.IGNORECASE)
_NO_MESH = (
    'pass the mesh: initialize(..., mesh=mesh, param_specs=specs) with "jax": {"execution": "native"}; or leave '
    "with_sharding_constraint, shard_map, pmean and the like out: the engine cuts the batch and averages the gradients"
)


def refuse_meshes(program: ClosedJaxpr, own: Mapping[str, int]) -> None:
    """Raise PolyaccelError for a program that asks for other devices than the engine's `own`."""
    for equation in _equations(program.jaxpr):
        name = equation.primitive.name
        mesh = equation.params.get("mesh", getattr(equation.params.get("sharding"), "mesh", None))
        count = getattr(mesh, "size", 1)
        if name in _SPREADING and count > 1 and count != own.get(name):
            raise PolyaccelError(
                f"the function asks for {name} over {count} devices, axes {dict(mesh.shape)}",
                hint=_NO_MESH,
                value=name,
            )


def require_axes(program: ClosedJaxpr, axes: Collection[str]) -> None:
    """Raise ShardingError for a mesh's axis that no constraint of a program names: it would do nothing."""
    missing = set(axes)
    if missing:
        for equation in _equations(program.jaxpr):
            given = equation.params
            named = [getattr(given.get(key), "spec", None) for key in ("sharding", "dst_sharding")]
            named += [given.get(key) for key in ("in_specs", "out_specs")]
            missing -= {axis for axis in missing if f"'{axis}'" in str(named)}
    if missing:
        axis = min(missing)
        raise ShardingError(
            f"the config's axis {axis!r} cuts nothing: neither a parameter nor a constraint of the function names it",
            hint="cut activations in the function: nn.with_logical_constraint(x, ('batch', 'length', 'embed')), or "
            f"jax.lax.with_sharding_constraint(x, PartitionSpec('data', {axis!r}))",
            value=axis,
        )


_SPREADING = frozenset({"sharding_constraint", "shard_map", "reshard", "mesh_cast"})


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from _equations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def require_no_parameter(program: ClosedJaxpr, owner_of: Callable[[Any], str | None]) -> None:
    """Raise ShardingError for a constant of `program` that is a parameter. See [Note: Constants of a program]."""
    for constant in _constants(program):
        fqn = owner_of(constant)
        if fqn is not None:
            raise ShardingError(
                f"the function closed over parameter {fqn!r}: it would keep today's value for good",
                hint="use what the function gets as its first argument; for weights that are to stay as they are (a "
                "reference or target network) close over copies: jax.tree.map(jnp.copy, params)",
                value=fqn,
            )


def _constants(program: ClosedJaxpr) -> Iterator[Any]:
    yield from program.consts
    for equation in program.jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from _constants(inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ()))


def _is_program(value: Any) -> bool:
    return isinstance(value, (ClosedJaxpr, Jaxpr))
