"""The engine of views mode: JAX runs the function, and the engine exchanges and updates in its own memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from polyaccel.comm.base import Communicator
from polyaccel.errors import PolyaccelError
from polyaccel.jax.carried_state import CarriedState, ViewsState
from polyaccel.jax.engine import JaxEngine
from polyaccel.jax.missing_members import assigned_params_error
from polyaccel.jax.optax_whole import WholeStates
from polyaccel.jax.program.batches import as_inputs
from polyaccel.jax.program.calls import engine_call
from polyaccel.jax.program.carried import StateForm
from polyaccel.jax.program.function import LossFunction
from polyaccel.jax.program.params import ShardedParams
from polyaccel.jax.program.sharded import ShardedFunction
from polyaccel.jax.rewrites import RewriteContext
from polyaccel.jax.user_gradients import mean_over_ranks
from polyaccel.jax.views import CopyCount
from polyaccel.zero.averaged_weights import averaged_weights
from polyaccel.zero.engine import ZeroEngine


class ViewsEngine(JaxEngine):
    """JAX engine over ZeRO buckets: JAX computes gradients, the ZeRO engine reduces them and updates the parameters.

    The function reads the parameters as views of the engine's buffers, or gathers them in its program at stage 3.
    """

    zero: ZeroEngine

    def __init__(self, rewrites: RewriteContext) -> None:
        super().__init__(rewrites)
        self._recorder.begin()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Evaluate averaged weights: inside the block they are `params`.

        They are the moving average of the config's `ema`, or what a schedule-free optimizer evaluates. Collective at
        both ends. Gradients, updates and checkpoints are errors inside.

        Returns:
            A context manager.

        Raises:
            PolyaccelError: The run averages no weights, or the block is open already.
        """
        return averaged_weights(self.zero, self.optimizer.param_groups)

    @property
    def _ranks_of_batches(self) -> Communicator:
        return self._stage_runtime.communicator

    def shard_parameters(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        optimizer, seed = self._rewrites.slice_optimizer, self._rewrites.seed
        self._stage_runtime = self.runtime.of_stage()
        self._beyond = self._stage_runtime.model_parallel_group
        self._key = jax.random.fold_in(jax.random.key(seed), self._stage_runtime.communicator.rank)
        groups = self.optimizer.param_groups
        self.adapter.separate(optimizer)
        resident = isinstance(optimizer, WholeStates)
        self.zero = self._stage_runtime.zero_step(self.adapter, optimizer, groups, self.timer, resident=resident)
        self._function: LossFunction | ShardedFunction = self._loss_function
        names = tuple(spec.fqn for spec in self.adapter.param_specs())
        units: tuple[str, ...] = ()
        if self._are_sharded:
            params_in_programs = ShardedParams(self.zero, self.accelerator)
            self._function = ShardedFunction(self._loss_function, self.adapter.leaves(), params_in_programs)
            units = tuple(dict.fromkeys(self.adapter.unit_names().values()))
        self.adapter.let_go()
        arrays = self.adapter.views.arrays()
        self._device = next(iter(arrays[0].devices())) if arrays else jax.local_devices(backend="cpu")[0]
        """The one that this rank computes on."""
        return units, names

    def _carry(self, form: StateForm, first: Any) -> CarriedState:
        return ViewsState(form, first, self._rewrites.state_reduction, self.communicator, self._device)

    @property
    @engine_call
    def params(self) -> Any:
        self._require_own_process()
        self._settle_params()
        return self.adapter.tree(self.zero.params)

    @params.setter
    def params(self, value: Any) -> None:
        raise assigned_params_error()

    @property
    @engine_call
    def param_views(self) -> Any:
        if self._are_sharded:
            raise PolyaccelError(
                "parameters of stage 3 have no views: a rank has its shards alone",
                hint="use engine.params, which gathers copies",
                value=3,
            )
        self._require_own_process()
        self._settle_params()
        return jax.tree.unflatten(self.adapter.structure, self.adapter.views.arrays())

    @property
    def copies(self) -> CopyCount:
        return self.adapter.views.count()

    @engine_call
    def grad_step(self, batch: Any) -> jax.Array:
        self._require_own_process()
        self._require_optimizer()
        self._look_at_first([batch], is_whole=False)
        self._settle_params()
        batch = as_inputs(batch, self._device)
        self._checks.require_scalable(batch)
        rng = jax.random.fold_in(self._key, self.counters.micro_steps)
        self._work.count(batch, self.global_steps + 1)
        with self._backward_pass(reduce=self.zero.policy.reduces_pass(is_last=self.counters.is_boundary)):
            with self.timer("backward"):
                leaves = self.adapter.views.arrays()
                arguments = leaves, self._with_state(batch), rng, self._loss_factor
                loss, found, gradients = self._function.gradients(*arguments)
                self._keep_aux(self._keep_state(found))
            with self.timer("reduce"):
                self._end_pass(gradients)
        self._losses.append(loss)
        return loss

    def _mean_gradients(
        self, leaves: Sequence[Any] | None, batch: Any, rng: Any, number: int, factor: float
    ) -> tuple[jax.Array, Any, list[Any]]:
        if leaves is None:
            leaves = jax.tree.leaves(self.params if self._are_sharded else self.param_views)
        batch = as_inputs(batch, self._device)
        self._checks.require_scalable(batch)
        key = jax.random.fold_in(self._key, number) if rng is None else rng
        loss, aux, gradients = self._loss_function.gradients(leaves, self._with_state(batch), key, factor)
        loss, *means = mean_over_ranks([loss, *gradients], self._stage_runtime.communicator, self.accelerator)
        return loss, self._keep_state(aux), means

    def _take_gradients(self, gradients: Sequence[jax.Array]) -> None:
        self._settle_params()
        with self._backward_pass(reduce=True):
            self._end_pass(gradients)

    @contextmanager
    def _backward_pass(self, *, reduce: bool) -> Iterator[None]:
        """Give the reducer up where the pass fails: reducing half of one could leave the other ranks waiting."""
        self.zero.begin_backward(reduce=reduce)
        try:
            yield
        except BaseException:
            self.zero.reducer.abort_backward()
            raise

    def _end_pass(self, gradients: Sequence[jax.Array]) -> None:
        """Reduce the gradients of the trained leaves, unless the program did."""
        for fqn, gradient in self.adapter.gradients(gradients):
            self.zero.reducer.add_gradient(fqn, gradient)
        self.zero.reducer.end_backward()
        self.accelerator.synchronize()  # JAX has its gradients' memory back from here on

    @engine_call
    def train_batch(self, data_iter: Any = None) -> jax.Array:
        losses = []
        for micro_batch in self._micro_batches(data_iter):
            with self._checks.explaining_parts(data_iter, self.gradient_accumulation_steps()):
                losses.append(self.grad_step(micro_batch))
            self.step()
        return jnp.stack(losses).mean()

    def _evaluate(self, batch: Any) -> tuple[Any, Any]:
        self._settle_params()
        given = self._with_state(as_inputs(batch, self._device))
        loss, found = self._function.evaluate(self.adapter.views.arrays(), given)
        return loss, self._without_state(found)

    @engine_call
    def program(self, batch: Any) -> jax.stages.Compiled:
        self._require_own_process()
        rng = jax.random.fold_in(self._key, 0)
        given = self._with_state(as_inputs(batch, self._device))
        return self._function.compiled(self.adapter.views.arrays(), given, rng, 1.0)

    def destroy(self) -> None:
        """Release buffers and connections. `params` taken before keep their values."""
        self._close_saving()
        self.zero.params.wait_all_gathers()
        if isinstance(self._function, ShardedFunction):
            self._function.close()
        self.adapter.release()
        self.zero.close()
        self._rewrites.remove()
        self._recorder.close()

    def _settle_params(self) -> None:
        """The updated parameters have been written, whatever streams of the accelerator, unknown to JAX, do that."""
        self.zero.params.wait_all_gathers()
        self.accelerator.synchronize()
