"""The program of one device of the mesh in native mode: gradients of a micro-batch, and the update, as JAX traces them.

Parameters are flat buckets, whole on every device. Gradients are laid into buckets and reduced by one reduce-scatter a
bucket (one all-reduce where states are whole), the device's slices are updated, and one all-gather a bucket publishes
them; `ZeroPolicy` decides what rests between steps. XLA places the collectives and reuses the memory.

[Note: Reduce-scatter on CPUs]
There XLA takes gloo's reduce-scatter, and with jaxlib 0.10 its result is now and then wrong on one rank: of 29 M
numbers between two processes that arrive at different times in 10 of 120 calls, where all-reduces and all-to-alls were
right in as many. Each process sends the parts to their ranks instead (an all-to-all moves as much) and adds in the
order of ranks, which is deterministic as well. Inside one process, and on other devices, it is a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyaccel.core.types import DType, ParamSpec, ReduceOp
from polyaccel.jax.native.mesh import AXIS, CUT, WHOLE, DeviceMesh
from polyaccel.jax.native.optimizers import SliceUpdate
from polyaccel.jax.native.rows import RoundingKeys, Rows, rounded, rounding_keys
from polyaccel.jax.program.batches import WeakNumbers, as_weak
from polyaccel.jax.program.function import LossFunction
from polyaccel.ops.jax import precise_sum
from polyaccel.zero.plan.layout import Bucket, ShardLayout
from polyaccel.zero.plan.policy import Placement, StepPolicy, ZeroPolicy

Gradients = dict[int, Any]
"""By bucket: reduced slices where gradients are sharded, else each device's own, not yet reduced."""


class Held(NamedTuple):
    """The arrays that rest on the devices between steps. They are given up to each update and replaced by its
    results."""

    params: tuple[Any, ...]
    """Each bucket, flat and whole."""
    masters: dict[int, Any]
    """Master weights of the trained buckets, by index, where the parameters have a narrower type."""
    states: dict[int, dict[str, Any]]
    """The optimizer's states of the trained buckets, by index and name."""
    tree: Any = None
    """The leaves of the state of a transformation of the whole tree; None before its first update, and without one."""


class Outcome(NamedTuple):
    """The findings of an update. `bad` has for each trained bucket the first element that is not finite, else no place
    of one; `norm` is before clipping; `numbers` are the optimizer's states of one number."""

    applied: Any
    norm: Any
    clip_factor: Any
    bad: Any
    numbers: Any


class Recipe(NamedTuple):
    """The choices that an update is compiled for: of each trained bucket, which of the terms it takes, and the
    optimizer's variant."""

    term_indices: tuple[int, ...]
    variants: tuple[Hashable, ...]


class Inputs(NamedTuple):
    """The values that the host passes to an update: the terms that `Recipe` chooses from, how parameters of 16 bits are
    rounded, by bucket (to nearest by default), and what the loss was multiplied with."""

    terms: list[Any]
    keys: dict[int, RoundingKeys]
    loss_scale: Any
    loss: Any = None
    """The step's mean loss, for a transformation that takes it."""


class StepProgram:
    """The computations of a step on `mesh`, compiled when first called. `update` None: there is no optimizer."""

    def __init__(
        self,
        mesh: DeviceMesh,
        layout: ShardLayout,
        policy: ZeroPolicy,
        step_policy: StepPolicy,
        specs: Sequence[ParamSpec],
        function: LossFunction,
        update: SliceUpdate | None,
        seed: int,
    ) -> None:
        self.mesh = mesh
        self._policy = policy
        self._step_policy = step_policy
        self._buckets = layout.buckets
        self.trained = tuple(bucket for bucket in layout.buckets if bucket.kind.trainable)
        self._specs = tuple(specs)  # in tree order
        self._function = function
        self._slice_update = update
        self._seed = seed
        self._precision = step_policy.precision
        self.skips_overflow = step_policy.skip_overflow
        """Whether an update is left out where gradients are not finite."""
        resting = CUT if policy.optim is Placement.SHARDED else WHOLE
        self.resting = held = Held(WHOLE, resting, resting)
        """Where arrays rest, in place of them."""
        spread = mesh.spread
        differentiate = spread(self.gradients_here, (WHOLE, CUT, CUT, WHOLE, WHOLE), (CUT, CUT, CUT))

        def update_all(recipe: Recipe, *arguments: Any) -> Any:
            def local(*parts: Any) -> Any:
                return self.update_here(recipe, *parts)

            return spread(local, (held, CUT, WHOLE), (held, WHOLE))(*arguments)

        def step(
            recipe: Recipe, held: Held, gradients: Any, batch: Any, micro: Any, factor: Any, inputs: Inputs
        ) -> Any:
            loss, aux, gradients = differentiate(held.params, gradients, batch, micro, factor)
            return loss, aux, *update_all(recipe, held, gradients, inputs)

        self.differentiate = jax.jit(differentiate, donate_argnums=1)
        """(params, gradients so far or None, batch, micro-batches before, factor of the loss) -> (each device's loss,
        each device's auxiliary output, gradients)."""
        everywhere = (WHOLE, WHOLE, CUT, CUT, WHOLE, WHOLE)
        self.mean_gradients = jax.jit(spread(self._mean_gradients, everywhere, (WHOLE, CUT, WHOLE)))
        """(params, leaves in place of them or None, keys of devices or None, batch, micro-batches before, factor of the
        loss) -> (mean loss, each device's auxiliary output, mean gradients of the trained leaves)."""
        self.take_gradients = jax.jit(spread(self._take, (CUT,), CUT))
        """(gradients of the trained leaves, each with an axis over devices) -> gradients by bucket."""
        self.update = jax.jit(update_all, static_argnums=0, donate_argnums=1)
        """(recipe, held, gradients, inputs) -> (held, Outcome)."""
        self.step = jax.jit(step, static_argnums=0, donate_argnums=1)
        """Both in one program: (recipe, held, gradients so far or None, batch, micro-batches before, factor of the
        loss, inputs) -> (losses, auxiliary outputs, held, Outcome)."""
        self.evaluate = jax.jit(spread(self._evaluate, (WHOLE, CUT), (CUT, CUT)))
        """(params, batch) -> (each device's loss, each device's auxiliary output)."""
        self._publish_all = jax.jit(spread(self._publish, (resting, WHOLE), WHOLE))
        self._copies = jax.jit(lambda params: [jnp.copy(leaf) for leaf in self._leaves(params)])

    def rounding_keys(self, steps: Mapping[str, int]) -> dict[int, RoundingKeys]:
        """How parameters of 16 bits are rounded after so many updates of each, by bucket; empty: to nearest."""
        return rounding_keys_of(self.trained, steps) if self._step_policy.stochastic_rounding else {}

    def publish(self, weights: Mapping[int, Any], steps: Mapping[str, int]) -> tuple[Any, ...]:
        """The parameters of every bucket's weights where they rest, in any type, after so many updates of each."""
        params: tuple[Any, ...] = self._publish_all(weights, self.rounding_keys(steps))
        return params

    def leaves(self, params: Sequence[Any]) -> list[jax.Array]:
        """Copies of the parameters in tree order, on this process's first device."""
        found: list[jax.Array] = self._copies([self.mesh.own_parts(bucket)[0] for bucket in params])
        return found

    # Gradients.

    def gradients_here(self, params: Any, gradients: Any, batch: Any, micro: Any, factor: Any) -> Any:
        """`differentiate` of one device."""
        leaves = self._leaves(params)
        trained = [leaf for leaf, spec in zip(leaves, self._specs, strict=True) if spec.trainable]
        frozen = [leaf for leaf, spec in zip(leaves, self._specs, strict=True) if not spec.trainable]
        loss, aux, found = self._function.differentiate(trained, frozen, own_part(batch), self._key(micro), factor)
        return loss[None], stacked_output(aux), self._added(gradients, found)

    def _added(self, gradients: Any, found: Sequence[Any]) -> Gradients:
        """`gradients` so far and those that were `found` for the trained leaves, by bucket."""
        names = [spec.fqn for spec in self._specs if spec.trainable]
        by_name = dict(zip(names, found, strict=True))
        added: Gradients = {}
        for bucket in self.trained:
            gradient = _flat(bucket, by_name)
            if self._policy.grads is Placement.SHARDED:
                gradient = self._reduce(bucket, gradient)
            gradient = gradient.astype(dtype_of_jax(self._accumulate_dtype(bucket)))
            added[bucket.index] = gradient if gradients is None else gradients[bucket.index] + gradient
        return added

    def _take(self, found: Any) -> Gradients:
        return self._added(None, [gradient[0] for gradient in found])

    def _mean_gradients(self, params: Any, leaves: Any, keys: Any, batch: Any, micro: Any, factor: Any) -> Any:
        """(mean loss, auxiliary output, mean gradients of the trained leaves) over all devices."""
        leaves = self._leaves(params) if leaves is None else leaves
        trained = [leaf for leaf, spec in zip(leaves, self._specs, strict=True) if spec.trainable]
        frozen = [leaf for leaf, spec in zip(leaves, self._specs, strict=True) if not spec.trainable]
        key = self._key(micro) if keys is None else keys[0]
        loss, aux, found = self._function.differentiate(trained, frozen, own_part(batch), key, factor)

        def mean(value: Any) -> Any:
            wide = value.astype(jnp.promote_types(value.dtype, jnp.float32))
            return (jax.lax.psum(wide, AXIS) / self.mesh.world_size).astype(value.dtype)

        return mean(loss), stacked_output(aux), [mean(gradient) for gradient in found]

    def _key(self, micro: Any) -> Any:
        """The random key of a micro-batch on this device."""
        key = jax.random.fold_in(jax.random.key(self._seed), jax.lax.axis_index(AXIS))
        return jax.random.fold_in(key, micro)

    def _evaluate(self, params: Any, batch: Any) -> Any:
        loss, aux = self._function.call(self._leaves(params), own_part(batch), None)
        return loss[None], stacked_output(aux)

    def _leaves(self, params: Sequence[Any]) -> list[Any]:
        """The parameters in tree order, cut from the buckets."""
        found = {
            slot.param.fqn: params[bucket.index][slot.offset : slot.end].reshape(slot.param.shape)
            for bucket in self._buckets
            for slot in bucket.slots
        }
        return [found[spec.fqn] for spec in self._specs]

    def _accumulate_dtype(self, bucket: Bucket) -> DType:
        return self._precision.gradient_of(bucket.kind.dtype)

    def _reduce(self, bucket: Bucket, gradient: Any) -> Any:
        """The reduced gradient of what this device updates."""
        before, after, op = self._step_policy.reduction.scaling(self.mesh.world_size)
        sent = gradient.astype(dtype_of_jax(self._precision.reduce_of(bucket.kind.dtype))) * before
        reduced = (
            summed_parts(self.mesh, sent, 0) if self._policy.optim is Placement.SHARDED else jax.lax.psum(sent, AXIS)
        )
        return reduced / self.mesh.world_size if op is ReduceOp.AVG else reduced * after

    # The update.

    def update_here(self, recipe: Recipe, held: Held, gradients: Gradients, inputs: Inputs) -> Any:
        """`update` of one device."""
        assert self._slice_update is not None  # the engine refuses to train without an optimizer
        is_cut = self._policy.optim is Placement.SHARDED
        if self._policy.grads is Placement.REPLICATED:
            gradients = {
                bucket.index: self._reduce(bucket, gradients[bucket.index]).astype(gradients[bucket.index].dtype)
                for bucket in self.trained
            }
        outcome = self._judge(gradients, inputs.loss_scale)
        numbers: dict[str, Any] = {}
        params, masters, states = list(held.params), dict(held.masters), dict(held.states)
        for bucket, which, variant in zip(self.trained, recipe.term_indices, recipe.variants, strict=True):
            index = bucket.index
            rows = Rows(bucket, is_cut=is_cut)
            param = self._shard(bucket, held.params[index]) if is_cut else held.params[index]
            before = held.masters.get(index, param)
            master, after, found = self._slice_update.apply(
                variant,
                before,
                gradients[index],
                held.states[index],
                jax.tree.map(rows.spread, inputs.terms[which]),
                outcome.clip_factor / inputs.loss_scale,
                rows,
            )
            numbers.update(found)
            fresh = self._as_param(bucket, master, inputs.keys)
            if self._step_policy.skip_overflow:
                master, fresh = (
                    jnp.where(outcome.applied, new, old) for new, old in ((master, before), (fresh, param))
                )
                after = {
                    name: jnp.where(outcome.applied, value, held.states[index][name]) for name, value in after.items()
                }
            states[index] = after
            if index in held.masters:
                masters[index] = master
            params[index] = jax.lax.all_gather(fresh, AXIS, tiled=True) if is_cut else fresh
        return Held(tuple(params), masters, states), outcome._replace(numbers=numbers)

    def _shard(self, bucket: Bucket, whole: Any) -> Any:
        """This device's shard of a bucket."""
        return jax.lax.dynamic_slice_in_dim(whole, self._low(bucket), bucket.shard_numel)

    def _low(self, bucket: Bucket) -> Any:
        return jax.lax.axis_index(AXIS) * bucket.shard_numel

    def _judge(self, gradients: Gradients, loss_scale: Any) -> Outcome:
        """Return norm and overflow over all devices; squares are of gradients divided by the largest."""
        is_cut = self._policy.optim is Placement.SHARDED
        policy = self._step_policy
        ends = jnp.asarray([bucket.numel for bucket in self.trained], jnp.int32)
        if not (policy.measure_norm or policy.clip_norm > 0.0 or policy.skip_overflow):
            return Outcome(jnp.bool_(True), jnp.float32(0.0), jnp.float32(1.0), ends, {})
        own = {b.index: gradients[b.index] if is_cut else self._shard(b, gradients[b.index]) for b in self.trained}
        bad = [
            jnp.min(jnp.where(jnp.isfinite(own[b.index]), b.numel, self._low(b) + _count(own[b.index])))
            for b in self.trained
        ]
        is_number = jnp.all(jnp.stack([~jnp.any(jnp.isnan(part)) for part in own.values()]))
        agreed = jax.lax.pmin(jnp.stack([*bad, is_number.astype(jnp.int32)]).astype(jnp.int32), AXIS)
        finite = jnp.all(agreed[:-1] == ends)

        wide = [part.astype(jnp.float32) for part in own.values()]
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(part)) for part in wide]))
        unit = jnp.where((largest > 0.0) & jnp.isfinite(largest), largest, 1.0)
        squares = jnp.sum(jnp.stack([precise_sum(jnp.square(part / unit)) for part in wide]))
        pairs = jax.lax.all_gather(jnp.stack([unit, squares]), AXIS)
        most = jnp.max(pairs[:, 0])
        norm = most * jnp.sqrt(jnp.sum(jnp.square(pairs[:, 0] / most) * pairs[:, 1])) / loss_scale
        norm = jnp.where(finite, norm, jnp.where(agreed[-1] == 1, jnp.inf, jnp.nan))
        factor = jnp.float32(1.0)
        if policy.clip_norm > 0.0:
            factor = policy.clip_norm / (norm + 1e-6)
            factor = jnp.where(factor > 1.0, 1.0, factor)  # NaN stays
        applied = finite if policy.skip_overflow else jnp.bool_(True)
        return Outcome(applied, norm, factor, agreed[:-1], {})

    def _publish(self, weights: Mapping[int, Any], keys: Mapping[int, RoundingKeys]) -> Any:
        is_cut = self._policy.optim is Placement.SHARDED
        fresh = [self._as_param(bucket, weights[bucket.index], keys) for bucket in self._buckets]
        return tuple(jax.lax.all_gather(part, AXIS, tiled=True) if is_cut else part for part in fresh)

    def _as_param(self, bucket: Bucket, weights: Any, keys: Mapping[int, RoundingKeys]) -> Any:
        """A device's weights of a bucket in the parameters' type."""
        dtype = dtype_of_jax(bucket.kind.dtype)
        if bucket.index not in keys:
            return weights.astype(dtype)
        rows = Rows(bucket, is_cut=self._policy.optim is Placement.SHARDED)
        return rounded(weights, dtype, keys[bucket.index], rows)


def dtype_of_jax(dtype: DType) -> Any:
    """The type of JAX."""
    return jnp.dtype(dtype.value)


def summed_parts(mesh: DeviceMesh, sent: Any, axis: int) -> Any:
    """The sum over devices of this device's part along `axis`, added in float32. See [Note: Reduce-scatter on CPUs]."""
    is_narrow = sent.dtype.itemsize == 2
    if not (is_narrow or mesh.is_hosts):
        return jax.lax.psum_scatter(sent, AXIS, scatter_dimension=axis, tiled=True)
    shape = (*sent.shape[:axis], mesh.world_size, -1, *sent.shape[axis + 1 :])
    parts = jax.lax.all_to_all(sent.reshape(shape), AXIS, split_axis=axis, concat_axis=axis)
    return jnp.sum(parts, axis=axis, dtype=jnp.float32 if is_narrow else None)


def summed_whole(mesh: DeviceMesh, sent: Any) -> Any:
    """The sum over devices of a flat array, whole on each.

    XLA's gloo waits in its all-reduce by polling: a small one takes up to 4 ms of a core that others use too. Between
    processes each therefore sends a small array to all ranks, and adds in the order of ranks.
    """
    if not mesh.is_hosts or sent.size * mesh.world_size > _MOST_SENT_NUMEL:
        return jax.lax.psum(sent, AXIS)
    to_each = jnp.broadcast_to(sent, (mesh.world_size, sent.size))
    return jnp.sum(jax.lax.all_to_all(to_each, AXIS, split_axis=0, concat_axis=0), axis=0)


_MOST_SENT_NUMEL = 1 << 18
"""Beyond it an all-reduce moves fewer bytes in less time."""


def rounding_keys_of(buckets: Iterable[Bucket], steps: Mapping[str, int]) -> dict[int, RoundingKeys]:
    """How the parameters of 16 bits are rounded stochastically after so many updates of each, by bucket."""
    return {bucket.index: rounding_keys(bucket, steps) for bucket in buckets if bucket.kind.dtype.itemsize == 2}


def own_part(batch: Any) -> Any:
    """A device's part of a batch, without the axis over devices."""
    return weak_numbers(jax.tree.map(lambda part: part[0], batch))


def weak_numbers(batch: Any) -> Any:
    """A batch with numbers of Python as JAX traces them."""

    def convert(part: Any) -> Any:
        return as_weak(part.value) if isinstance(part, WeakNumbers) else part

    return jax.tree.map(convert, batch, is_leaf=lambda part: isinstance(part, WeakNumbers))


def stacked_output(aux: Any) -> Any:
    """An auxiliary output with an axis over devices."""
    return jax.tree.map(lambda value: jnp.asarray(value)[None], aux)


def _flat(bucket: Bucket, by_name: Mapping[str, Any]) -> Any:
    """The gradients of a bucket laid out as its parameters, zeros between them."""
    dtype = dtype_of_jax(bucket.kind.dtype)
    parts, end = [], 0
    for slot in bucket.slots:
        parts += [jnp.zeros(slot.offset - end, dtype), by_name[slot.param.fqn].reshape(-1)]
        end = slot.end
    return jnp.concatenate([*parts, jnp.zeros(bucket.numel - end, dtype)])


def _count(values: Any) -> Any:
    return jax.lax.iota(jnp.int32, values.size)
