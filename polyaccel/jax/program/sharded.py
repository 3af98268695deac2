"""A function in training whose parameters are sharded: one jitted program that gathers and reduces unit by unit.

A program is traced twice. The first time finds which parameters the function uses inside units
(`polyaccel.jax.program.units`) and which it uses itself; the latter are the root's and stay gathered for the whole
program. The second time puts the calls in. Where a parameter stands for good in memory that JAX sees (shared memory,
small parameters), nothing is gathered and the program reads it there; its gradients are reduced unit by unit too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from logging import getLogger
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from polyaccel.errors import PolyaccelError
from polyaccel.jax.program.function import LossFunction
from polyaccel.jax.program.gathered_units import Members, UnitMembers, evaluate, fetch_root, run_unit
from polyaccel.jax.program.params import Leaf, ShardedParams
from polyaccel.jax.program.units import UnitTracer, call_layer, traced_by

log = getLogger(__name__)


class MakeMembers(Protocol):
    """Makes the members of a unit."""

    def __call__(self, leaves: Sequence[Leaf], *, is_scanned: bool) -> UnitMembers:
        """The members `leaves`; with `is_scanned`, of each layer of a scan."""


class ShardedFunction:
    """`function` on `leaves`, which `params` gathers."""

    def __init__(self, function: LossFunction, leaves: Sequence[Leaf], params: ShardedParams) -> None:
        self._function = function
        self._leaves = tuple(leaves)
        self._params = params
        self._has_warned = False
        self._with_gradients = jax.jit(self._differentiate)
        self._without = jax.jit(self._evaluate)

    def gradients(self, leaves: Sequence[Any], batch: Any, rng: Any, factor: float) -> tuple[Any, Any, list[Any]]:
        """Return as `LossFunction.gradients`, without gradients: these have been handed over."""
        arguments = (list(leaves), self._params.calls.token, batch, rng, np.float32(factor))
        loss, aux, _ = self._run(self._with_gradients, arguments, is_training=True)
        return loss, aux, []

    def evaluate(self, leaves: Sequence[Any], batch: Any) -> tuple[Any, Any]:
        """Like `LossFunction.evaluate`, with the leaves that are whole."""
        loss, aux, _ = self._run(self._without, (list(leaves), self._params.calls.token, batch), is_training=False)
        return loss, aux

    def compiled(self, leaves: Sequence[Any], batch: Any, rng: Any, factor: float) -> jax.stages.Compiled:
        """The compiled program of `gradients`, with the memory and operations that it needs."""
        arguments = (list(leaves), self._params.calls.token, batch, rng, np.float32(factor))
        return self._with_gradients.lower(*arguments).compile()

    def close(self) -> None:
        """Release the calls, once no program runs any more."""
        self._params.calls.close()

    def _run(self, program: Any, arguments: tuple[Any, ...], *, is_training: bool) -> Any:
        self._function.check(program, arguments)
        self._params.begin(is_training=is_training)
        try:
            outcome = jax.block_until_ready(program(*arguments))
        except jax.errors.JaxRuntimeError as error:
            self._params.raise_failure(error)
        self._params.end()
        return outcome

    def _differentiate(self, whole: Any, token: Any, batch: Any, rng: Any, factor: Any) -> Any:
        def scaled(token: Any) -> Any:
            loss, aux, token = self._call(whole, token, batch, rng)
            return (loss * factor, token), (loss, aux)

        (outcome, token), pull, (loss, aux) = jax.vjp(scaled, token, has_aux=True)
        (token,) = pull((jnp.ones_like(outcome), token))  # which begins when the forward pass has made its last call
        return loss, aux, token

    def _evaluate(self, whole: Any, token: Any, batch: Any) -> Any:
        return self._call(whole, token, batch, None)

    def _call(self, whole: Any, token: Any, batch: Any, rng: Any) -> tuple[Any, Any, Any]:
        """(loss, auxiliary output, the token after everything)."""

        uses: Counter[int] = Counter()

        def members(leaves: Sequence[Leaf], *, is_scanned: bool) -> Members:
            return Members(leaves, self._params, uses, is_scanned=is_scanned)

        def call(leaves: Sequence[Any]) -> Any:
            return self._function.call(leaves, batch, rng)

        (loss, aux), token, has_units = trace_by_units(self._leaves, whole, token, members, call)
        if not (has_units or self._has_warned or all(leaf.is_whole for leaf in self._leaves)):
            self._has_warned = True
            warn_of_no_units(self._params.rank)
        return loss, aux, token


def trace_by_units(
    leaves: Sequence[Leaf], whole: Sequence[Any], token: Any, members: MakeMembers, call: Callable[[Sequence[Any]], Any]
) -> tuple[Any, Any, bool]:
    """(results of `call` on the leaves, the token after everything, whether there were units), while JAX traces.

    `whole` are the arrays of those leaves that are whole, and `members` makes what fetches and reduces those of a unit.
    """
    survey = _Survey(leaves)
    direct = survey.run(call)
    program = _Program(leaves, direct, members, whole, token)
    found = program.run(call)
    return found, program.token, bool(survey.in_units)


def warn_of_no_units(rank: int) -> None:
    """Log on rank 0 how a function gathers fewer parameters at a time."""
    if rank == 0:
        log.warning(
            "the function has no units: all parameters are gathered before it and freed after it. To gather one "
            "block at a time, wrap it: polyaccel.jax.unit(block)(params['layers'][i], x). Repeated blocks of flax "
            "and equinox modules that initialize got are units, but not inside vmap, scan, jit or checkpoint"
        )


class _Tracer(UnitTracer):
    """The common part of both traces: finds the engine's leaves among the arguments of a unit."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._leaves = leaves
        self._known: dict[int, tuple[Any, Leaf]] = {}
        """The leaves that units gather, by the id of the array that stands for each."""
        self._trace: Any = None

    def _begin(self, arrays: Sequence[Any], of: Sequence[Leaf]) -> None:
        self._known = {id(array): (array, leaf) for array, leaf in zip(arrays, of, strict=True)}
        self._trace = get_opaque_trace_state()

    def _end(self) -> None:
        """Forget the arrays of a trace that has ended: they must not outlive it (`jax.checking_leaks`)."""
        self._known, self._trace = {}, None

    def _leaf(self, value: Any) -> Leaf | None:
        found = self._known.get(id(value))
        return None if found is None else found[1]

    @property
    def is_at_home(self) -> bool:
        return bool(get_opaque_trace_state() == self._trace)

    def _require_own_trace(self) -> None:
        if not self.is_at_home:
            raise PolyaccelError(
                "a unit was called inside a transformation of the function's own (scan, cond, checkpoint, jit, grad)",
                hint="call units where the function itself runs, loop over layers with polyaccel.jax.scan_units, "
                "and put jax.checkpoint inside the block",
            )

    def _require_stacked(self, leaf: Leaf) -> None:
        if not leaf.is_stacked:
            raise PolyaccelError(
                f"scan_units got parameter {leaf.fqn!r}, which was sharded as one array",
                hint=f"pass initialize(..., stacked=[{leaf.fqn.rpartition('.')[0] or leaf.fqn!r}])",
                value=leaf.fqn,
            )


class _Survey(_Tracer):
    """Traces the function to see where it uses its parameters. `in_units`: the indices of the leaves that units got."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        super().__init__(leaves)
        self.in_units: set[int] = set()

    def run(self, call: Callable[[Sequence[Any]], Any]) -> set[int]:
        """The indices of the leaves that the function uses itself, or uses nowhere."""

        def traced(arrays: list[Any]) -> Any:
            self._begin(arrays, self._leaves)
            try:
                with traced_by(self):
                    return call(arrays)
            finally:
                self._end()

        structs = [jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype.value)) for leaf in self._leaves]
        jaxpr = jax.make_jaxpr(traced)(structs).jaxpr
        used = {id(atom) for equation in jaxpr.eqns for atom in equation.invars} | {id(atom) for atom in jaxpr.outvars}
        return {at for at, var in enumerate(jaxpr.invars) if id(var) in used or at not in self.in_units}

    def call(self, block: Callable[..., Any], params: Any, args: tuple[Any, ...]) -> Any:
        self._require_own_trace()
        params = jax.tree.map(self._stand_in, params)
        with traced_by(None):
            return block(params, *args)

    def scan(self, block: Callable[..., Any], carry: Any, stacked: Any, xs: Any) -> Any:
        self._require_own_trace()
        for value in jax.tree.leaves(stacked):
            if (leaf := self._leaf(value)) is not None:
                self._require_stacked(leaf)
        parts = (jax.tree.map(self._stand_in, stacked), xs)
        with traced_by(None):
            carry, _ = jax.lax.scan(lambda carry, part: (call_layer(block, carry, *part), None), carry, parts)
        return carry

    def _stand_in(self, value: Any) -> Any:
        """Zeros for a parameter, so that only uses outside of units are uses of it."""
        leaf = self._leaf(value)
        if leaf is None:
            return value
        self.in_units.add(leaf.index)
        return jnp.zeros(value.shape, value.dtype)


class _Program(_Tracer):
    """Traces the function with the calls that gather and reduce; `token` is that of the last call so far.

    `direct` are the leaves of the root, `whole` the arrays of those that are whole.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        direct: set[int],
        members: MakeMembers,
        whole: Sequence[Any],
        token: Any,
    ) -> None:
        super().__init__(leaves)
        self.token = token
        self._members = members
        self._direct = direct
        self._whole = dict(zip([leaf.index for leaf in leaves if leaf.is_whole], whole, strict=True))

    def run(self, call: Callable[[Sequence[Any]], Any]) -> Any:
        """The results of the function."""
        root = [leaf for leaf in self._leaves if leaf.index in self._direct]
        members = self._members(root, is_scanned=False)
        self.token, found = fetch_root(members, self.token, self._whole_of(root))
        in_units = [leaf for leaf in self._leaves if leaf.index not in self._direct]
        hidden = [_unusable(leaf) for leaf in in_units]
        self._begin(hidden, in_units)
        of_root, of_units = iter(found), iter(hidden)
        arrays = [next(of_root) if leaf.index in self._direct else next(of_units) for leaf in self._leaves]
        try:
            with traced_by(self):
                return call(arrays)
        finally:
            self._end()

    def call(self, block: Callable[..., Any], params: Any, args: tuple[Any, ...]) -> Any:
        self._require_own_trace()
        values, structure = jax.tree.flatten((params, args))
        places = {at: leaf for at, value in enumerate(values) if (leaf := self._leaf(value)) is not None}
        inputs = {at: value for at, value in enumerate(values) if at not in places and _is_array(value)}
        members = self._members(list(places.values()), is_scanned=False)
        shapes: list[Any] = []

        def flat(of_unit: Sequence[Any], after: Sequence[Any]) -> list[Any]:
            found = dict(zip(places, of_unit, strict=True)) | dict(zip(inputs, after, strict=True))
            params, args = jax.tree.unflatten(structure, [found.get(at, value) for at, value in enumerate(values)])
            with traced_by(None):
                outputs, shape = jax.tree.flatten(block(params, *args))
            shapes.append(shape)
            return list(outputs)

        self.token, outputs = self._run(members, flat, self.token, None, list(inputs.values()))
        return jax.tree.unflatten(shapes[-1], outputs)

    def scan(self, block: Callable[..., Any], carry: Any, stacked: Any, xs: Any) -> Any:
        self._require_own_trace()
        values, structure = jax.tree.flatten(stacked)
        places = {at: leaf for at, value in enumerate(values) if (leaf := self._leaf(value)) is not None}
        for leaf in places.values():
            self._require_stacked(leaf)
        others = {at: value for at, value in enumerate(values) if at not in places}
        members = self._members(list(places.values()), is_scanned=True)
        start, carried = jax.tree.flatten(carry)
        lengths = {len(leaf.names) for leaf in places.values()} | {jnp.shape(value)[0] for value in others.values()}
        if len(lengths) != 1:
            raise PolyaccelError(
                f"scan_units got parameters of {sorted(lengths)} layers", hint="stack as many of each", value=lengths
            )

        def one(state: Any, part: Any) -> Any:
            token, carry = state
            index, others_here, x = part
            given = [*carry, *others_here, *jax.tree.leaves(x)]

            def flat(of_unit: Sequence[Any], after: Sequence[Any]) -> list[Any]:
                found = dict(zip(places, of_unit, strict=True))
                found |= dict(zip(others, after[len(carry) :], strict=False))
                layer = jax.tree.unflatten(structure, [found[at] for at in range(len(values))])
                rest = jax.tree.unflatten(jax.tree.structure(x), after[len(carry) + len(others) :])
                with traced_by(None):
                    after_layer = call_layer(block, jax.tree.unflatten(carried, after[: len(carry)]), layer, rest)
                return list(jax.tree.leaves(after_layer))

            return self._run(members, flat, token, index, given), None

        parts = (jnp.arange(lengths.pop(), dtype=jnp.int32), list(others.values()), xs)
        (self.token, found), _ = jax.lax.scan(one, (self.token, [jnp.asarray(value) for value in start]), parts)
        return jax.tree.unflatten(carried, found)

    def _run(
        self, members: UnitMembers, flat: Any, token: Any, index: Any, after: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """The unit, with the values that its block closes over as inputs: it is differentiated by its own rules."""
        after = [jnp.asarray(value) for value in after]
        traced = jax.make_jaxpr(flat)(members.structs(), after)
        count = len(members.leaves) + len(after)

        def body(of_unit: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
            given, consts = [*of_unit, *inputs][:count], [*of_unit, *inputs][count:]
            return evaluate(traced.jaxpr, consts, given)

        return run_unit(members, body, token, index, self._whole_of(members.leaves), after, traced.consts)

    def _whole_of(self, leaves: Sequence[Leaf]) -> list[Any]:
        return [self._whole[leaf.index] for leaf in leaves if leaf.is_whole]


def _unusable(leaf: Leaf) -> Any:
    """A stand-in for a parameter outside of its unit, where the survey found no use of it."""
    fill = jnp.nan if leaf.dtype.is_floating else 0
    return jnp.full(leaf.shape, fill, jnp.dtype(leaf.dtype.value))


def _is_array(value: Any) -> bool:
    """Whether this is an array. Numbers of Python are none, because a block may branch on them."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic))
