"""Several optimizer steps of native mode as one program: a scan over the steps of `StepProgram`.

[Note: Bits of scanned steps]
A step inside the scan has the operations of one alone: micro-batches but the last are followed by a barrier, as they
are programs of their own there. Terms of the update are weak numbers in both. So XLA rounds both in the same places.

[Note: Skipped steps of a scan]
After an overflow that skips an update, the host computes other terms and another loss scale than it did beforehand. The
steps behind it do nothing therefore, and the same program takes them once the host has gone on to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.jax.native.mesh import CUT, WHOLE
from polyaccel.jax.native.program import Held, Inputs, Outcome, Recipe, StepProgram
from polyaccel.jax.program.batches import WeakNumbers, as_weak
from polyaccel.jax.program.carried import Carried
from polyaccel.zero.update.optimizers import Group


class StepAhead(NamedTuple):
    """What the host has for a step that is to come: the optimizer's groups, the micro-steps before each micro-batch,
    and scales."""

    groups: Sequence[Group]
    micro_steps: list[int]
    factor: float
    loss_scale: float


class ManyInputs(NamedTuple):
    """What the host passes to several steps: `micro_steps` before each micro-batch, the factors of losses and the
    inputs of updates by step, the first of them to take, and the numbers of an optax transformation, which then are
    the terms."""

    micro_steps: Any
    factors: Any
    updates: Inputs
    begin: Any
    numbers: dict[str, Any]


class StepParts(NamedTuple):
    """The parts of a step, to be traced inside the scan. `differentiate`: (params, gradients so far or None, batch,
    micro-batches before, factor of the loss) -> (losses, auxiliary output, gradients). `update`: (recipe, held,
    gradients, inputs) -> (held, `Outcome`)."""

    differentiate: Callable[..., Any]
    update: Callable[..., Any]
    reduce: Callable[[Any], Any] | None
    """Makes carried states of devices equal: (states) -> (states, which differ); None leaves them."""
    skips: bool
    """Whether an update is left out where gradients are not finite."""


class StepsProgram(NamedTuple):
    """Several steps, compiled for each number of them."""

    run: Callable[..., Any]
    """(recipe, held, batches, state, `ManyInputs`) -> (held, losses, last auxiliary outputs, state, outcomes,
    which states differed). Arrays of batches and losses have axes over devices, steps and micro-batches."""


def steps_on_devices(program: StepProgram, reduce: Callable[[Any], Any] | None) -> StepsProgram:
    """Return the steps of `program`, each of whose devices runs the scan."""
    held = program.resting

    def differentiate(*given: Any) -> Any:
        losses, aux, gradients = program.gradients_here(*given)
        return losses[0], aux, gradients

    parts = StepParts(differentiate, program.update_here, reduce, program.skips_overflow)

    def steps(recipe: Recipe, *arguments: Any) -> Any:
        def local(held: Held, batches: Any, *rest: Any) -> Any:
            held, losses, *found = scanned(
                parts, recipe, held, jax.tree.map(lambda part: part[0][:, :, None], batches), *rest
            )
            return held, losses[None], *found

        places = (held, CUT, CUT, WHOLE), (held, CUT, CUT, CUT, WHOLE, WHOLE)
        return program.mesh.spread(local, *places)(*arguments)

    return StepsProgram(jax.jit(steps, static_argnums=0, donate_argnums=1))


def scanned(parts: StepParts, recipe: Recipe, held: Held, batches: Any, state: Any, inputs: ManyInputs) -> Any:
    """Trace steps whose batches have axes over steps and micro-batches; return as `StepsProgram.run`."""
    step = partial(_step, parts, recipe)
    over_steps = (batches, inputs.micro_steps, inputs.factors, inputs.updates)
    before = (held, state, inputs.numbers)
    (_, shape_of_aux), shapes = jax.eval_shape(step, before, jax.tree.map(lambda part: part[0], over_steps))

    def take(carry: Any, one: Any) -> Any:
        (after, aux), found = step(carry[:3], one)
        return (*_typed(after, carry[:3]), _typed(aux, carry[3])), found

    def body(carry: Any, at_and_one: Any) -> Any:
        (at, one), goes, carry = at_and_one, carry[0], carry[1:]
        if not parts.skips:
            after, found = take(carry, one)
            return (goes, *after), found
        after, found = jax.lax.cond(  # see [Note: Skipped steps of a scan]
            goes & (at >= inputs.begin),
            lambda: take(carry, one),
            lambda: (carry, jax.tree.map(_zeros, shapes)),
        )
        return (goes & (found[1].applied | (at < inputs.begin)), *after), found

    carry = (jnp.bool_(True), *before, jax.tree.map(_zeros, shape_of_aux))
    (_, held, state, numbers, aux), found = jax.lax.scan(body, carry, (jnp.arange(len(inputs.factors)), over_steps))
    losses, outcome, differs = found
    return held, losses, aux, state, outcome._replace(numbers=numbers), differs


def _step(parts: StepParts, recipe: Recipe, before: Any, one: Any) -> Any:
    """(((held, state, numbers), auxiliary outputs), (losses, outcome, which states differ)) after a step."""
    (held, state, numbers), (batches, micro_steps, factor, update) = before, one
    gradients: Any = None
    losses, aux, count = [], None, len(micro_steps)
    for at in range(count):
        batch = jax.tree.map(lambda part, at=at: part[at], batches)
        given = batch if state is None else Carried(state, batch)
        loss, aux, gradients = parts.differentiate(held.params, gradients, given, micro_steps[at], factor)
        if state is not None:
            state, aux = list(aux.state), aux.aux
        if at + 1 < count:
            loss, aux, gradients, state = jax.lax.optimization_barrier((loss, aux, gradients, state))
        losses.append(loss)
    terms = update.terms
    if numbers:
        terms = [{name: as_weak(number) for name, number in numbers.items()} for _ in terms]
    terms = jax.tree.map(lambda value: as_weak(value.value) if _is_weak(value) else value, terms, is_leaf=_is_weak)
    held, outcome = parts.update(recipe, held, gradients, update._replace(terms=terms))
    if parts.skips:
        numbers = {name: jnp.where(outcome.applied, outcome.numbers[name], numbers[name]) for name in numbers}
    else:
        numbers = outcome.numbers
    differs = None
    if state is not None and parts.reduce is not None:
        state, differs = parts.reduce(state)
    return ((held, state, numbers), aux), (jnp.stack(losses), outcome._replace(numbers={}), differs)


def stacked_inputs(
    each: Sequence[Inputs], micro_steps: Any, factors: Sequence[float], begin: int, numbers: dict[str, float]
) -> ManyInputs:
    """The inputs of several updates as those of one program."""

    def stack(*values: Any) -> Any:
        if isinstance(values[0], (int, float)):
            return WeakNumbers(np.asarray(values, jnp.result_type(values[0])))
        return np.stack([np.asarray(value) for value in values])

    if numbers:
        each = [one._replace(terms=[{} for _ in one.terms]) for one in each]
    first = {name: np.asarray(number, jnp.result_type(number)) for name, number in numbers.items()}
    updates = jax.tree.map(stack, *each)
    return ManyInputs(micro_steps, np.asarray(factors, np.float32), updates, np.int32(begin), first)


def outcomes(found: Outcome) -> list[Outcome]:
    """The outcome of each step, without numbers."""
    found = found._replace(numbers={})
    return [jax.tree.map(lambda value, at=at: value[at], found) for at in range(len(found.applied))]


def _is_weak(value: Any) -> bool:
    return isinstance(value, WeakNumbers)


def _typed(values: Any, like: Any) -> Any:
    """Values in the types that a carry of a scan has, none of them weak."""
    return jax.tree.map(lambda value, of: value if value.aval == of.aval else value.astype(of.dtype), values, like)


def _zeros(shape: Any) -> Any:
    if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, shape)
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=jax.random.key_impl(shape))
    return jnp.zeros(shape.shape, shape.dtype)
