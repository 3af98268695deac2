"""The programs of a step on whole leaves: their gradients and their update, compiled together or apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from polyaccel.core.types import ParamSpec
from polyaccel.jax.native.many_steps import ManyInputs, StepParts, StepsProgram, scanned
from polyaccel.jax.native.mesh import AXIS, CUT
from polyaccel.jax.native.program import Held, Inputs, Recipe, rounding_keys_of
from polyaccel.jax.native.rows import RoundingKeys
from polyaccel.jax.partitioned.gradients import LeafGradients
from polyaccel.jax.partitioned.places import LeafPlaces, Partition
from polyaccel.jax.partitioned.update import LeafUpdate


class PartitionedProgram:
    """The computations of a step, each compiled when it is first called: `StepProgram` on leaves, `specs` in order."""

    def __init__(
        self,
        places: LeafPlaces,
        specs: Sequence[ParamSpec],
        gradients: LeafGradients,
        update: LeafUpdate,
        *,
        rounds_stochastically: bool,
    ) -> None:
        self._places = places
        self._gradients = gradients
        self._update = update
        self._rounds_stochastically = rounds_stochastically
        self.trained = update.trained
        self._is_global = places.partition is not None

        def step(recipe: Recipe, held: Held, before: Any, batch: Any, micro: Any, factor: Any, inputs: Inputs) -> Any:
            loss, aux, found = gradients.differentiate(held.params, before, batch, micro, factor)
            return loss, aux, *update.update(recipe, held, found, inputs)

        inside = partial(InsideMesh, places.partition)
        self.differentiate = inside(jax.jit(gradients.differentiate, donate_argnums=1))
        """As `StepProgram.differentiate`. With a script's mesh there is one loss, and one auxiliary output."""
        self.mean_gradients = inside(jax.jit(gradients.mean))
        """As `StepProgram.mean_gradients`."""
        self.take_gradients = inside(jax.jit(gradients.take))
        """As `StepProgram.take_gradients`."""
        self.update = inside(jax.jit(update.update, static_argnums=0, donate_argnums=1))
        """As `StepProgram.update`."""
        self.step = inside(jax.jit(step, static_argnums=0, donate_argnums=1))
        """As `StepProgram.step`."""
        self.evaluate = inside(jax.jit(gradients.evaluate), np.float32(1.0))
        """As `StepProgram.evaluate`."""
        self.begin = inside(jax.jit(update.begin))
        """(held) -> leaves of the state with which a transformation begins."""
        self._publish = inside(jax.jit(update.publish))
        self._whole = jax.jit(lambda leaves: [jnp.copy(leaf) for leaf in leaves], out_shardings=places.whole)
        self._own = jax.jit(
            lambda leaves: [jnp.copy(leaf) for leaf in leaves],
            out_shardings=[places.function[spec.fqn] for spec in specs],
        )

    def many(self, reduce: Callable[[Any], Any] | None) -> StepsProgram:
        """Return several steps as one program.

        Without a script's mesh batches and losses have axes over devices, steps and micro-batches, and `reduce` makes
        states of devices equal. With one they have axes over steps and micro-batches.
        """
        gradients, update, mesh = self._gradients, self._update, self._places.mesh
        parts = StepParts(gradients.differentiate, update.update, reduce, update.skips_overflow)

        def steps(recipe: Recipe, held: Held, batches: Any, state: Any, inputs: ManyInputs) -> Any:
            if not self._is_global:
                third = NamedSharding(mesh, PartitionSpec(None, None, AXIS))
                moved = jax.tree.map(lambda part: jnp.moveaxis(part, 0, 2), batches)
                batches = jax.tree.map(lambda part: jax.lax.with_sharding_constraint(part, third), moved)
            held, losses, *found = scanned(parts, recipe, held, batches, state, inputs)
            place = self._places.whole
            if not self._is_global:
                losses, place = jnp.moveaxis(losses, 2, 0), NamedSharding(mesh, CUT)
            return update.placed(held), jax.lax.with_sharding_constraint(losses, place), *found

        return StepsProgram(InsideMesh(self._places.partition, jax.jit(steps, static_argnums=0, donate_argnums=1)))

    def rounding_keys(self, steps: Mapping[str, int]) -> dict[int, RoundingKeys]:
        """As `StepProgram.rounding_keys`."""
        return rounding_keys_of(self.trained, steps) if self._rounds_stochastically else {}

    def publish(self, weights: Mapping[int, Any], steps: Mapping[str, int]) -> tuple[Any, ...]:
        """The parameters of weights, which rest as states do, after so many updates of each."""
        params: tuple[Any, ...] = self._publish(weights, self.rounding_keys(steps))
        return params

    def leaves(self, params: Sequence[Any]) -> list[jax.Array]:
        """Copies of the parameters in tree order, on the script's mesh, or whole on this process's first device."""
        leaves = self._gradients.in_order(params)
        if self._is_global:
            found: list[jax.Array] = self._own(leaves)
            return found
        return [self._places.devices.own_parts(leaf)[0] for leaf in self._whole(leaves)]


class InsideMesh:
    """A jitted function that runs, and is traced, in the context of `partition`, for specs without a mesh.

    It gets `last` after its arguments.
    """

    def __init__(self, partition: Partition | None, jitted: Any, *last: Any) -> None:
        self._partition, self._jitted, self._last = partition, jitted, last

    def __call__(self, *arguments: Any) -> Any:
        return self._within(self._jitted, *arguments)

    def trace(self, *arguments: Any) -> Any:
        """As `trace` of a jitted function."""
        return self._within(self._jitted.trace, *arguments)

    def lower(self, *arguments: Any) -> Any:
        """As `lower` of a jitted function."""
        return self._within(self._jitted.lower, *arguments)

    def _within(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with nullcontext() if self._partition is None else self._partition.context():
            return function(*arguments, *self._last)
