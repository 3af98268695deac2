"""The update of parameters that are leaves on a mesh, as JAX traces it: XLA's partitioner computes each part where it
rests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from polyaccel.jax.native.optimizers import OptaxUpdate, SliceUpdate
from polyaccel.jax.native.program import Gradients, Held, Inputs, Outcome, Recipe, dtype_of_jax
from polyaccel.jax.native.rows import RoundingKeys, rounded
from polyaccel.jax.optax_on_mesh import OptaxOnMesh
from polyaccel.jax.optax_optimizer import OptaxOptimizer
from polyaccel.jax.partitioned.places import LeafPlaces
from polyaccel.zero.plan.layout import Bucket, ShardLayout
from polyaccel.zero.plan.policy import StepPolicy


class LeafRows:
    """`ParamRows` of a whole parameter, which is its own and only row."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = tuple(shape)

    def square_sums(self, values: Any) -> Any:
        """As `ParamRows.square_sums`."""
        return precise_total(jnp.square(values))[None]

    def spread(self, values: Any) -> Any:
        """As `ParamRows.spread`."""
        return values if jnp.ndim(values) == 0 else values[0]

    def indices(self) -> Any:
        """As `ParamRows.indices`."""
        index = jnp.zeros(self._shape, jnp.uint32)
        stride = 1
        for axis in reversed(range(len(self._shape))):
            index += jax.lax.broadcasted_iota(jnp.uint32, self._shape, axis) * jnp.uint32(stride % 2**32)
            stride *= self._shape[axis]
        return index


class LeafUpdate:
    """The update by `rule` of the buckets of `layout`, which have one parameter each. None: there is no optimizer."""

    def __init__(
        self,
        places: LeafPlaces,
        layout: ShardLayout,
        step_policy: StepPolicy,
        rule: SliceUpdate | OptaxOnMesh | None,
    ) -> None:
        self._places = places
        self._layout = layout
        self._step_policy = step_policy
        self._rule = rule
        self.trained = tuple(bucket for bucket in layout.buckets if bucket.kind.trainable)

    @property
    def skips_overflow(self) -> bool:
        """Whether an update is left out where gradients are not finite."""
        return self._step_policy.skip_overflow

    def placed(self, held: Held) -> Held:
        """The arrays where they rest, after programs that may have moved them; not for host memory."""
        params = list(held.params)
        masters, states, tree = dict(held.masters), dict(held.states), held.tree
        for bucket in self._layout.buckets:
            params[bucket.index] = self._at(self._places.param, bucket, params[bucket.index])
        for bucket in self.trained:
            if bucket.index in masters:
                masters[bucket.index] = self._at(self._places.state, bucket, masters[bucket.index])
            own = states[bucket.index].items()
            states[bucket.index] = {name: self._at(self._places.state, bucket, value) for name, value in own}
        if isinstance(self._rule, OptaxOnMesh) and tree is not None:
            tree = self._placed(self._rule, tree)
        return Held(tuple(params), masters, states, tree)

    def update(self, recipe: Recipe, held: Held, gradients: Gradients, inputs: Inputs) -> Any:
        """(held, `Outcome`) after an update by `recipe`."""
        assert self._rule is not None  # the engine refuses to train without an optimizer
        outcome, held = self._judge(gradients, inputs.loss_scale), self._loaded(held)
        scale = outcome.clip_factor / inputs.loss_scale
        before = {bucket.index: self._masters(held, bucket) for bucket in self.trained}
        states, tree, numbers = held.states, held.tree, dict[str, Any]()
        if isinstance(self._rule, OptaxOnMesh):
            after, tree = self._move_tree(self._rule, held, before, gradients, scale, inputs.loss)
        elif isinstance(self._rule, OptaxUpdate):
            terms = inputs.terms[0]
            after, states = self._move_leaves(self._rule.optimizer, held, before, gradients, scale, terms)
            numbers = self._rule.optimizer.numbers_after(terms)
        else:
            after, states = self._move_each(self._rule, recipe, held, before, gradients, scale, inputs)
        params, masters = list(held.params), dict(held.masters)
        for bucket in self.trained:
            index = bucket.index
            master, fresh = after[index], self._as_param(bucket, after[index], inputs.keys)
            if self._step_policy.skip_overflow:
                master = jnp.where(outcome.applied, master, before[index])
                fresh = jnp.where(outcome.applied, fresh, params[index])
            params[index] = self._at(self._places.param, bucket, fresh)
            if index in masters:
                masters[index] = self._stored(bucket, master)
        if self._step_policy.skip_overflow:
            chosen = partial(jnp.where, outcome.applied)
            states, tree = jax.tree.map(chosen, states, held.states), jax.tree.map(chosen, tree, held.tree)
        stored = {
            bucket.index: {name: self._stored(bucket, value) for name, value in states[bucket.index].items()}
            for bucket in self.trained
        }
        if isinstance(self._rule, OptaxOnMesh):
            tree = [jax.device_put(leaf, place) for leaf, place in zip(tree, self._rule.stored, strict=True)]
        return Held(tuple(params), masters, stored, tree), outcome._replace(numbers=numbers)

    def _loaded(self, held: Held) -> Held:
        """Master weights and states where they are updated."""
        masters, states, tree = dict(held.masters), dict(held.states), held.tree
        for bucket in self.trained:
            place = self._places.state[bucket.slots[0].param.fqn]
            masters, states = _put(masters, bucket.index, place), _put(states, bucket.index, place)
        if isinstance(self._rule, OptaxOnMesh) and tree is not None:
            tree = [jax.device_put(leaf, place) for leaf, place in zip(tree, self._rule.places, strict=True)]
        return Held(held.params, masters, states, tree)

    def _stored(self, bucket: Bucket, value: Any) -> Any:
        """An array of a parameter's states where it rests."""
        fqn = bucket.slots[0].param.fqn
        return jax.device_put(self._at(self._places.state, bucket, value), self._places.stored[fqn])

    def _masters(self, held: Held, bucket: Bucket) -> Any:
        return self._at(self._places.state, bucket, held.masters.get(bucket.index, held.params[bucket.index]))

    def _move_each(
        self,
        rule: SliceUpdate,
        recipe: Recipe,
        held: Held,
        before: Mapping[int, Any],
        gradients: Gradients,
        scale: Any,
        inputs: Inputs,
    ) -> tuple[dict[int, Any], dict[int, dict[str, Any]]]:
        """New master weights and states of an optimizer of the config."""
        after, states = {}, {}
        for bucket, which, variant in zip(self.trained, recipe.term_indices, recipe.variants, strict=True):
            index, rows = bucket.index, LeafRows(bucket.slots[0].param.shape)
            terms = jax.tree.map(rows.spread, inputs.terms[which])
            given = (variant, before[index], gradients[index], held.states[index], terms, scale, rows)
            after[index], moved, _ = rule.apply(*given)
            states[index] = {name: self._at(self._places.state, bucket, value) for name, value in moved.items()}
        return after, states

    def _move_leaves(
        self,
        optimizer: OptaxOptimizer,
        held: Held,
        before: Mapping[int, Any],
        gradients: Gradients,
        scale: Any,
        numbers: Mapping[str, Any],
    ) -> tuple[dict[int, Any], dict[int, dict[str, Any]]]:
        """New master weights and states of a transformation whose states checkpoints have by parameter."""
        given = self._by_name(before), self._by_name(gradients), self._by_name(held.states)
        moved, found = optimizer.step_leaves(*given, numbers, scale)
        after, states = {}, {}
        for bucket in self.trained:
            fqn = bucket.slots[0].param.fqn
            after[bucket.index] = moved[fqn]
            new = {name: self._at(self._places.state, bucket, value) for name, value in found[fqn].items()}
            states[bucket.index] = {**held.states[bucket.index], **new}
        return after, states

    def _move_tree(
        self, rule: OptaxOnMesh, held: Held, before: Mapping[int, Any], gradients: Gradients, scale: Any, loss: Any
    ) -> tuple[dict[int, Any], list[Any]]:
        """New master weights and leaves of the state of a transformation of all parameters."""
        scaled = {
            index: value.astype(before[index].dtype) * jnp.asarray(scale, before[index].dtype)
            for index, value in gradients.items()
        }
        trees = rule.traced.tree_of(self._by_name(scaled)), rule.traced.tree_of(self._by_name(before))
        moved, tree = rule.traced.update(trees[0], held.tree, trees[1], loss)
        found = dict(zip(rule.traced.names, jax.tree.leaves(moved), strict=True))
        after = {bucket.index: found[bucket.slots[0].param.fqn] for bucket in self.trained}
        return after, self._placed(rule, tree)

    def begin(self, held: Held) -> list[Any]:
        """The leaves of the state with which a transformation of all parameters begins."""
        assert isinstance(self._rule, OptaxOnMesh)  # the only one with a state of the whole tree
        held = self._loaded(held)
        masters = {bucket.index: self._masters(held, bucket) for bucket in self.trained}
        tree = self._rule.traced.tree_of(self._by_name(masters))
        leaves = self._placed(self._rule, jax.tree.leaves(self._rule.traced.transformation.init(tree)))
        return [jax.device_put(leaf, place) for leaf, place in zip(leaves, self._rule.stored, strict=True)]

    def _placed(self, rule: OptaxOnMesh, leaves: Sequence[Any]) -> list[Any]:
        return [
            jax.lax.with_sharding_constraint(jnp.asarray(leaf), place)
            for leaf, place in zip(leaves, rule.places, strict=True)
        ]

    def _by_name(self, values: Mapping[int, Any]) -> dict[str, Any]:
        return {bucket.slots[0].param.fqn: values[bucket.index] for bucket in self.trained}

    def _judge(self, gradients: Gradients, loss_scale: Any) -> Outcome:
        """As `StepProgram._judge`, of whole leaves."""
        policy = self._step_policy
        ends = jnp.full(len(self.trained), _FINITE, jnp.int32)
        if not (policy.measure_norm or policy.clip_norm > 0.0 or policy.skip_overflow):
            return Outcome(jnp.bool_(True), jnp.float32(0.0), jnp.float32(1.0), ends, {})
        own = [gradients[bucket.index] for bucket in self.trained]
        bad = jnp.stack([jnp.where(jnp.all(jnp.isfinite(part)), _FINITE, 0) for part in own]).astype(jnp.int32)
        finite = jnp.all(bad == ends)
        own = [part for part in own if part.size]
        is_number = jnp.all(jnp.stack([~jnp.any(jnp.isnan(part)) for part in own]))
        wide = [part.astype(jnp.float32) for part in own]
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(part)) for part in wide]))
        unit = jnp.where((largest > 0.0) & jnp.isfinite(largest), largest, 1.0)
        squares = jnp.sum(jnp.stack([precise_total(jnp.square(part / unit)) for part in wide]))
        norm = jnp.where(finite, unit * jnp.sqrt(squares) / loss_scale, jnp.where(is_number, jnp.inf, jnp.nan))
        factor = jnp.float32(1.0)
        if policy.clip_norm > 0.0:
            factor = policy.clip_norm / (norm + 1e-6)
            factor = jnp.where(factor > 1.0, 1.0, factor)  # NaN stays
        applied = finite if policy.skip_overflow else jnp.bool_(True)
        return Outcome(applied, norm, factor, bad, {})

    def publish(self, weights: Mapping[int, Any], keys: Mapping[int, RoundingKeys]) -> tuple[Any, ...]:
        """The parameters of master weights, rounded by `keys`."""
        found = []
        for bucket in self._layout.buckets:
            here = jax.device_put(weights[bucket.index], self._places.state[bucket.slots[0].param.fqn])
            found.append(self._at(self._places.param, bucket, self._as_param(bucket, here, keys)))
        return tuple(found)

    def _as_param(self, bucket: Bucket, weights: Any, keys: Mapping[int, RoundingKeys]) -> Any:
        dtype = dtype_of_jax(bucket.kind.dtype)
        if bucket.index not in keys:
            return weights.astype(dtype)
        return rounded(weights, dtype, keys[bucket.index], LeafRows(bucket.slots[0].param.shape))

    def _at(self, places: Mapping[str, Any], bucket: Bucket, value: Any) -> Any:
        return jax.lax.with_sharding_constraint(value, places[bucket.slots[0].param.fqn])


def _put(arrays: Mapping[int, Any], index: int, place: Any) -> dict[int, Any]:
    """`arrays` with those of one bucket at a place."""
    here = {index: jax.device_put(arrays[index], place)} if index in arrays else {}
    return {**arrays, **here}


def precise_total(values: Any) -> Any:
    """Sum axis by axis, so that errors grow with the longest axis; the barrier keeps XLA from one long sum."""
    while values.ndim:
        values = jax.lax.optimization_barrier(jnp.sum(values, axis=-1))
    return values


_FINITE = -1
"""In place of the first element of a parameter whose gradient is not finite."""
