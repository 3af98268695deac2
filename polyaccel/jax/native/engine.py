"""The engine of native mode: JAX exchanges gradients, updates and publishes in one program over all its devices.

A process has one rank for each of its devices, and its batches hold the samples of all of them. What users call is as
in views mode, and so are config, checkpoints and metrics; `params` are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.accelerators.memory.numpy import NumpyBuffer, allocate_numpy, numpy_dtype
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.errors import PolyaccelError
from polyaccel.jax.carried_state import CarriedState
from polyaccel.jax.missing_members import assigned_params_error
from polyaccel.jax.native.many_steps import StepsProgram, steps_on_devices
from polyaccel.jax.native.memory import NativeMemory
from polyaccel.jax.native.mesh import DeviceMesh
from polyaccel.jax.native.optimizers import slice_update
from polyaccel.jax.native.program import Gradients, StepProgram
from polyaccel.jax.native.scanning_engine import ScanningEngine
from polyaccel.jax.native.state import NativeState
from polyaccel.jax.native.step import NativeStep, Program
from polyaccel.jax.program.batches import WeakNumbers, as_inputs, is_weak, split_batch
from polyaccel.jax.program.calls import engine_call
from polyaccel.jax.program.carried import StateForm
from polyaccel.jax.pytree import dtype_of, named_leaves
from polyaccel.jax.rewrites import RewriteContext
from polyaccel.jax.views import CopyCount
from polyaccel.zero.plan.layout import Bucket


class NativeEngine(ScanningEngine):
    """JAX engine of one compiled step on a device mesh: JAX itself reduces gradients and updates the parameters.

    The config chooses it by `"jax": {"execution": "native"}`.
    """

    _program: Program
    _replicates_in_background = False  # what is copied to the host are arrays of JAX, which an update may use again

    def __init__(self, rewrites: RewriteContext, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._last: Any = None
        """The micro-batch whose gradients the program of an update computes, while `before_update` is called."""
        super().__init__(rewrites)
        self._recorder.work.ranks_here = len(mesh.local)
        self._recorder.work.streams_of_batches = self.communicator.world_size
        self._recorder.begin()

    @cached_property
    def _many_steps(self) -> StepsProgram:
        assert isinstance(self._program, StepProgram)  # other engines have their own
        return steps_on_devices(self._program, self._reduce_here)

    @property
    def _reduce_here(self) -> Callable[[Any], Any] | None:
        """What makes the states of devices equal inside a program; None where there is one."""
        carried = self._carried
        return carried.reduce_here if isinstance(carried, NativeState) and self._mesh.world_size > 1 else None

    @property
    def _ranks_of_batches(self) -> Communicator:
        return self.communicator

    @property
    def _devices_of_aux(self) -> int:
        return len(self._mesh.local)

    def shard_parameters(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        optimizer, seed, mesh, runtime = self._rewrites.slice_optimizer, self._rewrites.seed, self._mesh, self.runtime
        self._loss_function.own_meshes = {"shard_map": mesh.world_size}
        specs = tuple(self.adapter.param_specs())
        self.adapter.separate(optimizer)
        layout = runtime.plan(specs, self.adapter.unit_names, updates=self.adapter.update_names())
        update = None if optimizer is None else slice_update(optimizer)
        program = self._program = StepProgram(
            *(mesh, layout, runtime.policy, runtime.step_policy, specs[::-1], self._loss_function, update, seed)
        )
        first = self._first_values(self._rewrites.params)
        memory = NativeMemory(mesh, layout, runtime.policy, first, self._starts, program.publish)
        self.zero = NativeStep(layout, memory, program, optimizer, update, self.communicator)
        self.adapter.let_go()
        return (), tuple(spec.fqn for spec in specs)

    def _starts(self, bucket: Bucket) -> dict[str, np.ndarray[Any, Any]]:
        """One element of each of the optimizer's states of a bucket, as it begins."""
        optimizer = self._rewrites.slice_optimizer
        if optimizer is None:
            return {}
        types = optimizer.state_types
        states = {name: allocate_numpy(1, types.get(name, DType.FLOAT32)) for name in optimizer.state_names}
        group = self.optimizer.param_groups[bucket.kind.group]
        optimizer.initialise_states(states, group, bucket.slots[0].param)
        return {name: state.raw for name, state in states.items()}

    def _carry(self, form: StateForm, first: Any) -> CarriedState:
        return NativeState(form, first, self._rewrites.state_reduction, self.communicator, self._mesh)

    def _first_values(self, params: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Rank 0's parameters, flat in host memory, in the precision that they came in."""
        found = {}
        for fqn, leaf in named_leaves(params)[0].items():
            dtype = dtype_of(fqn, leaf)
            value = np.array(leaf, numpy_dtype(dtype)).reshape(-1)
            if self.communicator.world_size > 1:
                travels = self.communicator.allocate(value.size, dtype)
                travels.copy_from(NumpyBuffer(value))
                self.communicator.broadcast(travels, 0, label="parameters").wait()
                value = np.frombuffer(travels.to_bytes(), numpy_dtype(dtype))
            found[fqn] = value
        return found

    # Running the function.

    @property
    @engine_call
    def params(self) -> Any:
        """The parameters in the caller's tree, as they are now: on the script's mesh where there is one, else whole on
        this process's first device. They do not change."""
        self._require_own_process()
        self.zero.consistency.require()
        return jax.tree.unflatten(self.adapter.structure, self.zero.leaves())

    @params.setter
    def params(self, value: Any) -> None:
        raise assigned_params_error()

    @property
    def param_views(self) -> Any:
        raise PolyaccelError(
            "parameters of native mode have no views: JAX replaces them in each step",
            hint='use engine.params, or "jax": {"execution": "views"}',
            value="native",
        )

    @property
    def copies(self) -> CopyCount:
        """JAX has the parameters itself, and imports none."""
        return CopyCount(0, 0)

    @engine_call
    def grad_step(self, batch: Any) -> jax.Array:
        """Compute and keep the gradients of one micro-batch of all own devices. Auxiliary output is in `aux`; with
        several devices it has an axis over them.

        Args:
            batch: Micro-batch of this process, as a tree of arrays.

        Returns:
            Its mean loss.
        """
        self._require_own_process()
        self._require_optimizer()
        self._look_at_first([batch], is_whole=False)
        cut = self._cut(batch)
        self._work.count(as_inputs(batch), self.global_steps + 1)
        self._meet("gradients of JAX")
        with self.timer("backward"):
            losses, aux = self.zero.differentiate(cut, self.counters.micro_steps, self._loss_factor)
        return self._take(losses, aux)

    def _mean_gradients(
        self, leaves: Sequence[Any] | None, batch: Any, rng: Any, number: int, factor: float
    ) -> tuple[jax.Array, Any, list[Any]]:
        cut = self._cut(batch)
        self._meet("gradients of JAX")
        whole = None if leaves is None else [self._mesh.on_each(jnp.asarray(leaf)) for leaf in leaves]
        keys = None if rng is None else self._keys_of_devices(rng)
        loss, aux, found = self._program.mean_gradients(
            self.zero.params.held.params, whole, keys, cut, np.uint32(number), np.float32(factor)
        )
        own = [self._mesh.own_parts(gradient)[0] for gradient in found]
        return self._mesh.own_parts(loss)[0], self._own_aux(self._keep_state(aux)), own

    def _keys_of_devices(self, rng: Any) -> Any:
        """A key for each of this process's devices: `rng` itself where there is one."""
        count = len(self._mesh.local)
        return self._mesh.over_devices([key[None] for key in (jax.random.split(rng, count) if count > 1 else [rng])])

    def _take_gradients(self, gradients: Sequence[jax.Array]) -> None:
        self._meet("gradients of JAX")
        self.zero.take_gradients(
            [self._mesh.over_devices([gradient[None]] * len(self._mesh.local)) for gradient in gradients]
        )

    def total_gradients(self) -> Gradients:
        """The gradients that the next update will use, by bucket, for a call of `before_update`. Collective."""
        last = None if self._last is None else (self._last, self.counters.micro_steps, self._loss_factor)
        return self.zero.gradients_with(last)

    @engine_call
    def train_batch(self, data_iter: Any = None) -> jax.Array:
        # The last micro-batch, the exchange and the update are one program.
        *earlier, last = self._micro_batches(data_iter)
        losses = []
        for micro_batch in earlier:
            with self._checks.explaining_parts(data_iter, self.gradient_accumulation_steps()):
                losses.append(self.grad_step(micro_batch))
            self.step()
        if self.counters.is_boundary and not self._needs_loss:
            losses.append(self._step_with(last))
        else:  # the caller has set it, or the update waits for the loss
            losses.append(self.grad_step(last))
            self.step()
        return jnp.stack(losses).mean()

    def _evaluate(self, batch: Any) -> tuple[Any, Any]:
        self.zero.consistency.require()
        cut = self._cut(batch)
        self._meet("evaluation of JAX")
        losses, aux = self.zero.evaluate(cut)
        return self._own_mean(losses), self._own_aux(self._without_state(aux))

    @engine_call
    def program(self, batch: Any) -> jax.stages.Compiled:
        """Compile a step of one micro-batch, its exchange and its update.

        Args:
            batch: Micro-batch that has the shapes and types.

        Returns:
            The compiled program.
        """
        self._require_own_process()
        self._require_optimizer()
        return self.zero.program(self._cut(batch), self.optimizer.param_groups)

    def destroy(self) -> None:
        """Release arrays and connections. `params` taken before keep their values."""
        self._close_saving()
        self.zero.close()
        self._rewrites.remove()
        self._recorder.close()

    def _step_with(self, batch: Any) -> jax.Array:
        self._require_own_process()
        self._require_optimizer()
        cut = self._cut(batch)
        self._work.count(as_inputs(batch), self.global_steps + 1)
        self._meet("step of JAX")
        self._last = cut
        for call in self.before_update:
            call()
        self._last = None
        groups = self.optimizer.param_groups
        self._move_rates(self.hyperparams)
        with self.timer("update"):
            losses, aux, result = self.zero.step(
                cut, self.counters.micro_steps, self._loss_factor, groups, self._gradient_scale
            )
        loss = self._take(losses, aux)
        self._take_result(result)
        self._reduce_outputs()
        mean = float(jnp.stack(self._losses).mean())
        self._losses.clear()
        self._end_step(groups, mean, {})
        return loss

    def _cut(self, batch: Any) -> Any:
        parts = split_batch(
            batch,
            len(self._mesh.local),
            over="devices of this process",
            length_cure="give all arrays a first axis of devices * train_micro_batch_size_per_gpu",
        )
        self._checks.warn_of_lookups(batch, parts)
        cut = self._with_state(jax.tree.map(self._over_devices, *map(as_inputs, parts)))
        arguments = (self.zero.params.held.params, None, cut, np.uint32(0), np.float32(1.0))
        with self._checks.explaining_parts(batch, len(parts)):
            self._checks.require_scalable(as_inputs(parts[0]))
            self._loss_function.check(self._program.differentiate, arguments)
        return cut

    def _over_devices(self, *parts: Any) -> Any:
        cut = self._mesh.over_devices([_led(part) for part in parts])
        return WeakNumbers(cut) if is_weak(parts[0]) else cut

    def _meet(self, what: str) -> None:
        if self.communicator.world_size > 1:
            self.communicator.barrier(label=what)

    def _take(self, losses: jax.Array, aux: Any) -> jax.Array:
        self._keep_aux(self._own_aux(self._keep_state(aux)))
        loss = self._own_mean(losses)
        self._losses.append(loss)
        return loss

    def _own_mean(self, losses: jax.Array) -> jax.Array:
        own = self._mesh.own_parts(losses)
        return own[0].reshape(()) if len(own) == 1 else jnp.float32(np.mean([np.asarray(part) for part in own]))

    def _own_aux(self, aux: Any) -> Any:
        def own(value: jax.Array) -> Any:
            parts = self._mesh.own_parts(value)
            return parts[0][0] if len(parts) == 1 else np.concatenate([np.asarray(part) for part in parts])

        return jax.tree.map(own, aux)


def _led(part: Any) -> Any:
    """A device's part of an array, behind an axis over devices."""
    if isinstance(part, jax.Array):
        return part[None]
    return np.asarray(part, jnp.result_type(part) if is_weak(part) else None)[None]
