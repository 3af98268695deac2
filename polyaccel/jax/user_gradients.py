"""Gradients in the hands of a script: trees that it gets as means over ranks, and trees that it gives back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.numpy import numpy_dtype
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.engine.base import Engine
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import PolyaccelError
from polyaccel.jax.adapter import JaxAdapter
from polyaccel.jax.auxiliary import AuxMeans
from polyaccel.jax.optax_optimizer import TransformationOptimizer
from polyaccel.jax.program.calls import engine_call
from polyaccel.jax.views import array_over, fence


def leaves_like(tree: Any, adapter: JaxAdapter, what: str) -> list[Any]:
    """Return the leaves of `tree` in tree order. Raises PolyaccelError unless it is built as the parameters are."""
    hint = "pass a tree of the structure and the shapes of engine.params"
    structure = jax.tree.structure(tree)
    if structure != adapter.structure:
        text = str(structure)[:200]
        raise PolyaccelError(f"{what} have another structure than the parameters: {text}", hint=hint, value=text)
    leaves: list[Any] = jax.tree.leaves(tree)
    for leaf, wanted in zip(leaves, adapter.leaves(), strict=True):
        if jnp.shape(leaf) != wanted.shape:
            raise PolyaccelError(
                f"{what} have the shape {jnp.shape(leaf)} for parameter {wanted.fqn!r} of shape {wanted.shape}",
                hint=hint,
                value=wanted.fqn,
            )
    return leaves


def tree_of_gradients(trained: Sequence[Any], adapter: JaxAdapter) -> Any:
    """Return gradients of the trained leaves as the caller's tree, with zeros for the others."""
    remaining = iter(trained)
    found = [
        next(remaining) if leaf.is_trained else jnp.zeros(leaf.shape, numpy_dtype(leaf.dtype))
        for leaf in adapter.leaves()
    ]
    return jax.tree.unflatten(adapter.structure, found)


def trained_gradients(tree: Any, adapter: JaxAdapter, factor: float) -> list[jax.Array]:
    """Return `tree * factor` for the trained leaves, in their own types."""
    leaves = leaves_like(tree, adapter, "the gradients")
    return [
        _scaled(jnp.asarray(leaf), factor, numpy_dtype(of.dtype))
        for leaf, of in zip(leaves, adapter.leaves(), strict=True)
        if of.is_trained
    ]


def _scaled(leaf: jax.Array, factor: float, dtype: Any) -> jax.Array:
    """`leaf * factor`, multiplied in at least float32."""
    if factor == 1.0:
        return leaf.astype(dtype)
    return (leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) * factor).astype(dtype)


def mean_over_ranks(arrays: Sequence[jax.Array], communicator: Communicator, accelerator: Accelerator) -> list[Any]:
    """Return the mean of each array over the ranks, computed in at least float32. Collective."""
    if communicator.world_size == 1:
        return list(arrays)
    wide = jnp.promote_types(jnp.result_type(*arrays), jnp.float32)
    flat = jnp.concatenate([jnp.ravel(array).astype(wide) for array in arrays])
    travels = communicator.allocate(flat.size, DType.parse(np.dtype(wide).name))
    travels.copy_from(accelerator.import_array(jax.block_until_ready(flat)))
    communicator.all_reduce(travels, ReduceOp.AVG, label="gradients in hand").wait()
    whole = jnp.array(array_over(travels, (flat.size,), "gradients in hand"), copy=True)
    jax.block_until_ready(whole)
    ends = np.cumsum([array.size for array in arrays])[:-1]
    parts = jnp.split(whole, ends)
    return [part.reshape(array.shape).astype(array.dtype) for part, array in zip(parts, arrays, strict=True)]


class GradientsOfEngine(Engine):
    """The part of an engine that puts gradients in the hands of a script."""

    adapter: JaxAdapter
    runtime: EngineBuilder
    optimizer: Any
    aux: Any
    _aux_means: AuxMeans | None
    _calls_since_update = 0
    """How often `value_and_grad` was called since the last update."""
    _has_own_gradients = False
    """Whether the gradients of the update are those of `apply_gradients`."""

    @property
    def _reduction_factor(self) -> float:
        """The factor of a mean over ranks by which it becomes what the config reduces gradients to."""
        return 1.0 if self.runtime.step_policy.reduction.average else float(self._data_ranks)

    @abstractmethod
    def _require_own_process(self) -> None:
        """Raise PolyaccelError in a process that was forked from the engine's."""

    @abstractmethod
    def _look_at_first(self, data: Any, *, is_whole: bool) -> None:
        """Let what precedes the training see its first batch. Collective."""

    @abstractmethod
    def _update_parameters(self, loss: float | None) -> None:
        """Update the parameters and the carried state after gradients of this mean loss. Collective."""

    @engine_call
    def value_and_grad(self, batch: Any, params: Any = None, *, rng: Any = None) -> tuple[jax.Array, Any]:
        """Compute the loss and the gradients of the batches of all ranks, and keep neither. Collective.

        It is `jax.value_and_grad(fn)(params, batch, rng)`, averaged over ranks: change the gradients as you like, and
        give them to `apply_gradients`. The auxiliary output is in `aux`. Each call replaces a carried state.

        Args:
            batch: Micro-batch as in `grad_step`.
            params: Tree of parameters to differentiate at, such as perturbed ones; None takes those of the engine.
            rng: Key of this rank, which the function gets. None gives the call number k after an update the key of
                micro-batch k.

        Returns:
            (scalar loss, gradients), means over ranks, or sums of gradients with `"gradient_allreduce_op": "sum"`.
            Gradients have the tree, the shapes and the types of the parameters, or float32 under fp16, whose loss scale
            is divided out. Those of integers are zeros. They are whole on every rank, at every stage, or lie as
            the parameters do on the script's own mesh.

        Raises:
            PolyaccelError: `params` is another tree, a leaf is not an array of numbers, or this process was forked.

        Example:
            ```python
            loss, gradients = engine.value_and_grad(batch)
            gradients = jax.tree.map(lambda one: jnp.clip(one, -1.0, 1.0), gradients)
            engine.apply_gradients(gradients, loss)
            ```
        """
        self._require_own_process()
        self._look_at_first([batch], is_whole=False)
        leaves = None if params is None else leaves_like(params, self.adapter, "the parameters")
        count = self._calls_since_update
        scale = self.loss_scaler.loss_scale if self.loss_scaler.is_active else 1.0
        with self.timer("backward"):
            loss, aux, found = self._mean_gradients(leaves, batch, rng, self.counters.micro_steps + count, scale)
        self.aux = aux if self._aux_means is None else self._aux_means.of_one(aux)
        self._calls_since_update += 1
        if self.loss_scaler.is_active:
            found = [gradient.astype(jnp.float32) / scale for gradient in found]
        if self._reduction_factor != 1.0:
            found = [gradient * self._reduction_factor for gradient in found]
        return loss, tree_of_gradients(found, self.adapter)

    @engine_call
    def apply_gradients(self, gradients: Any, loss: Any = None) -> None:
        """Run one optimizer step with gradients of the script's own. Collective.

        Args:
            gradients: Tree like the parameters. Ranks may pass different ones: the mean over ranks is applied. Clipping
                by the config follows.
            loss: Scalar loss of the step, for metrics, logs and a transformation that takes `value`.

        Raises:
            PolyaccelError: The tree is another one, an accumulation by `grad_step` is unfinished, the transformation
                needs the loss, the engine has no optimizer, or this process was forked.
            LossScaleError: Gradients are not finite step after step, at the smallest loss scale of fp16.
        """
        self._require_own_process()
        self._require_optimizer()
        if self.zero.holds_gradients or self.counters.is_in_window:
            raise PolyaccelError(
                "apply_gradients was called inside an unfinished accumulation of grad_step",
                hint="call engine.step() until the update, or engine.zero_grad(); or add the gradients of "
                "value_and_grad yourself",
            )
        if self.counters.boundary_by_hand is False:
            raise PolyaccelError(
                "apply_gradients updates the parameters, and the accumulation boundary was set to False",
                hint="call engine.set_gradient_accumulation_boundary(None) before it",
            )
        known = None if loss is None else float(loss)
        if isinstance(optimizer := self.zero.optimizer, TransformationOptimizer):
            optimizer.require_loss(known, "pass it: engine.apply_gradients(gradients, loss)")
        scale = self.loss_scaler.loss_scale if self.loss_scaler.is_active else 1.0
        found = trained_gradients(gradients, self.adapter, scale / self._reduction_factor)
        with self.timer("reduce"):
            self._take_gradients(jax.block_until_ready(found))
        fence()
        self._has_own_gradients = True
        try:
            self._update_parameters(known)
        finally:
            self._has_own_gradients = False
        self._calls_since_update = 0
        self.counters.skip_to_last()
        self._end_step(self.optimizer.param_groups, known, {})

    @abstractmethod
    def _mean_gradients(
        self, leaves: Sequence[Any] | None, batch: Any, rng: Any, number: int, factor: float
    ) -> tuple[jax.Array, Any, list[Any]]:
        """(loss, auxiliary output, gradients of `loss * factor` for the trained leaves), means over ranks. Collective.

        `leaves` None are the engine's own; `rng` None is the key of micro-batch `number`.
        """

    @abstractmethod
    def _take_gradients(self, gradients: Sequence[jax.Array]) -> None:
        """Take gradients of the trained leaves, in tree order, as those of a step with one micro-batch. Collective."""
