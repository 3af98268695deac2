"""Gradients of a function whose parameters are leaves on a mesh, as JAX traces them.

With a script's mesh the function is the script's program: it sees the micro-batch of all devices, and its constraints
hold. Without one each device runs it on its micro-batch (`shard_map`), as ranks do everywhere else. Leaves that rest
cut are gathered for a unit, and in the backward pass once more, so that they are kept nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from polyaccel.core.types import ParamSpec, ReduceOp
from polyaccel.jax.native.mesh import AXIS, CUT, WHOLE
from polyaccel.jax.native.program import (
    Gradients,
    dtype_of_jax,
    own_part,
    stacked_output,
    summed_parts,
    summed_whole,
    weak_numbers,
)
from polyaccel.jax.partitioned.places import LeafPlaces, dimension_of, within
from polyaccel.jax.partitioned.state import settled
from polyaccel.jax.partitioned.units import Exchange, MeshMembers, Token
from polyaccel.jax.program.function import LossFunction
from polyaccel.jax.program.params import Leaf
from polyaccel.jax.program.sharded import trace_by_units, warn_of_no_units
from polyaccel.zero.plan.layout import Bucket, ShardLayout
from polyaccel.zero.plan.policy import Placement, StepPolicy, ZeroPolicy


class LeafGradients:
    """The gradients of a step, its evaluation, and gradients in the script's hands. `specs` and `leaves` are in tree
    order, and every bucket of `layout` has one parameter."""

    def __init__(
        self,
        places: LeafPlaces,
        layout: ShardLayout,
        policy: ZeroPolicy,
        step_policy: StepPolicy,
        specs: Sequence[ParamSpec],
        leaves: Sequence[Leaf],
        function: LossFunction,
        seed: int,
    ) -> None:
        self._places = places
        self._layout = layout
        self._is_sharded = policy.params is Placement.SHARDED
        self._step_policy = step_policy
        self._trained = tuple(bucket for bucket in layout.buckets if bucket.kind.trainable)
        self._specs = tuple(specs)
        self._leaves = tuple(leaves)
        self._bucket_of = {bucket.slots[0].param.fqn: bucket for bucket in layout.buckets}
        self._leaf_of = {leaf.fqn: leaf for leaf in leaves}
        self._has_warned = False
        self._function = function
        self._seed = seed
        self._precision = step_policy.precision
        self._is_global = places.partition is not None
        self._ranks = places.devices.world_size if places.partition is None else places.partition.data_size
        self.differentiate: Callable[..., Any] = self._of_all if self._is_global else self._of_ranks()
        """(params, gradients so far or None, batch, micro-batches before, factor of the loss) -> (losses, auxiliary
        output, gradients)."""
        self.evaluate: Callable[..., Any] = self._evaluate_all if self._is_global else self._evaluate_ranks()
        """(params, batch, a positive number) -> (losses, auxiliary output)."""

    def in_order(self, params: Sequence[Any]) -> list[Any]:
        """The parameters by bucket in tree order."""
        return [params[self._bucket_of[spec.fqn].index] for spec in self._specs]

    # Gradients of each device's own micro-batch.

    def _of_ranks(self) -> Callable[..., Any]:
        params, gradients = self._specs_of(self._places.param), self._specs_of_gradients()
        devices = self._places.devices

        def differentiate(held: Any, before: Any, batch: Any, micro: Any, factor: Any) -> Any:
            so_far = None if before is None else gradients
            given = (params, so_far, CUT, WHOLE, WHOLE)
            return devices.spread(self._of_rank, given, (CUT, CUT, gradients))(held, before, batch, micro, factor)

        return differentiate

    def _specs_of(self, places: Mapping[str, Any]) -> tuple[PartitionSpec, ...]:
        return tuple(places[bucket.slots[0].param.fqn].spec for bucket in self._layout.buckets)

    def _specs_of_gradients(self) -> dict[int, PartitionSpec]:
        return {bucket.index: self._places.state[bucket.slots[0].param.fqn].spec for bucket in self._trained}

    def _of_rank(self, params: Any, gradients: Any, batch: Any, micro: Any, factor: Any) -> Any:
        loss, aux, found = self._found(params, gradients, own_part(batch), micro, factor)
        return loss[None], stacked_output(aux), found

    def _found(self, params: Any, gradients: Any, batch: Any, micro: Any, factor: Any) -> Any:
        """(loss, auxiliary output, gradients so far with those of `batch`)."""
        key = self._key(micro)
        if self._is_sharded:
            return self._by_units(params, gradients, batch, key, factor)
        leaves = self._as_called(params) if self._is_global else self.in_order(params)
        loss, aux, found = self._function.differentiate(*self._separated(leaves), batch, key, factor)
        names = [spec.fqn for spec in self._specs if spec.trainable]
        buckets = [self._bucket_of[name] for name in names]
        new = {bucket.index: self._kept(bucket, one) for bucket, one in zip(buckets, found, strict=True)}
        if gradients is None:
            return loss, aux, new
        return loss, aux, {index: gradients[index] + one for index, one in new.items()}

    def _by_units(self, params: Any, gradients: Any, batch: Any, key: Any, factor: Any) -> Any:
        """As `_found`, of leaves that are gathered unit by unit."""
        before = gradients if gradients is not None else {bucket.index: self._zeros(bucket) for bucket in self._trained}
        first = {self._at_leaf(index): one for index, one in before.items()}

        def scaled(token: Token) -> Any:
            (loss, aux), token = self._traced(params, token, batch, key)
            return (loss * factor, token), (loss, aux)

        never = jnp.asarray(factor, jnp.float32)  # a factor of the loss is positive
        start = Token(never, jax.tree.map(jnp.zeros_like, first))
        (outcome, _), pull, (loss, aux) = jax.vjp(scaled, start, has_aux=True)
        (token,) = pull((jnp.ones_like(outcome), Token(never, first)))
        return loss, aux, {index: token.gradients[self._at_leaf(index)] for index in before}

    def _traced(self, params: Any, token: Token, batch: Any, key: Any) -> tuple[Any, Token]:
        """(what the function returns, the token after it)."""
        exchange = Exchange(self._gathered, self._reduced_leaves, is_local=not self._is_global)
        given = self._leaves, self.in_order(params), token, partial(MeshMembers, exchange=exchange)
        found, token, has_units = trace_by_units(*given, lambda leaves: self._function.call(leaves, batch, key))
        if not (has_units or self._has_warned):
            self._has_warned = True
            warn_of_no_units(jax.process_index())
        return found, token

    def _at_leaf(self, index: int) -> int:
        """The index of the leaf in a bucket."""
        return self._leaf_of[self._layout.buckets[index].slots[0].param.fqn].index

    def _zeros(self, bucket: Bucket) -> Any:
        """What a program that traces a device's part, or all devices, holds of a gradient before the first."""
        shape = list(bucket.slots[0].param.shape)
        place = self._places.state[bucket.slots[0].param.fqn]
        at = dimension_of(place.spec)
        if self._is_global:
            return jax.lax.with_sharding_constraint(jnp.zeros(shape, self._gradient_dtype(bucket)), place)
        if at is not None:
            shape[at] //= self._ranks
        return jnp.zeros(shape, self._gradient_dtype(bucket))

    def _gathered(self, leaf: Leaf, part: Any) -> Any:
        """The whole of a leaf, or of one layer of it, from the part that a device holds."""
        layers = len(leaf.shape) - part.ndim
        if self._is_global:
            return jax.lax.with_sharding_constraint(part, within(self._places.function[leaf.fqn], layers))
        at = dimension_of(self._places.param[leaf.fqn].spec)
        return part if at is None else jax.lax.all_gather(part, AXIS, axis=at - layers, tiled=True)

    def _reduced_leaves(self, pairs: Sequence[tuple[Leaf, Any]]) -> list[Any]:
        """What a device keeps of the gradients of a unit. Those that stay whole are summed in one collective."""
        whole = [pair for pair in pairs if not self._is_global and self._is_kept_whole(pair[0])]
        summed = iter(self._summed([self._sent(self._bucket_of[leaf.fqn], one) for leaf, one in whole]))
        found = []
        for leaf, gradient in pairs:
            bucket = self._bucket_of[leaf.fqn]
            if not self._is_global and self._is_kept_whole(leaf):
                found.append(self._finished(bucket, next(summed)))
            else:
                found.append(self._kept(bucket, gradient, len(leaf.shape) - gradient.ndim))
        return found

    def _is_kept_whole(self, leaf: Leaf) -> bool:
        return dimension_of(self._places.state[leaf.fqn].spec) is None

    def _summed(self, sent: Sequence[Any]) -> list[Any]:
        """The sums over devices of whole arrays."""
        wide = [one.astype(jnp.promote_types(one.dtype, jnp.float32)) for one in sent]  # a sum of ranks overflows first
        if len({one.dtype for one in wide}) != 1:
            return [jax.lax.psum(one, AXIS) for one in wide]
        flat = jnp.concatenate([one.reshape(-1) for one in wide])
        total = summed_whole(self._places.devices, flat)
        parts = jnp.split(total, list(accumulate(one.size for one in wide))[:-1])
        return [part.reshape(one.shape) for part, one in zip(parts, wide, strict=True)]

    def _kept(self, bucket: Bucket, gradient: Any, layers: int = 0) -> Any:
        """What a device keeps of the reduced gradient of a parameter, or of one layer of it."""
        if self._is_global:
            place = within(self._places.state[bucket.slots[0].param.fqn], layers)
            scaled = gradient.astype(self._gradient_dtype(bucket)) * self._factor
            return jax.lax.with_sharding_constraint(scaled, place)
        return self._reduced(bucket, gradient, layers)

    def _reduced(self, bucket: Bucket, gradient: Any, layers: int) -> Any:
        """The part of the reduced gradient that this device updates."""
        sent = self._sent(bucket, gradient)
        at = dimension_of(self._places.state[bucket.slots[0].param.fqn].spec)
        if at is None:
            (summed,) = self._summed([sent])
        else:
            summed = summed_parts(self._places.devices, sent, at - layers)
        return self._finished(bucket, summed)

    def _sent(self, bucket: Bucket, gradient: Any) -> Any:
        """A gradient as it goes into a reduction."""
        before, _, _ = self._step_policy.reduction.scaling(self._ranks)
        return gradient.astype(dtype_of_jax(self._precision.reduce_of(bucket.kind.dtype))) * before

    def _finished(self, bucket: Bucket, summed: Any) -> Any:
        """The gradient that a reduction ends with."""
        _, after, op = self._step_policy.reduction.scaling(self._ranks)
        reduced = summed / self._ranks if op is ReduceOp.AVG else summed * after
        return reduced.astype(self._gradient_dtype(bucket))

    def _gradient_dtype(self, bucket: Bucket) -> Any:
        return dtype_of_jax(self._precision.gradient_of(bucket.kind.dtype))

    def _evaluate_ranks(self) -> Callable[..., Any]:
        def evaluate(params: Any, batch: Any, factor: Any) -> Any:
            loss, aux = self._evaluated(params, own_part(batch), factor)
            return loss[None], stacked_output(aux)

        given = (self._specs_of(self._places.param), CUT, WHOLE)
        return self._places.devices.spread(evaluate, given, (CUT, CUT))

    def _evaluated(self, params: Any, batch: Any, factor: Any) -> Any:
        """(loss, auxiliary output)."""
        if self._is_sharded:
            return self._traced(params, Token(factor, {}), batch, None)[0]
        return self._function.call(self._as_called(params) if self._is_global else self.in_order(params), batch, None)

    def _all_gathered(self, params: Any) -> list[Any]:
        found = []
        for leaf, spec in zip(self.in_order(params), self._specs, strict=True):
            at = dimension_of(self._places.param[spec.fqn].spec)
            found.append(leaf if at is None else jax.lax.all_gather(leaf, AXIS, axis=at, tiled=True))
        return found

    def _key(self, micro: Any) -> Any:
        rank = 0 if self._is_global else jax.lax.axis_index(AXIS)
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self._seed), rank), micro)

    # Gradients of the script's own program.

    def _of_all(self, params: Any, gradients: Any, batch: Any, micro: Any, factor: Any) -> Any:
        loss, aux, found = self._found(params, gradients, weak_numbers(batch), micro, factor)
        return loss, settled(aux, self._places.carried), found

    @property
    def _factor(self) -> float:
        """What the config's reduction makes of a mean over all samples."""
        before, after, op = self._step_policy.reduction.scaling(self._ranks)
        return before * (1.0 if op is ReduceOp.AVG else after * self._ranks)

    def _as_called(self, params: Any) -> list[Any]:
        """The leaves in tree order, as the function gets them."""
        return [
            jax.lax.with_sharding_constraint(leaf, self._places.function[spec.fqn])
            for leaf, spec in zip(self.in_order(params), self._specs, strict=True)
        ]

    def _evaluate_all(self, params: Any, batch: Any, factor: Any) -> Any:
        loss, aux = self._evaluated(params, weak_numbers(batch), factor)
        return loss, settled(aux, self._places.carried)

    def _at(self, places: Mapping[str, Any], bucket: Bucket, value: Any) -> Any:
        return jax.lax.with_sharding_constraint(value, places[bucket.slots[0].param.fqn])

    # Gradients in the script's hands.

    def mean(self, params: Any, leaves: Any, keys: Any, batch: Any, micro: Any, factor: Any) -> Any:
        """(mean loss, auxiliary output, mean gradients of the trained leaves), of `leaves` and `keys` of devices if
        they are not None."""
        if self._is_global:
            called = self._as_called(params) if leaves is None else leaves
            trained, frozen = self._separated(called)
            key = self._key(micro) if keys is None else keys[0]
            loss, aux, found = self._function.differentiate(trained, frozen, weak_numbers(batch), key, factor)
            named = zip(found, (spec.fqn for spec in self._specs if spec.trainable), strict=True)
            placed = [jax.lax.with_sharding_constraint(one, self._places.function[fqn]) for one, fqn in named]
            return loss, settled(aux, self._places.carried), placed

        def of_rank(params: Any, leaves: Any, keys: Any, batch: Any, micro: Any, factor: Any) -> Any:
            trained, frozen = self._separated(self._all_gathered(params) if leaves is None else leaves)
            key = self._key(micro) if keys is None else keys[0]
            loss, aux, found = self._function.differentiate(trained, frozen, own_part(batch), key, factor)

            def mean(value: Any) -> Any:
                wide = value.astype(jnp.promote_types(value.dtype, jnp.float32))
                return (jax.lax.psum(wide, AXIS) / self._ranks).astype(value.dtype)

            return mean(loss), stacked_output(aux), [mean(gradient) for gradient in found]

        given = (self._specs_of(self._places.param), WHOLE, CUT, CUT, WHOLE, WHOLE)
        over = self._places.devices.spread(of_rank, given, (WHOLE, CUT, WHOLE))
        return over(params, leaves, keys, batch, micro, factor)

    def _separated(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        pairs = list(zip(leaves, self._specs, strict=True))
        return [leaf for leaf, spec in pairs if spec.trainable], [leaf for leaf, spec in pairs if not spec.trainable]

    def take(self, found: Sequence[Any]) -> Gradients:
        """The gradients of the trained leaves as their means by bucket; without a script's mesh each has an axis over
        devices."""
        names = [spec.fqn for spec in self._specs if spec.trainable]
        taken: Gradients = {}
        for fqn, each in zip(names, found, strict=True):
            bucket = self._bucket_of[fqn]
            wide = each.astype(jnp.float32)
            mean = (wide if self._is_global else jnp.mean(wide, axis=0)) * self._factor
            taken[bucket.index] = self._at(self._places.state, bucket, mean.astype(self._gradient_dtype(bucket)))
        return taken
