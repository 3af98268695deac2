"""The part of the engine of native mode that takes several optimizer steps in one program."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.engine.lr_schedule_base import Schedule
from polyaccel.jax.engine import JaxEngine, OptimizerGroups
from polyaccel.jax.native.many_steps import StepAhead, StepsProgram
from polyaccel.jax.native.mesh import DeviceMesh
from polyaccel.jax.native.state import NativeState
from polyaccel.jax.native.step import NativeStep
from polyaccel.jax.optax_optimizer import TransformationOptimizer
from polyaccel.jax.program.batches import WeakNumbers, as_inputs, is_weak, split_batch
from polyaccel.zero.update.optimizer_step import StepResult


class ScanningEngine(JaxEngine):
    """JAX engine whose `train_steps` is a scan over the steps of its program."""

    zero: NativeStep
    _mesh: DeviceMesh

    @property
    @abstractmethod
    def _many_steps(self) -> StepsProgram:
        """The program of several steps."""

    @abstractmethod
    def _cut(self, batch: Any) -> Any:
        """Cut a micro-batch over the devices, along a new axis."""

    @abstractmethod
    def _meet(self, what: str) -> None:
        """Wait for other processes with a timeout that names missing ones: a JAX program would hang silently."""

    @abstractmethod
    def _own_aux(self, aux: Any) -> Any:
        """The auxiliary output of this process's devices."""

    def _why_one_by_one(self) -> str:
        recorder, counters = self._recorder, self.counters
        reasons = {
            "the update takes the loss of its step": self._needs_loss,
            "calls are registered for each step": self.before_update or self.after_update or self.after_step,
            "figures of each step are recorded": self.monitor.enabled
            or recorder.trace is not None
            or recorder.alarms is not None
            or self._work.is_on,
            "a schedule moves numbers of the optimizer's state": bool(self._rates) and self.lr_scheduler is not None,
            "each step is replicated in memory": self._replicas is not None,
            "auxiliary outputs are averaged in each step": self._aux_means is not None,
            "the schedule is not one of the config": not isinstance(self.lr_scheduler, Schedule | None),
            "an accumulation has begun": counters.is_in_window or self.zero.holds_gradients,
            "the accumulation changes": counters.boundary_by_hand is not None
            or counters.next_accumulation_steps != counters.gradient_accumulation_steps,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), "")
        if self.communicator.world_size > 1:
            reason = next(filter(None, self.communicator.all_gather_object(reason)), "")
        return reason

    @property
    def _needs_loss(self) -> bool:
        """Whether an update follows from the loss of its step."""
        optimizer = self.zero.optimizer
        return isinstance(optimizer, TransformationOptimizer) and optimizer.traced.needs_loss

    def _train_together(self, batches: list[Any]) -> jax.Array:
        self._require_own_process()
        self._require_optimizer()
        parts = [self._micro_batches(batch) for batch in batches]
        losses: list[Any] = []
        for _, run in groupby(parts, key=_signature):
            steps = list(run)
            found = self._scanned(steps) if len(steps) > 1 else []
            losses += [*found, *(self.train_batch(iter(each)) for each in steps[len(found) :])]
        return jnp.asarray(np.stack([np.asarray(loss) for loss in losses]))

    def _scanned(self, steps: list[list[Any]]) -> list[Any]:
        """Take steps of equal shapes in one program, and return their losses; none where they are different
        programs."""
        self._cut(steps[0][0])  # for what it refuses
        batches = self._cut_steps(steps)
        means: list[Any] = []
        while len(means) < len(steps):  # again after a skipped one
            self._meet("steps of JAX")
            state = None if self._carried is None else self._carried.data
            begin = len(means)
            with self.timer("update"):
                made = self.zero.many(self._many_steps, batches, state, self._steps_ahead(begin, steps), begin)
            if made is None:
                break
            losses, aux, state, differs, results = made
            if self._carried is not None:
                self._carried.data = list(state)
            if differs is not None:
                assert isinstance(self._carried, NativeState)  # the only one with several states
                self._carried.require_equal(differs)
            self._keep_aux(self._own_aux(aux))
            means += self._means_of_steps(losses)[begin : begin + len(results)]
            self._end_steps(results, float(means[-1]))
        return means

    def _end_steps(self, results: list[StepResult], loss: float) -> None:
        """Count steps, of which all but the last were applied."""
        for at, result in enumerate(results, 1):
            self._take_result(result)
            for _ in range(self.gradient_accumulation_steps() - 1):
                self.counters.advance()
            if at < len(results):
                self.counters.advance()
                if self.lr_scheduler is not None:
                    self.lr_scheduler.step()
        self._end_step(self.optimizer.param_groups, loss, {}, steps=len(results))

    def _steps_ahead(self, begin: int, steps: Sequence[Sequence[Any]]) -> list[StepAhead]:
        """What the host has for each of `steps` from `begin` on, if none is skipped; before it, something."""
        groups = [dict(group) for group in self.optimizer.param_groups]
        schedule, scaler = copy(self.lr_scheduler), copy(self.loss_scaler)
        if schedule is not None:
            schedule.optimizer = OptimizerGroups(groups)
        found = []
        for at in range(begin, len(steps)):
            first, count = self.counters.micro_steps + (at - begin) * len(steps[at]), len(steps[at])
            scale = scaler.loss_scale
            scales = (scale / count, scale) if scaler.is_active else (1.0, float(count))
            found.append(StepAhead([dict(group) for group in groups], [*range(first, first + count)], *scales))
            scaler.update(overflow=False)
            if schedule is not None:
                schedule.step()
        return found[:1] * begin + found

    def _cut_steps(self, steps: list[list[Any]]) -> Any:
        """The micro-batches of steps as arrays with axes over devices, steps and micro-batches."""
        devices, shape = self._mesh.local, (len(steps), len(steps[0]))
        parts = [split_batch(one, len(devices), over="devices", length_cure="") for step in steps for one in step]
        by_device = [as_inputs(part[at]) for at in range(len(devices)) for part in parts]

        def place(*values: Any) -> Any:
            each = [values[at : at + len(parts)] for at in range(0, len(values), len(parts))]
            own = [_of_steps(one, shape, device) for one, device in zip(each, devices, strict=True)]
            cut = self._mesh.over_devices(own)
            return WeakNumbers(cut) if is_weak(values[0]) else cut

        return jax.tree.map(place, *by_device)

    def _means_of_steps(self, losses: jax.Array) -> list[Any]:
        """The mean loss of each step on this process, rounded as `train_batch` does."""
        rows = self._losses_of_steps(losses)
        return [row[0] if len(row) == 1 else np.asarray(jnp.asarray(row).mean()) for row in rows]

    def _losses_of_steps(self, losses: jax.Array) -> Any:
        """The losses of this process, shape (steps, micro-batches)."""
        own = [np.asarray(part)[0] for part in self._mesh.own_parts(losses)]
        if len(own) == 1:
            return own[0]
        by_device = np.moveaxis(np.stack(own), 0, -1)
        return np.array([[np.float32(np.mean(np.ascontiguousarray(one))) for one in row] for row in by_device])


def _of_steps(values: Sequence[Any], shape: tuple[int, int], device: Any) -> Any:
    """The values of all micro-batches on a device, behind axes over devices, steps and micro-batches."""
    if isinstance(values[0], jax.Array):
        whole = jnp.stack([jax.device_put(value, device) for value in values])
    else:
        whole = np.stack([np.asarray(value, jnp.result_type(value) if is_weak(value) else None) for value in values])
    return whole.reshape(1, *shape, *whole.shape[1:])


def _signature(micro_batches: Sequence[Any]) -> Any:
    """The structure, shapes and types of a step's micro-batches."""
    leaves, structure = jax.tree.flatten([as_inputs(part) for part in micro_batches])
    return structure, [(jnp.shape(leaf), jnp.result_type(leaf), is_weak(leaf)) for leaf in leaves]
