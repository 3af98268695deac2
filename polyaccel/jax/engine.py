"""The engine that JAX users hold, whatever its parameters rest on: steps, checkpoints, figures.

[Note: Loss cotangent]
A micro-batch's loss is differentiated as it is, with a cotangent of 1, as by plain `jax.grad`: a backward pass of the
user's own (`jax.custom_vjp`) may clip or normalize its cotangent, and must get the one that it was written for.
Gradients accumulate as a sum, and the update divides it by the number of micro-batches: one rounding, in the update's
precision, and none in the type of the gradients. With fp16's loss scale no such backward pass can be right, so it is
refused, and the loss is multiplied with scale / micro-batches, which keeps the sum in the range of fp16.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyaccel.accelerators.memory.numpy import numpy_dtype
from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.load.name_map import NameMap
from polyaccel.checkpoint.save.protocol import SaveContents
from polyaccel.comm.base import Communicator
from polyaccel.engine.policies.watching import profile_settings_of
from polyaccel.engine.replica_groups import find_saved
from polyaccel.engine.resume import TrainingRun
from polyaccel.errors import PolyaccelError
from polyaccel.jax.adapter import JaxAdapter
from polyaccel.jax.auxiliary import AuxMeans
from polyaccel.jax.carried_state import StateOfEngine
from polyaccel.jax.checkpoint import CustomLoad, OwnTree, contents_of, load_run
from polyaccel.jax.hyperparameters import Hyperparameters
from polyaccel.jax.missing_members import MissingMembers
from polyaccel.jax.operations import BatchWork, first_dtype
from polyaccel.jax.optax_optimizer import TransformationOptimizer
from polyaccel.jax.program.batch_checks import BatchChecks, is_iterator
from polyaccel.jax.program.batches import split_batch
from polyaccel.jax.program.calls import engine_call
from polyaccel.jax.program.carried import Carried, StateForm
from polyaccel.jax.program.function import LossFunction
from polyaccel.jax.rewrites import REWRITES, RewriteContext
from polyaccel.jax.state_dict import StateDictOfEngine
from polyaccel.jax.step_profiler import JaxStepProfiler
from polyaccel.jax.train_steps import StepsOfEngine
from polyaccel.jax.user_gradients import GradientsOfEngine
from polyaccel.jax.views import CopyCount, fence
from polyaccel.observability.timing import OUTSIDE
from polyaccel.zero.plan.policy import Placement


class OptimizerGroups:
    """The hyperparameters of each optimizer group, which schedules move.

    Args:
        param_groups: One dict of hyperparameters for each group.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups


class JaxEngine(StateOfEngine, GradientsOfEngine, StateDictOfEngine, StepsOfEngine, MissingMembers):
    """A JAX function in training under ZeRO, built by `polyaccel.initialize`.

    `train_batch(batch)` is a whole optimizer step; `grad_step(batch)` and `step()` are its parts.

    Args:
        rewrites: The function `fn(params, batch, rng)`, which returns a scalar loss or (loss, auxiliary output), its
            parameters and state, and the rewrites that `polyaccel.initialize` has applied so far.
    """

    _beyond: Communicator | None = None
    """Process group of the other pipeline stages, or None without pipeline parallelism."""

    _rewrites: RewriteContext

    def __init__(self, rewrites: RewriteContext) -> None:
        self._rewrites = rewrites
        self.runtime = runtime = rewrites.runtime
        self._compose(runtime.engine_parts())
        self.aux: Any = None
        """The function's auxiliary output: of the last micro-batch, or with `"jax": {"aux": "mean"}` that of a step."""
        self._aux_means: AuxMeans | None = None
        self.optimizer = OptimizerGroups([dict(group) for group in rewrites.groups])
        self._rates = {group["name"]: group["lr"] for group in rewrites.groups if "name" in group}
        form = None if rewrites.state is None else StateForm(rewrites.state)
        stacked = rewrites.stacked if self._are_sharded else ()
        self.adapter = JaxAdapter(rewrites.params, self.accelerator, rewrites.param_dtype, stacked)
        self._loss_function = LossFunction(
            rewrites.model,
            self.adapter.structure,
            self.adapter.is_trained,
            self.adapter.views,
            self.adapter.originals,
            rewrites.cast_inputs,
            rewrites.recomputation,
            form,
        )
        specs = self.adapter.param_specs()
        profile = profile_settings_of(runtime.config) if self.communicator.rank == 0 else None
        total = sum(spec.numel for spec in specs)
        self._work = BatchWork(self._recorder.work, self._traced, first_dtype(specs), profile, total)
        if self._recorder.trace is not None:
            self._recorder.trace.profile_by(JaxStepProfiler())
        self._pid = os.getpid()
        self._losses: list[jax.Array] = []
        self.before_training: Callable[[Any, bool], None] | None = None
        """Called once, before the first training, with its batch, or its micro-batches and False."""
        self._checks = BatchChecks(self._traced, self.loss_scaler)
        rewrites.engine = self
        rewrites.apply([one for one in REWRITES if one.needs_engine])
        if form is not None:
            self._carried = self._carry(form, rewrites.state)
        if rewrites.averages_aux:
            self._aux_means = AuxMeans(self._ranks_of_batches, self._devices_of_aux)
        rewrites.release()

    @property
    def _are_sharded(self) -> bool:
        """Whether a rank holds a part of the parameters only."""
        return self.runtime.policy.params is Placement.SHARDED

    @abstractmethod
    def shard_parameters(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Lay out the parameters in buckets, for `ZeroShards`. Collective.

        Returns:
            Names of the units whose parameters are gathered apart, and names of all parameters.
        """

    def _traced(self, batch: Any) -> Any:
        """The loss of `batch` as JAX traces it, for shapes alone: a program of parameters, batch and key."""
        if self._carried is not None:
            batch = Carried(self._carried.form.shapes(), batch)
        leaves = [jax.ShapeDtypeStruct(leaf.shape, numpy_dtype(leaf.dtype)) for leaf in self.adapter.leaves()]
        return jax.make_jaxpr(self._loss_function.call)(leaves, batch, jax.random.key(0))

    # Running the function.

    @property
    @abstractmethod
    def params(self) -> Any:
        """The parameters as they are now, in the caller's tree: copies, which do not change.

        Collective where they are sharded, and whole there.
        """

    @property
    @abstractmethod
    def param_views(self) -> Any:
        """Arrays over the engine's memory, in the caller's tree of parameters. No copy is made; each step changes them.

        Raises:
            PolyaccelError: There is no such memory: parameters are sharded, or native mode trains them.
        """

    @property
    @abstractmethod
    def copies(self) -> CopyCount:
        """Number of parameters that JAX sees with and without a copy."""

    @abstractmethod
    def grad_step(self, batch: Any) -> jax.Array:
        """Compute the loss of one micro-batch, and start to reduce its gradients. Collective.

        The function gets a random key that follows from the seed, the rank and the number of micro-batches alone. Its
        auxiliary output is in `aux`.

        Args:
            batch: Pytree of this process's arrays, with samples along the first axis. Arrays of numpy and torch are
                converted.

        Returns:
            Scalar loss.

        Raises:
            PolyaccelError: A leaf is not an array of numbers, the engine has no optimizer, or this process was forked.
        """

    @abstractmethod
    def train_batch(self, data_iter: Any = None) -> jax.Array:
        """Run one optimizer step, with all its micro-batches. Collective.

        Args:
            data_iter: A batch, whose arrays are split along the first axis into as many micro-batches as the config
                accumulates; or an iterator of micro-batches. `polyaccel.jax.replicated` marks what stays whole.

        Returns:
            Scalar: the mean loss of this process's micro-batches.

        Raises:
            PolyaccelError: There is no data, or the batch cannot be split evenly.

        Example:
            ```python
            engine = polyaccel.initialize(model=loss_fn, params=params, config=config)
            for inputs, targets in batches:
                loss = engine.train_batch((inputs, targets))
            ```
        """

    @engine_call
    def eval_batch(self, data_iter: Any) -> jax.Array:
        """Compute the loss of one micro-batch without gradients.

        Collective in native mode and where parameters are sharded.

        Args:
            data_iter: Micro-batch as in `grad_step`, or an iterator whose next one is taken. The function gets None as
                its random key.

        Returns:
            Scalar loss; the auxiliary output is in `aux`.

        Raises:
            PolyaccelError: A leaf is not an array of numbers, or this process was forked.
        """
        self._require_own_process()
        loss: jax.Array
        with self.timer(OUTSIDE):
            loss, self.aux = self._evaluate(next(data_iter) if is_iterator(data_iter) else data_iter)
        return loss

    @abstractmethod
    def _evaluate(self, batch: Any) -> tuple[Any, Any]:
        """(loss, auxiliary output) of a micro-batch."""

    @abstractmethod
    def program(self, batch: Any) -> jax.stages.Compiled:
        """Compile the program of a micro-batch, without running it. `memory_analysis()` and `cost_analysis()` describe
        it.

        Args:
            batch: Micro-batch of the same shapes and dtypes.

        Returns:
            Compiled program; in native mode the one of a step with its exchange and update.
        """

    @engine_call
    def step(self) -> None:
        """End a micro-batch: at the accumulation boundary update the parameters and the learning-rate schedule.
        Collective.

        Raises:
            PolyaccelError: The engine has no optimizer, or this process was forked.
            LossScaleError: Gradients are not finite step after step, at the smallest loss scale of fp16.
        """
        self._require_own_process()
        self._require_optimizer()
        if not self.counters.is_boundary:
            self.counters.advance()
            return
        fence()  # for what still reads the parameters, and lest the update be timed with what was before
        loss = float(jnp.stack(self._losses).mean()) if self._losses else None
        self._losses.clear()
        self._update_parameters(loss)
        self._end_step(self.optimizer.param_groups, loss, {})

    def _update_parameters(self, loss: float | None) -> None:
        """Update the parameters and the carried state after gradients of this mean loss. Collective."""
        if isinstance(self.zero.optimizer, TransformationOptimizer):
            self.zero.optimizer.loss = loss
            self._move_rates(self.hyperparams)
        self._settle_replica()
        self._apply_update(self.optimizer.param_groups)
        self._reduce_outputs()

    def _move_rates(self, hyperparams: Hyperparameters) -> None:
        """Set the learning rates of groups with a name where they have changed."""
        for group in (group for group in self.optimizer.param_groups if "name" in group):
            if self._rates.get(name := group["name"]) != group["lr"]:
                hyperparams[name] = self._rates[name] = group["lr"]

    def _keep_aux(self, aux: Any) -> None:
        """Let `aux` be the output of the last micro-batch, and a part of the step's mean."""
        self.aux = aux
        if self._aux_means is not None:
            self._aux_means.add(aux)

    @property
    def _devices_of_aux(self) -> int:
        """How many devices leaves of the auxiliary output have a leading axis over; 1: they have none."""
        return 1

    @property
    @abstractmethod
    def _ranks_of_batches(self) -> Communicator:
        """The ranks, or processes, that have other samples."""

    def _reduce_outputs(self) -> None:
        """Let ranks agree on the state, and on the mean of the auxiliary output, once a step ends. Collective."""
        self._reduce_state()
        if self._aux_means is not None:
            self.aux = self._aux_means.take(self.aux)

    def zero_grad(self) -> None:
        """Discard all gradients, accumulated ones too."""
        self.zero.discard_gradients()
        if self._aux_means is not None:
            self._aux_means.clear()
        self._losses.clear()
        self.counters.begin_window()

    def _micro_batches(self, data: Any) -> list[Any]:
        count = self.gradient_accumulation_steps()
        if data is None:
            raise PolyaccelError("train_batch has no data", hint="pass a batch, or an iterator of micro-batches")
        if is_iterator(data):
            with self.timer("data"):
                parts = [next(data) for _ in range(count)]
            self._look_at_first(parts, is_whole=False)
            return parts
        self._look_at_first(data, is_whole=True)
        hint = "give all arrays a first axis of gradient_accumulation_steps * train_micro_batch_size_per_gpu"
        parts = split_batch(data, count, over="micro-batches", length_cure=hint)
        self._checks.warn_of_lookups(data, parts)
        return parts

    def _look_at_first(self, data: Any, *, is_whole: bool) -> None:
        """Let `before_training` see the first batch, or the first micro-batches. Collective."""
        if self.before_training is not None:
            call, self.before_training = self.before_training, None
            with self.timer(OUTSIDE):
                call(data, is_whole)

    # Scales.

    @property
    def _loss_factor(self) -> float:
        """The cotangent of a micro-batch's loss. See [Note: Loss cotangent]."""
        scaler = self.loss_scaler
        return scaler.loss_scale / self.gradient_accumulation_steps() if scaler.is_active else 1.0

    @property
    def _gradient_scale(self) -> float:
        scaler = self.loss_scaler
        summed = 1 if self._has_own_gradients else self.gradient_accumulation_steps()
        return scaler.loss_scale if scaler.is_active else float(summed)

    # Checkpoints.

    @engine_call
    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        self._require_own_process()
        return self._save(save_dir, tag, client_state, save_latest, self._contents)

    def _contents(self, client_state: Mapping[str, Any]) -> SaveContents:
        allows_bytes = self._saver.policy.allows_bytes
        return contents_of(
            self._run(),
            self.adapter.stacking,
            client_state,
            allows_bytes=allows_bytes,
            seed=self._rewrites.seed,
            state=self._carried,
        )

    @engine_call
    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        name_map: NameMap | None = None,
        custom_load_fn: CustomLoad | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Resume from a checkpoint of any world size, stage and framework. Collective.

        Args:
            load_dir: Folder of checkpoints, or place in the storage that the config names.
            tag: Name of the checkpoint. None takes the latest, or a newer replica in memory; if it is not complete, the
                newest complete one, with a warning.
            load_optimizer_states: False leaves the optimizer's states as they are.
            load_lr_scheduler_states: False leaves the learning-rate schedule as it is.
            name_map: Saved names of parameters that have other names here: patterns, a function, or "flax".
            custom_load_fn: Called as `fn(src=arrays, dst=params)`; returns the tree of parameters to train with.

        Returns:
            (path of the checkpoint, client state).

        Raises:
            CheckpointError: On every rank and with nothing changed: it is missing, incomplete, damaged, or of another
                model or optimizer.
        """
        self._require_own_process()
        fence()

        def load(saved: CheckpointReader) -> tuple[str, dict[str, Any]]:
            return self._take_over(
                saved,
                optimizer_states=load_optimizer_states,
                schedule=load_lr_scheduler_states,
                name_map=name_map,
                custom=None if custom_load_fn is None else OwnTree(custom_load_fn, self.params),
            )

        is_whole = load_optimizer_states and load_lr_scheduler_states and name_map is None and custom_load_fn is None
        return self._resume(
            find_saved(self.replica_group, load_dir, self.runtime.storage), tag, load, is_whole=is_whole
        )

    def _take_over(
        self,
        saved: CheckpointReader,
        *,
        optimizer_states: bool = True,
        schedule: bool = True,
        name_map: NameMap | None = None,
        custom: OwnTree | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """As `load_run`. Collective."""
        return load_run(
            self._run(),
            self.adapter.stacking,
            saved,
            optimizer_states=optimizer_states,
            schedule=schedule,
            name_map=name_map,
            seed=self._rewrites.seed,
            custom=custom,
            state=self._carried,
        )

    def _run(self) -> TrainingRun:
        return self._training_run(TrainingRun, model_parallel_group=self._beyond)

    # What users ask.

    def get_lr(self) -> list[float]:
        """Return the learning rate of every optimizer group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group]

    @property
    def hyperparams(self) -> Hyperparameters:
        """The numbers of `optax.inject_hyperparams` by name, to read, and to set equally on all ranks."""
        return Hyperparameters(self.zero.optimizer)

    def _require_own_process(self) -> None:
        """JAX's threads do not survive a fork: a computation in the child would wait for ever."""
        if os.getpid() != self._pid:
            raise PolyaccelError(
                f"the engine of process {self._pid} is used in {os.getpid()}, which was forked from it",
                hint='start workers of a data loader with multiprocessing context "spawn" or "forkserver"',
                value=os.getpid(),
            )
