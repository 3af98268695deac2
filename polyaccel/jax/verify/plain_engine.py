"""`PlainJaxEngine`: an engine's calls on plain JAX, for the runs that a verification compares with.

Every rank holds all parameters, and gradients are averaged over all ranks.

[Note: Whole batches]
The engine cuts a batch into micro-batches, and over the devices of a process, and averages. The gradient of the whole
batch is that average, or where parts weigh differently (tokens that are padding) or are summed, another combination of
the parts' gradients with weights of no less than zero. Then the parts are right. Where it is none, something was cut
that has no axis over samples, and the whole is right. A function that draws random numbers has a key for each part, and
one with state has statistics of each. Of these only the parts can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.accelerators.memory.numpy import NumpyBuffer
from polyaccel.core.types import DType
from polyaccel.engine.lr_schedules import build_schedule
from polyaccel.errors import PolyaccelError
from polyaccel.jax.auxiliary import AuxMeans
from polyaccel.jax.engine import OptimizerGroups
from polyaccel.jax.program.batches import split_batch
from polyaccel.jax.program.carried import Carried
from polyaccel.jax.pytree import dtype_of
from polyaccel.jax.rewrites import RewriteContext
from polyaccel.jax.training_states import Begun
from polyaccel.jax.verify.plain_programs import PlainPrograms
from polyaccel.jax.verify.plain_state import PlainState
from polyaccel.jax.verify.plain_update import Array, PlainUpdate
from polyaccel.jax.verify.recording import StepRecording
from polyaccel.jax.views import CopyCount
from polyaccel.verify.variant import NOISE, ActiveRun, Variant


class PlainJaxEngine:
    """The engine of a plain run; the arguments are those of an engine, before any rewrite.

    `shared` keeps compiled programs for later runs with the same arguments. With `begun` it continues as a training
    state that has taken steps.
    """

    def __init__(
        self,
        run: ActiveRun,
        given: RewriteContext,
        shared: dict[bool, PlainPrograms] | None = None,
        *,
        begun: Begun | None = None,
    ) -> None:
        if run.variant.is_double:
            raise PolyaccelError("functions of JAX are not compared in float64", hint="compare in float32")
        runtime = given.runtime
        self.runtime, self.config = runtime, runtime.config
        self.communicator, self.mesh = runtime.communicator, runtime.mesh
        self.global_steps = self.micro_steps = 0
        self.aux: Any = None
        run.record_of(self.communicator.rank).plain = "JAX" if given.client is None else "JAX with optax"
        self._programs = programs = PlainPrograms.get_or_create(run, given, {} if shared is None else shared)
        self._structure, self._names, leaves = programs.structure, programs.names, programs.leaves
        self._trained = [dtype_of(fqn, leaf).is_floating for fqn, leaf in leaves.items()]
        drawn = np.random.default_rng(run.variant.noise)
        self._leaves = {fqn: self._first_value(leaf, run.variant, drawn) for fqn, leaf in leaves.items()}
        self._carried = None
        if programs.form is not None:
            of = (programs.form, programs.state, given.state_reduction)
            self._carried = PlainState(*of, self.communicator, given.own_devices)
        self._is_global = given.partition is not None
        """Whether all processes run one program, with one key."""
        self._own_devices, self._world_size = given.own_devices, self.communicator.world_size * given.own_devices
        self._update = PlainUpdate(given.client, runtime, self._structure, self._names, programs.update_of)
        self._update.hold_frozen(programs.params)
        if begun is not None:
            self.global_steps, self.micro_steps = begun.step, begun.step * self.gradient_accumulation_steps()
            self._update.continue_from(begun.opt_state)
        self.optimizer = OptimizerGroups([self._update.group])
        self._key = jax.random.key(given.seed)
        section = self.config.scheduler
        self.lr_scheduler = None
        if section is not None and "lr" in self._update.group:
            self.lr_scheduler = build_schedule(section.type, section.params, self.optimizer)
        self._record = run.record_of(self.communicator.rank) if run.variant.noise else None
        self._aux_means = AuxMeans(self.communicator) if self.config.jax.aux == "mean" else None
        self._auxes: list[Any] = []
        self._sum: dict[str, Array] = {}
        self._losses: list[float] = []
        self._calls_since_update = 0
        self._norm: float | None = None
        self._recording = StepRecording(run, self.communicator.rank, self, lambda: self.optimizer.param_groups)

    def _first_value(self, leaf: Any, variant: Variant, drawn: np.random.Generator) -> Array:
        """Rank 0's value, in float32 where it is trained, moved by units in the last place or by noise."""
        value = np.array(leaf)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        value = value.astype(np.float32)
        if self.communicator.world_size > 1:
            travels = self.communicator.allocate(value.size, DType.FLOAT32)
            travels.copy_from(NumpyBuffer(value.reshape(-1)))
            self.communicator.broadcast(travels, 0)
            value = np.frombuffer(travels.to_bytes(), np.float32).reshape(value.shape).copy()
        if variant.noise:
            steps = NOISE * np.finfo(np.float32).eps * drawn.standard_normal(value.shape, np.float32)
            return value * (1 + steps).astype(np.float32)
        return value if not variant.moved else np.nextafter(value, np.float32(variant.moved * np.inf))

    # Values that are recorded.

    def gradients(self) -> dict[str, Array]:
        """Return averaged gradients."""
        return dict(self._sum)

    def states(self) -> Mapping[str, Any]:
        """Return the states of the optimizer, and the state that the function carries."""
        return self._update.states() | ({} if self._carried is None else self._carried.values())

    def weights(self) -> dict[str, Array]:
        """Return the trained parameters."""
        return {name: self._leaves[name] for name, wanted in zip(self._names, self._trained, strict=True) if wanted}

    # The calls of an engine.

    @property
    def params(self) -> Any:
        """The parameters, in the caller's tree."""
        return jax.tree.unflatten(self._structure, [jnp.asarray(self._leaves[name]) for name in self._names])

    @property
    def param_views(self) -> Any:
        """`params`: a plain run has no other memory."""
        return self.params

    @property
    def state(self) -> Any:
        """The state that the function carries."""
        return None if self._carried is None else self._carried.tree

    @state.setter
    def state(self, value: Any) -> None:
        if self._carried is not None:
            self._carried.assign(value)

    @property
    def copies(self) -> CopyCount:
        """All are copies."""
        return CopyCount(0, len(self._names))

    def grad_step(self, batch: Any) -> jax.Array:
        """Compute the loss and gradients of a micro-batch."""
        return self._differentiate(batch, 1)

    def value_and_grad(self, batch: Any, params: Any = None, *, rng: Any = None) -> tuple[jax.Array, Any]:
        """Compute the mean loss and gradients of all ranks. Collective."""
        own = self._leaves if params is None else {name: np.asarray(leaf) for name, leaf in self._named(params).items()}
        number = self.micro_steps + self._calls_since_update
        found = self._found(batch, 1, own, number, rng)
        self._calls_since_update += 1
        sums = {name: sum(one[name] for _, one in found) for name in found[0][1]}
        gradients = {name: self._reduced(value, self._scale) for name, value in sums.items()}
        zeros = {name: np.zeros_like(leaf) for name, leaf in self._leaves.items()}
        if self._aux_means is not None:
            alone = AuxMeans(self.communicator)
            alone.add_all(self._last_auxes(len(found)))
            self.aux = alone.take(self.aux)
        loss = self._reduced(np.float32(sum(float(one) for one, _ in found)), 1.0)
        leaves = [jnp.asarray(gradients.get(name, zeros[name])) for name in self._names]
        return jnp.asarray(loss), jax.tree.unflatten(self._structure, leaves)

    def apply_gradients(self, gradients: Any, loss: Any = None) -> None:
        """Run one optimizer step with the mean of the ranks' gradients. Collective."""
        named = self._named(gradients)
        self._sum = {name: self._reduced(np.asarray(named[name], np.float32), 1.0) for name in self.weights()}
        self._losses = [] if loss is None else [float(loss)]
        self._calls_since_update = 0
        self.micro_steps += self.gradient_accumulation_steps()
        self._update_with_sum()

    def _named(self, tree: Any) -> dict[str, Any]:
        return dict(zip(self._names, jax.tree.leaves(tree), strict=True))

    def train_batch(self, data_iter: Any = None) -> jax.Array:
        """Run one optimizer step. Collective."""
        count = self.gradient_accumulation_steps()
        if hasattr(data_iter, "__next__"):
            losses = [self._differentiate(next(data_iter), 1) for _ in range(count)]
        else:
            losses = [self._differentiate(data_iter, count)]
        self.micro_steps += count - 1
        self.step()
        return jnp.stack(losses).mean()

    def train_steps(self, batches: Iterable[Any]) -> jax.Array:
        """Run an optimizer step for each batch. Collective."""
        return jnp.stack([self.train_batch(batch) for batch in batches])

    def step(self) -> None:
        """End a micro-batch; update the parameters at the accumulation boundary. Collective."""
        self.micro_steps += 1
        if self.micro_steps % self.gradient_accumulation_steps():
            return
        self._average()
        self._update_with_sum()

    def _update_with_sum(self) -> None:
        self._recording.before_update()
        wide = [value.astype(np.float64) for value in self._sum.values()]
        self._norm = float(np.float32(np.sqrt(sum(float(np.square(value).sum()) for value in wide))))
        clipping, factor = self.config.gradient_clipping, 1.0
        if clipping:
            factor = min(1.0, clipping / (self._norm + 1e-6))
        clipped = {name: value * np.float32(factor) for name, value in self._sum.items()}
        loss = float(np.mean(self._losses)) if self._losses else None
        mean = loss or 0.0
        if self._update.takes_loss:
            mean = float(np.mean(self.communicator.all_gather_object(mean)))
        self._leaves |= self._update.update(self.weights(), clipped, mean)
        if self._carried is not None:
            self._carried.average()
        if self._aux_means is not None:
            self.aux = self._aux_means.take(self.aux)
        self.global_steps += 1
        self._recording.after_update(self._norm)
        self.zero_grad()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self._losses.clear()
        self._recording.end_step(loss)

    def eval_batch(self, data_iter: Any) -> jax.Array:
        """Compute the loss of a micro-batch without gradients."""
        batch = next(data_iter) if hasattr(data_iter, "__next__") else data_iter
        loss, found = self._programs.without(self._named_leaves(), self._with_state(self._programs.inputs_of(batch)))
        self.aux = found if self._carried is None else found.aux
        return loss

    def zero_grad(self) -> None:
        """Discard all gradients."""
        self._sum.clear()
        if self._aux_means is not None:
            self._aux_means.clear()

    def _differentiate(self, batch: Any, count: int) -> jax.Array:
        """The loss of `count` micro-batches in one batch, whose gradients are added."""
        found = self._found(batch, count, self._leaves, self.micro_steps, None)
        for _, gradients in found:
            for name, gradient in gradients.items():
                self._sum[name] = self._sum[name] + gradient if name in self._sum else gradient
        if self._aux_means is not None:
            self._aux_means.add_all(self._last_auxes(len(found)))
        loss = jnp.stack([each for each, _ in found]).sum() / count
        self._losses += [float(loss)] * count
        return loss

    def _last_auxes(self, count: int) -> list[Any]:
        """Return the outputs of the last `count` parts, and forget all."""
        found, self._auxes = self._auxes[-count:], []
        return found

    def _found(
        self, batch: Any, count: int, leaves: Mapping[str, Array], number: int, rng: Any
    ) -> list[tuple[Any, dict[str, Array]]]:
        """The losses and gradients of `count` micro-batches from `number` on, at `leaves`. See [Note: Whole batches].

        `rng` takes the place of the keys.
        """
        inputs = self._programs.inputs_of(batch)
        draws = self._programs.draws(self._leaves, self._with_state(inputs))
        if self._record is not None and not self._record.has_choices:
            self._record.has_choices = self._programs.has_choices(self._leaves, self._with_state(inputs))
        parts = self._parts(batch, count, number)
        if rng is not None:
            keys = jax.random.split(rng, len(parts)) if len(parts) > 1 else [rng]
            parts = [(part, key, *rest) for (part, _, *rest), key in zip(parts, keys, strict=True)]
        found = [self._of_part(part, key, weight, leaves, device) for part, key, weight, device in parts]
        if len(found) > 1 and not draws and self._carried is None:
            whole = self._of_part(inputs, self._key_of(number, 0), count, leaves)
            found = found if _is_combination(whole[1], [of_part for _, of_part in found]) else [whole]
        return found

    def _with_state(self, inputs: Any, device: int = 0) -> Any:
        return inputs if self._carried is None else Carried(self._carried.of_device[device], inputs)

    def _of_part(
        self, inputs: Any, key: Any, weight: float, leaves: Mapping[str, Array], device: int = 0
    ) -> tuple[Any, dict[str, Array]]:
        """The loss and gradients of a part of a batch, with a weight. The state of its device is replaced."""
        trained = {name: jnp.asarray(leaves[name]) for name in self.weights()}
        frozen = {name: jnp.asarray(leaves[name]) for name in self._names if name not in trained}
        given = self._with_state(inputs, device)
        (loss, self.aux), found = self._programs.with_gradients(trained, frozen, given, key)
        if self._carried is not None:
            self._carried.of_device[device], self.aux = list(self.aux.state), self.aux.aux
        if self._aux_means is not None:
            self._auxes.append(self.aux)
        return weight * loss, {name: np.asarray(one, np.float32) * np.float32(weight) for name, one in found.items()}

    def _parts(self, batch: Any, count: int, number: int) -> list[tuple[Any, Any, float, int]]:
        """(inputs, key, weight, device) of what the engine computes by itself, over micro-batches and devices."""
        cures = {"length_cure": "give all arrays a first axis over samples"}
        found = []
        for micro, one in enumerate(split_batch(batch, count, over="micro-batches", **cures)):
            for at, part in enumerate(split_batch(one, self._own_devices, over="devices", **cures)):
                found.append(
                    (self._programs.inputs_of(part), self._key_of(number + micro, at), 1 / self._own_devices, at)
                )
        return found

    def _key_of(self, micro_steps: int, device: int) -> Any:
        """The key of a micro-batch: by the rank along the axis of data, and the number of micro-batches."""
        rank = 0 if self._is_global else self.communicator.rank
        if self.config.jax.execution != "native":
            rank = self.mesh.coordinates(rank)["data"]
        key = jax.random.fold_in(self._key, rank * self._own_devices + device)
        return jax.random.fold_in(key, micro_steps)

    def _named_leaves(self) -> dict[str, Any]:
        return {name: jnp.asarray(value) for name, value in self._leaves.items()}

    def _average(self) -> None:
        """Average the sums over micro-batches and ranks. Collective."""
        for name in self.weights():
            value = self._sum.get(name, np.zeros_like(self._leaves[name]))
            self._sum[name] = self._reduced(value, self._scale / self.gradient_accumulation_steps())

    @property
    def _scale(self) -> float:
        """The factor of a mean over ranks by which it becomes what the config reduces to."""
        return float(self.mesh.size_of(("data",))) if self.config.gradient_allreduce_op == "sum" else 1.0

    def _reduced(self, value: Any, factor: float) -> Array:
        """The mean of a value over ranks, times a factor. Collective."""
        value, size = np.asarray(value, np.float32), self.communicator.world_size
        if size > 1:
            travels = self.communicator.allocate(value.size, DType.FLOAT32)
            travels.copy_from(NumpyBuffer(np.ascontiguousarray(value.reshape(-1))))
            self.communicator.all_reduce(travels)
            value = np.frombuffer(travels.to_bytes(), np.float32).reshape(value.shape)
        scaled: Array = value * np.float32(factor / size)
        return scaled

    # What scripts ask.

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of a step."""
        return self.config.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-batch."""
        return self.config.train_micro_batch_size_per_gpu

    def train_batch_size(self) -> int:
        """Return the samples of a step."""
        return self.config.train_batch_size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step` updates the parameters."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def is_first_stage(self) -> bool:
        """Return True: this rank has all layers."""
        return True

    def is_last_stage(self) -> bool:
        """Return True: this rank has all layers."""
        return True

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last update's gradients."""
        return self._norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of the config's optimizer."""
        return [float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group]

    def destroy(self) -> None:
        """Do nothing."""


_MOST_REST = 1e-3
"""Share of a gradient that rounding may leave over, and weight below zero that it may make."""


def _is_combination(whole: Mapping[str, Array], parts: Sequence[Mapping[str, Array]]) -> bool:
    """Whether a gradient is the sum of others, each with a weight of no less than zero."""
    columns = np.stack([_flat(part) for part in parts], axis=1)
    target = _flat(whole)
    weights = np.linalg.lstsq(columns, target, rcond=1e-6)[0]
    rest = float(np.linalg.norm(columns @ weights - target))
    return rest <= _MOST_REST * float(np.linalg.norm(target)) and bool(np.all(weights >= -_MOST_REST))


def _flat(gradients: Mapping[str, Array]) -> Array:
    return np.concatenate([gradient.reshape(-1) for gradient in gradients.values()]).astype(np.float64)
