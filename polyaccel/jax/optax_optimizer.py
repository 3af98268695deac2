"""An optax transformation on slices of the parameters, in place of the config's optimizer.

Slices are flat and begin anywhere, so the transformation must treat every element alike. That is tried out when the
engine is built: it must treat each half of a vector as it treats the whole, and each of its states must be as long as
the vector, or one number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.buffer import Buffer
from polyaccel.comm.base import Communicator
from polyaccel.errors import ShardingError
from polyaccel.jax.views import array_over
from polyaccel.ops.base import CAST
from polyaccel.zero.update.optimizers import Group, Shard, SliceOptimizer

_PROBE = np.array([0.7, -1.3, 0.02, 2.9, -0.4, 1.1, -0.006, 0.3], np.float32)


class OptaxOptimizer(SliceOptimizer):
    """Runs `transformation` on flat slices. Raises ShardingError for one that is not elementwise.

    Its numbers (counts of steps) are one for all parameters.
    """

    def __init__(self, transformation: Any) -> None:
        self._transformation = transformation
        paths, self._structure = jax.tree_util.tree_flatten_with_path(transformation.init(jnp.zeros(len(_PROBE))))
        self._is_number = [jnp.ndim(leaf) == 0 for _, leaf in paths]
        self._dtypes = [jnp.result_type(leaf) for _, leaf in paths]
        self._names = [f"optax{jax.tree_util.keystr(path)}" for path, _ in paths]
        self._starts = [float(np.ravel(leaf)[0]) if np.size(leaf) else 0.0 for _, leaf in paths]
        self._require_elementwise([leaf for _, leaf in paths])
        self.numbers: dict[str, float] = {
            name: start
            for name, start, is_number in zip(self._names, self._starts, self._is_number, strict=True)
            if is_number
        }
        """Its states of one number each, by name."""
        self._apply = jax.jit(self.step)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The states with one value an element."""
        return tuple(name for name, is_number in zip(self._names, self._is_number, strict=True) if not is_number)

    @property
    def kind(self) -> str:
        """A text that is equal for transformations which understand each other's states."""
        return "optax: " + ", ".join(self._names)

    def initialise_states(self, states: Mapping[str, Buffer], group: Group) -> None:
        starts = dict(zip(self._names, self._starts, strict=True))
        for name, state in states.items():
            state.fill(starts[name])

    def update(
        self,
        shards: Iterable[Shard],
        groups: Sequence[Group],
        grad_scale: float,
        communicator: Communicator,
    ) -> Iterator[Shard]:
        before = dict(self.numbers)
        for shard in shards:
            for run in shard.runs:
                master, grad, out, states = shard.cut(run)
                kept = {name: array_over(state, (run.numel,), name) for name, state in states.items()}
                weights = array_over(master, (run.numel,), "master weights")
                gradient = array_over(grad, (run.numel,), "gradients")
                found, after = jax.block_until_ready(self._apply(weights, gradient, before | kept, grad_scale))
                compute = shard.tier.compute
                master.copy_from(compute.import_array(found))
                for name, state in states.items():
                    state.copy_from(compute.import_array(after[name]))
                self.numbers = {name: float(after[name]) for name in before}
                if out is not None:
                    shard.kernels[CAST](master, out, run.rounding)
            yield shard

    def step(
        self, weights: Any, gradient: Any, states: Mapping[str, Any], grad_scale: Any
    ) -> tuple[Any, dict[str, Any]]:
        """(new weights, new states) of a slice whose gradient is `gradient * grad_scale`, to be traced by JAX.

        States are those of one value an element and of one number, by name, in float32.
        """
        leaves = [jnp.asarray(states[name], dtype) for name, dtype in zip(self._names, self._dtypes, strict=True)]
        wide = gradient.astype(weights.dtype) * jnp.asarray(grad_scale, weights.dtype)
        updates, found = self._transformation.update(wide, jax.tree.unflatten(self._structure, leaves), weights)
        after = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(found)]
        return weights + updates.astype(weights.dtype), dict(zip(self._names, after, strict=True))

    def _require_elementwise(self, leaves: Sequence[Any]) -> None:
        """Raise ShardingError unless halves are treated as the whole is, twice, from states that do not depend on the
        weights."""
        size, half = len(_PROBE), len(_PROBE) // 2
        weights, gradient = jnp.asarray(_PROBE), jnp.asarray(_PROBE[::-1].copy())
        alike = all(jnp.shape(leaf) in ((), (size,)) for leaf in leaves)
        alike = alike and _same(self._transformation.init(weights), self._transformation.init(2.0 * weights))
        alike = alike and all(np.all(np.ravel(leaf) == np.ravel(leaf)[0]) for leaf in leaves)
        for tried in (gradient, gradient.at[0].set(jnp.nan)):  # the second for what would pass over a whole step
            if alike:
                whole = self._twice(weights, tried)
                parts = [self._twice(weights[cut], tried[cut]) for cut in (slice(half), slice(half, size))]
                alike = bool(np.allclose(whole, np.concatenate(parts), rtol=1e-5, atol=0.0, equal_nan=True))
        if not alike:
            raise ShardingError(
                "this optax transformation does not update elements independently, and ZeRO cuts parameters over ranks",
                cure='use an elementwise one; clip by norm with "gradient_clipping" of the config; '
                "for LAMB use the config's",
                value=self._transformation,
            )

    def _twice(self, weights: Any, gradient: Any) -> Any:
        state = self._transformation.init(weights)
        for _ in range(2):
            updates, state = self._transformation.update(gradient, state, weights)
            weights = weights + updates
        return weights


def _same(left: Any, right: Any) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(bool(np.array_equal(one, other)) for one, other in pairs)
