"""The engine that JAX users hold: gradients of a function, steps, checkpoints, and parameters that follow."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyaccel.checkpoint.name_map import NameMap
from polyaccel.engine.base import Engine
from polyaccel.errors import PolyaccelError
from polyaccel.jax.adapter import JaxAdapter
from polyaccel.jax.checkpoint import load_engine, save_engine
from polyaccel.jax.function import LossFn, LossFunction, as_inputs
from polyaccel.jax.optax_optimizer import OptaxOptimizer
from polyaccel.jax.sharded import ShardedFunction
from polyaccel.jax.sharded_params import ShardedParams
from polyaccel.jax.views import CopyCount, fence
from polyaccel.runtime import Runtime
from polyaccel.zero.optimizers import SliceOptimizer
from polyaccel.zero.policy import Placement


class OptimizerGroups:
    """What schedules move: the hyperparameters of each optimizer group."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups


class JaxEngine(Engine):
    """A JAX function in training under ZeRO. Made by `polyaccel.initialize`.

    `train_batch(batch)` is a whole optimizer step; `grad_step(batch)` and `step()` are its parts. `params` are arrays
    over the engine's memory: they change with each step, and `jnp.array(x)` keeps a value.
    """

    def __init__(
        self,
        fn: LossFn,
        params: Any,
        runtime: Runtime,
        slice_optimizer: SliceOptimizer | None,
        hyperparameters: Mapping[str, Any],
        seed: int,
        stacked: Sequence[str] = (),
    ) -> None:
        self._begin(runtime, hyperparameters)
        self._key = jax.random.fold_in(jax.random.key(seed), self.communicator.rank)
        are_sharded = runtime.policy.params is Placement.SHARDED
        layers = tuple(stacked) if are_sharded else ()
        self.adapter = JaxAdapter(params, self.accelerator, runtime.param_dtype, layers)
        self.zero = runtime.zero_step(self.adapter, slice_optimizer, self.optimizer.param_groups, self.timer)
        function = self._loss_function_of(fn)
        self._function: LossFunction | ShardedFunction = function
        if are_sharded:
            params_in_programs = ShardedParams(self.zero, self.accelerator)
            self._function = ShardedFunction(function, self.adapter.leaves(), params_in_programs)
        self.adapter.let_go()
        self._recorder.begin()

    def _begin(self, runtime: Runtime, hyperparameters: Mapping[str, Any]) -> None:
        """What an engine has before it has a model."""
        self.runtime = runtime
        self._compose(runtime.config, runtime.accelerator, runtime.communicator, runtime.loss_scaler())
        self.aux: Any = None
        """The function's auxiliary output for the last micro-batch."""
        self.optimizer = OptimizerGroups([dict(hyperparameters)])
        self._pid = os.getpid()
        self._losses: list[jax.Array] = []

    def _loss_function_of(self, fn: LossFn) -> LossFunction:
        """`fn` on the adapter's leaves, in the types that the config asks for."""
        is_half = self.config.fp16.enabled and self.config.fp16.auto_cast
        return LossFunction(
            fn,
            self.adapter.structure,
            self.adapter.is_trained,
            self.adapter.views,
            self.adapter.originals,
            jnp.float16 if is_half else None,
        )

    @property
    def optimizer_kind(self) -> str | None:
        """What must be equal for one optimizer's state to mean something to another; None without one."""
        optimizer = self.zero.optimizer
        if optimizer is None:
            return None
        return optimizer.kind if isinstance(optimizer, OptaxOptimizer) else type(optimizer).__name__

    # Running the function.

    @property
    def params(self) -> Any:
        """The parameters, in the caller's tree, up to date: arrays over the engine's memory.

        Where parameters are sharded over separate memories they are gathered copies, and every rank has to ask.
        """
        self._require_own_process()
        self._settle_params()
        return self.adapter.tree(self.zero.params)

    @property
    def copies(self) -> CopyCount:
        """How many parameters JAX sees without a copy."""
        return self.adapter.views.count()

    def grad_step(self, batch: Any) -> jax.Array:
        """The loss of one micro-batch; its gradients are on their way. Auxiliary output is in `aux`.

        The function gets a random key that depends on the seed, the rank and the number of micro-batches alone.
        """
        self._require_own_process()
        self._require_optimizer()
        self._settle_params()
        rng = jax.random.fold_in(self._key, self.counters.micro_steps)
        factor = self.loss_scaler.loss_scale / self.gradient_accumulation_steps()
        each_pass = self.runtime.policy.grads is Placement.SHARDED
        self.zero.begin_pass(reduce=each_pass or self.counters.is_boundary)
        try:
            with self.timer("backward"):
                leaves = self.adapter.views.arrays()
                loss, self.aux, gradients = self._function.gradients(leaves, batch, rng, factor)
            with self.timer("reduce"):
                for fqn, gradient in self.adapter.gradients(gradients):
                    self.zero.add_gradient(fqn, gradient)
                self.zero.end_pass()
                self.accelerator.synchronize()  # JAX has its gradients' memory back from here on
        except BaseException:
            self.zero.abandon_pass()  # reducing half a pass could leave the other ranks waiting
            raise
        self._losses.append(loss)
        return loss

    def step(self) -> None:
        """End a micro-batch: at the accumulation boundary update the parameters and move the learning-rate schedule."""
        self._require_own_process()
        self._require_optimizer()
        if not self.counters.is_boundary:
            self.counters.advance()
            return
        fence()
        loss = float(jnp.stack(self._losses).mean()) if self._losses else None
        self._losses.clear()
        self._apply_update(self.optimizer.param_groups)
        self._end_step(self.optimizer.param_groups, loss, {})

    def train_batch(self, data_iter: Any = None) -> jax.Array:
        """One optimizer step; returns the mean loss of this rank's micro-batches.

        `data_iter` is a batch, whose arrays are cut along their first axis into as many micro-batches as the config
        accumulates, or an iterator of micro-batches. Raises PolyaccelError for a batch that cannot be cut evenly.
        """
        losses = []
        for micro_batch in self._micro_batches(data_iter):
            losses.append(self.grad_step(micro_batch))
            self.step()
        return jnp.stack(losses).mean()

    def eval_batch(self, data_iter: Any) -> jax.Array:
        """The loss of one micro-batch (or of the next of an iterator), with None for the random key."""
        self._require_own_process()
        self._settle_params()
        batch = next(data_iter) if _is_iterator(data_iter) else data_iter
        loss, self.aux = self._function.evaluate(self.adapter.views.arrays(), batch)
        return loss

    def program(self, batch: Any) -> jax.stages.Compiled:
        """The compiled program of a micro-batch like `batch`: ask its `memory_analysis()` or `cost_analysis()`."""
        self._require_own_process()
        rng = jax.random.fold_in(self._key, 0)
        return self._function.compiled(self.adapter.views.arrays(), batch, rng, 1.0)

    def zero_grad(self) -> None:
        """Forget all gradients, accumulated ones too."""
        self.zero.discard_gradients()
        self._losses.clear()

    def _settle_params(self) -> None:
        """The updated parameters have been written, whatever streams of the accelerator, unknown to JAX, do that."""
        self.zero.params.fence()
        self.accelerator.synchronize()

    def _micro_batches(self, data: Any) -> list[Any]:
        count = self.gradient_accumulation_steps()
        if data is None:
            raise PolyaccelError("train_batch has no data", cure="pass a batch, or an iterator of micro-batches")
        if _is_iterator(data):
            with self.timer("data"):
                return [next(data) for _ in range(count)]
        if count == 1:
            return [data]
        leaves, structure = jax.tree.flatten(as_inputs(data))
        lengths = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else 0 for leaf in leaves}
        if len(lengths) != 1 or (length := lengths.pop()) % count or not length:
            raise PolyaccelError(
                f"a batch of shapes {[jnp.shape(leaf) for leaf in leaves]} cannot be cut into {count} micro-batches",
                cure="give all arrays a first axis of gradient_accumulation_steps * train_micro_batch_size_per_gpu",
                value=lengths,
            )
        size = length // count
        cuts = [[leaf[at * size : (at + 1) * size] for leaf in leaves] for at in range(count)]
        return [jax.tree.unflatten(structure, cut) for cut in cuts]

    # Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Write everything needed to go on exactly, at any world size, in JAX or in torch. Every rank calls it.

        Raises CheckpointError, and PolyaccelError after half an update.
        """
        self._require_whole_step()
        save_engine(self, save_dir, tag or f"global_step{self.global_steps}", client_state or {}, save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        name_map: NameMap | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Go on from a checkpoint, whatever world size, stage and framework wrote it; returns its path and client
        state. `name_map` says what the parameters are called there, where it is not as here.

        Raises CheckpointError for one that is missing, incomplete, damaged, of another model or another optimizer.
        """
        fence()
        return load_engine(
            self,
            load_dir,
            tag,
            optimizer_states=load_optimizer_states,
            schedule=load_lr_scheduler_states,
            name_map=name_map,
        )

    # What users ask.

    def get_lr(self) -> list[float]:
        """The learning rate of every optimizer group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group]

    def destroy(self) -> None:
        """Let go of buffers and connections. `params` taken before keep their values."""
        self.zero.params.fence()
        if isinstance(self._function, ShardedFunction):
            self._function.close()
        self.adapter.release()
        self.zero.close()

    def _require_own_process(self) -> None:
        """JAX's threads do not survive a fork: a computation in the child would wait for ever."""
        if os.getpid() != self._pid:
            raise PolyaccelError(
                f"the engine of process {self._pid} is used in {os.getpid()}, which was forked from it",
                cure='start workers of a data loader with multiprocessing context "spawn" or "forkserver"',
                value=os.getpid(),
            )


def _is_iterator(data: Any) -> bool:
    return hasattr(data, "__next__")
