"""A unit in a program that is being traced: parameters fetched before its block, gradients handed over after it.

[Note: Token-ordered collectives]
XLA runs operations that do not depend on each other in any order, or at once; collectives must run in one order on
every rank. So each call takes a token and gives one back, and the token goes through all units of the function and, as
the cotangent of itself, back through them. The token alone would allow all parameters to be fetched at the beginning.
So a fetch also waits for the inputs of its unit: activations in the forward pass, cotangents in the backward pass,
before which the unit after it has handed its gradients over. Hence parameters of one unit are there at a time, in
addition to those of the root.

[Note: Residuals of a unit]
Differentiated as it stands, a block would keep its parameters, and values that follow from them alone (casts,
transposes), until its backward pass. So those residuals are left out, and computed again from parameters that are
fetched again. All others are kept: no activation is computed twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal, Var

from polyaccel.core.buffer import Buffer
from polyaccel.jax.program.params import Leaf, ShardedParams

Body = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""(whole parameters, inputs) -> outputs: arrays, flat."""


class UnitMembers(Protocol):
    """The parameters of one unit in one program."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The parameters."""

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The parameters as the unit sees them."""

    def fetch(self, token: Any, index: Any, whole: Sequence[Any], after: Sequence[Any]) -> tuple[Any, list[Any]]:
        """(token, parameters), once `after` is there. `whole` are those of whole leaves; `index` is that of a layer."""

    def reduce(self, token: Any, index: Any, cotangents: Sequence[Any]) -> Any:
        """The token, after the gradients of the trained parameters were handed over."""


class Members:
    """The parameters that the engine gathers for one unit in one program.

    With `is_scanned` they are those of each layer of a scan, which has an index.

    `uses` counts the uses of buckets over the program.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        params: ShardedParams,
        uses: Counter[int],
        *,
        is_scanned: bool = False,
    ) -> None:
        self._leaves = tuple(leaves)
        self._params = params
        self._uses = uses
        self._is_scanned = is_scanned
        self._fetched = [leaf for leaf in leaves if not leaf.is_whole]
        self._trained = [leaf for leaf in leaves if leaf.is_trained]
        count = max((len(leaf.names) for leaf in leaves), default=0) if is_scanned else 1
        for index in range(count):
            names = [name for leaf in self._trained for name in self._names(leaf, index)]
            uses.update(params.buckets(names))

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """As `UnitMembers.leaves`."""
        return self._leaves

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """As `UnitMembers.structs`."""
        return [self._struct(leaf) for leaf in self.leaves]

    def fetch(self, token: Any, index: Any, whole: Sequence[Any], after: Sequence[Any]) -> tuple[Any, list[Any]]:
        """As `UnitMembers.fetch`. `whole` are those that need not be fetched; `index` is None without a scan."""
        if not self._fetched:
            return token, list(whole)

        def run(operands: Sequence[Buffer], results: Sequence[Buffer]) -> None:
            self._params.fetch(*self._parts(self._fetched, self._index_in(operands), results))

        waited = [array for array in after if jnp.issubdtype(array.dtype, jnp.inexact)]
        structs = [self._struct(leaf) for leaf in self._fetched]
        token, found = self._params.calls.new(run)(token, [*self._before(index), *waited], structs)
        remaining, others = iter(found), iter(whole)
        return token, [next(others) if leaf.is_whole else next(remaining) for leaf in self.leaves]

    def reduce(self, token: Any, index: Any, cotangents: Sequence[Any]) -> Any:
        """As `UnitMembers.reduce`."""
        if not self._trained:
            return token

        def run(operands: Sequence[Buffer], results: Sequence[Buffer]) -> None:
            gradients = operands[self._is_scanned :]
            self._params.reduce(*self._parts(self._trained, self._index_in(operands), gradients), self._uses)

        pairs = zip(self.leaves, cotangents, strict=True)
        gradients = [cotangent for leaf, cotangent in pairs if leaf.is_trained]
        token, _ = self._params.calls.new(run)(token, [*self._before(index), *gradients], ())
        return token

    def _struct(self, leaf: Leaf) -> jax.ShapeDtypeStruct:
        shape = leaf.shape[1:] if self._is_scanned else leaf.shape
        return jax.ShapeDtypeStruct(shape, jnp.dtype(leaf.dtype.value))

    def _names(self, leaf: Leaf, index: int) -> Sequence[str]:
        return leaf.names[index : index + 1] if self._is_scanned else leaf.names

    def _parts(self, leaves: Sequence[Leaf], index: int, buffers: Sequence[Buffer]) -> tuple[list[str], list[Buffer]]:
        """The engine's names of `leaves`, and the part of their buffers for each."""
        names: list[str] = []
        parts: list[Buffer] = []
        for leaf, buffer in zip(leaves, buffers, strict=True):
            found = self._names(leaf, index)
            numel = buffer.numel // len(found)
            names += found
            parts += [buffer.view(at * numel, numel) for at in range(len(found))]
        return names, parts

    def _before(self, index: Any) -> list[Any]:
        """The operands before the others."""
        return [index] if self._is_scanned else []

    def _index_in(self, operands: Sequence[Buffer]) -> int:
        return int.from_bytes(operands[0].to_bytes(), "little") if self._is_scanned else 0


def fetch_root(members: UnitMembers, token: Any, whole: Sequence[Any]) -> tuple[Any, list[Any]]:
    """(token, parameters) that stay until the end; their gradients are handed over at the end of the backward pass."""

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def root(token: Any, whole: Any) -> Any:
        return members.fetch(token, None, whole, ())

    def forward(token: Any, whole: Any) -> Any:
        return root(token, whole), None

    def backward(kept: None, cotangents: Any) -> Any:
        token, of_params = cotangents
        return members.reduce(token, None, of_params), None

    root.defvjp(forward, backward)
    found: tuple[Any, list[Any]] = root(token, list(whole))
    return found


def run_unit(
    members: UnitMembers,
    body: Body,
    token: Any,
    index: Any,
    whole: Sequence[Any],
    after: Sequence[Any],
    consts: Sequence[Any],
) -> tuple[Any, list[Any]]:
    """(token, outputs) of `body` on the unit's parameters and the inputs `[*after, *consts]`.

    See [Note: Token-ordered collectives] and [Note: Residuals of a unit].
    """
    count = len(after)

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def unit(token: Any, index: Any, whole: Any, after: Any, consts: Any) -> Any:
        token, params = members.fetch(token, index, whole, after)
        return token, body(params, [*after, *consts])

    def forward(token: Any, index: Any, whole: Any, after: Any, consts: Any) -> Any:
        token, params = members.fetch(token, index, whole, after)
        differentiated = Differentiated.trace(body, members.structs(), [*after, *consts])
        outputs, kept = differentiated.forward(params, [*after, *consts])
        return (token, outputs), (index, whole, kept, differentiated)

    def backward(saved: Any, cotangents: Any) -> Any:
        index, whole, kept, differentiated = saved
        token, of_outputs = cotangents
        token, params = members.fetch(token, index, whole, of_outputs)
        of_params, of_inputs = differentiated.backward(params, kept, of_outputs)
        token = members.reduce(token, index, of_params)
        return token, None, None, of_inputs[:count], of_inputs[count:]

    unit.defvjp(forward, backward)
    found: tuple[Any, list[Any]] = unit(token, index, list(whole), list(after), list(consts))
    return found


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Differentiated:
    """A block's forward pass, cut from its backward pass. See [Note: Residuals of a unit]."""

    program: ClosedJaxpr
    """(*parameters, *inputs) -> (*outputs, *residuals)."""
    numbers: tuple[int, int, int]
    """Of parameters, of inputs, of outputs."""
    residuals: Any
    """The structure that the residuals are the leaves of: a function from cotangents to cotangents."""
    of_params: frozenset[int]
    """The residuals that follow from the parameters alone."""

    @classmethod
    def trace(cls, body: Body, params: Sequence[Any], inputs: Sequence[Any]) -> Differentiated:
        structures: list[Any] = []

        def run(params: Any, inputs: Any) -> Any:
            outputs, pull = jax.vjp(body, params, inputs)
            leaves, structure = jax.tree.flatten(pull)
            structures.append(structure)
            return outputs, leaves

        program, (outputs, _) = jax.make_jaxpr(run, return_shape=True)(list(params), list(inputs))
        known = _follow(program.jaxpr, len(params))
        residuals = program.jaxpr.outvars[len(outputs) :]
        of_params = frozenset(at for at, var in enumerate(residuals) if isinstance(var, Literal) or var in known)
        return cls(program, (len(params), len(inputs), len(outputs)), structures[-1], of_params)

    def forward(self, params: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """(outputs, the residuals that are kept)."""
        found = evaluate(self.program.jaxpr, self.program.consts, [*params, *inputs])
        outputs, residuals = found[: self.numbers[2]], found[self.numbers[2] :]
        return outputs, [residual for at, residual in enumerate(residuals) if at not in self.of_params]

    def backward(self, params: Sequence[Any], kept: Sequence[Any], cotangents: Any) -> tuple[list[Any], list[Any]]:
        """Cotangents of (parameters, inputs)."""
        again = iter(evaluate(self.program.jaxpr, self.program.consts, params, only_of_these=True)[self.numbers[2] :])
        remaining = iter(kept)
        residuals = [value if at in self.of_params else next(remaining) for at, value in enumerate(again)]
        found: tuple[list[Any], list[Any]] = jax.tree.unflatten(self.residuals, residuals)(cotangents)
        return found


def evaluate(
    jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], *, only_of_these: bool = False
) -> list[Any]:
    """Evaluate a traced program, jits inlined; `only_of_these`: outputs that need later arguments are None."""
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=not only_of_these))
    for equation in jaxpr.eqns:
        needed = [atom for atom in equation.invars if not isinstance(atom, Literal)]
        if only_of_these and any(atom not in values for atom in needed):
            continue
        inner = equation.params.get("jaxpr") if equation.primitive.name in _JITTED else None
        if isinstance(inner, ClosedJaxpr):
            operands = [atom.val if isinstance(atom, Literal) else values[atom] for atom in equation.invars]
            values.update(zip(equation.outvars, evaluate(inner.jaxpr, inner.consts, operands), strict=True))
        else:
            kept = [var for var in equation.outvars if not isinstance(var, DropVar)]
            alone = jaxpr.replace(constvars=[], invars=needed, outvars=kept, eqns=[equation])
            values.update(zip(kept, jax.core.eval_jaxpr(alone, (), *(values[atom] for atom in needed)), strict=True))
    return [atom.val if isinstance(atom, Literal) else values.get(atom) for atom in jaxpr.outvars]


_JITTED = frozenset({"jit", "pjit"})


def _follow(jaxpr: Jaxpr, count: int) -> set[Any]:
    """The variables that follow from the first `count` arguments and constants alone."""
    known: set[Any] = {*jaxpr.constvars, *jaxpr.invars[:count]}
    for equation in jaxpr.eqns:
        if all(isinstance(atom, Literal) or atom in known for atom in equation.invars):
            known.update(equation.outvars)
    return known
