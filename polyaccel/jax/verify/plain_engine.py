"""`PlainJaxEngine`: an engine's calls on plain JAX, for the runs that a verification compares with.

Every rank holds all parameters, and gradients are averaged over all ranks.

[Note: Whole batches]
The engine cuts a batch into micro-batches, and over the devices of a process, and averages. The gradient of the whole
batch is that average, or where parts weigh differently (tokens that are padding) or are summed, another combination of
the parts' gradients with weights of no less than zero. Then the parts are right. Where it is none, something was cut
that has no axis over samples, and the whole is right. A function that draws random numbers has a key for each part, so
only its parts can be compared.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from polyaccel.accelerators.memory.numpy import NumpyBuffer
from polyaccel.core.types import DType
from polyaccel.engine.lr_schedules import build_schedule
from polyaccel.errors import PolyaccelError
from polyaccel.jax.engine import OptimizerGroups
from polyaccel.jax.modules import as_function
from polyaccel.jax.pipeline import LayerList
from polyaccel.jax.program.batches import as_inputs, split_batch
from polyaccel.jax.program.function import LossFn, loss_and_aux
from polyaccel.jax.pytree import dtype_of, named_leaves
from polyaccel.jax.rewrites import RewriteContext
from polyaccel.jax.verify.plain_update import Array, PlainUpdate, transform
from polyaccel.jax.verify.recording import StepRecording
from polyaccel.jax.views import CopyCount
from polyaccel.verify.variant import NOISE, ActiveRun, Variant

_OTHER_KERNELS = {"xla_backend_optimization_level": 0, "xla_disable_hlo_passes": "fusion"}
"""Options of XLA by which a program rounds otherwise, as the engine's programs do."""
_CHOICES = re.compile(r"\b(top_k|sort|argmax|argmin|max|min|round)\b")


class PlainPrograms:
    """The compiled programs of plain runs, which those with the same kernels share: compilation is most of their cost.

    `kernels` compiles a function.
    """

    def __init__(self, given: RewriteContext, kernels: Callable[..., Any]) -> None:
        model, params = given.model, given.params
        self._kernels = kernels
        self._as_drawn: Callable[[], tuple[Any, Any]]
        self._function: LossFn
        if isinstance(model, (list, tuple)):
            self._function, params = LayerList.from_model(model, params), list(params)
        else:
            self._function, params = as_function(model, given.params, with_units=False)
            self._as_drawn = partial(as_function, model, given.params)
        self._model = model
        self.params = params
        self.leaves, self.structure = named_leaves(params)
        self.names = list(self.leaves)
        self.with_gradients = kernels(jax.value_and_grad(self._loss, has_aux=True))
        self.without = kernels(lambda leaves, batch: self._loss(leaves, {}, batch, None))
        self._updates: dict[Any, Any] = {}
        self._draws: bool | None = None

    @staticmethod
    def get_or_create(run: ActiveRun, given: RewriteContext, shared: dict[bool, PlainPrograms]) -> PlainPrograms:
        """Return the programs for `run`, and keep them in `shared`."""
        reorders = run.variant.reorders
        if reorders not in shared:
            is_other = reorders and jax.default_backend() == "cpu"
            kernels = partial(jax.jit, compiler_options=_OTHER_KERNELS if is_other else None)
            shared[reorders] = PlainPrograms(given, kernels)
        return shared[reorders]

    def update_of(self, update: Callable[..., Any]) -> Any:
        """Return the program of a transformation's `update` of whole parameters."""
        if update not in self._updates:
            self._updates[update] = self._kernels(partial(transform, update))
        return self._updates[update]

    def _loss(self, trained: Mapping[str, Any], frozen: Mapping[str, Any], batch: Any, rng: Any) -> tuple[Any, Any]:
        leaves = [trained[name] if name in trained else frozen[name] for name in self.names]
        return loss_and_aux(self._function(jax.tree.unflatten(self.structure, leaves), batch, rng))

    def draws(self, leaves: Mapping[str, Any], inputs: Any) -> bool:
        """Return whether the function uses its random key. Called before its first gradient."""
        if self._draws is None:
            self._draws = self._looks_at_key(leaves, inputs)
            linen = sys.modules.get("flax.linen")
            if self._draws and linen is not None and isinstance(self._model, linen.Module):
                self._function, _ = self._as_drawn()  # a block of linen draws from one key, at every stage
        return self._draws

    def has_choices(self, leaves: Mapping[str, Any], inputs: Any) -> bool:
        """Return whether the function compares numbers to choose, as routers and ReLUs do."""
        return _CHOICES.search(str(self._traced(leaves, inputs))) is not None

    def _traced(self, leaves: Mapping[str, Any], inputs: Any) -> Jaxpr:
        """The function's program."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), inputs)
        whole = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in leaves.items()}
        traced = jax.make_jaxpr(lambda own, batch, key: self._loss(own, {}, batch, key))
        return traced(whole, shapes, jax.random.key(0)).jaxpr

    def _looks_at_key(self, leaves: Mapping[str, Any], inputs: Any) -> bool:
        program = self._traced(leaves, inputs)
        live = {id(atom) for atom in program.outvars}
        for equation in reversed(program.eqns):
            if any(id(variable) in live for variable in equation.outvars):
                live |= {id(atom) for atom in equation.invars}
        return id(program.invars[-1]) in live


class PlainJaxEngine:
    """The engine of a plain run; the arguments are those of an engine, before any rewrite.

    `shared` keeps compiled programs for later runs with the same arguments.
    """

    def __init__(self, run: ActiveRun, given: RewriteContext, shared: dict[bool, PlainPrograms] | None = None) -> None:
        if run.variant.is_double:
            raise PolyaccelError("functions of JAX are not compared in float64", hint="compare in float32")
        runtime = given.runtime
        self.runtime, self.config = runtime, runtime.config
        self.communicator, self.mesh = runtime.communicator, runtime.mesh
        self.global_steps = self.micro_steps = 0
        self.aux: Any = None
        self._programs = programs = PlainPrograms.get_or_create(run, given, {} if shared is None else shared)
        self._structure, self._names, leaves = programs.structure, programs.names, programs.leaves
        self._trained = [dtype_of(fqn, leaf).is_floating for fqn, leaf in leaves.items()]
        drawn = np.random.default_rng(run.variant.noise)
        self._leaves = {fqn: self._first_value(leaf, run.variant, drawn) for fqn, leaf in leaves.items()}
        self._own_devices, self._world_size = given.own_devices, self.communicator.world_size * given.own_devices
        self._update = PlainUpdate(given.client, runtime, self._structure, self._names, programs.update_of)
        self._update.hold_frozen(programs.params)
        self.optimizer = OptimizerGroups([self._update.group])
        self._key = jax.random.key(given.seed)
        section = self.config.scheduler
        self.lr_scheduler = None
        if section is not None and "lr" in self._update.group:
            self.lr_scheduler = build_schedule(section.type, section.params, self.optimizer)
        self._record = run.record_of(self.communicator.rank) if run.variant.noise else None
        self._sum: dict[str, Array] = {}
        self._losses: list[float] = []
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
        """Return the states of the optimizer."""
        return self._update.states()

    def weights(self) -> dict[str, Array]:
        """Return the trained parameters."""
        return {name: self._leaves[name] for name, wanted in zip(self._names, self._trained, strict=True) if wanted}

    # The calls of an engine.

    @property
    def params(self) -> Any:
        """The parameters, in the caller's tree."""
        return jax.tree.unflatten(self._structure, [jnp.asarray(self._leaves[name]) for name in self._names])

    @property
    def copies(self) -> CopyCount:
        """All are copies."""
        return CopyCount(0, len(self._names))

    def grad_step(self, batch: Any) -> jax.Array:
        """Compute the loss and gradients of a micro-batch."""
        return self._differentiate(batch, 1)

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

    def step(self) -> None:
        """End a micro-batch; update the parameters at the accumulation boundary. Collective."""
        self.micro_steps += 1
        if self.micro_steps % self.gradient_accumulation_steps():
            return
        self._average()
        self._recording.before_update()
        wide = [value.astype(np.float64) for value in self._sum.values()]
        self._norm = float(np.float32(np.sqrt(sum(float(np.square(value).sum()) for value in wide))))
        clipping, factor = self.config.gradient_clipping, 1.0
        if clipping:
            factor = min(1.0, clipping / (self._norm + 1e-6))
        clipped = {name: value * np.float32(factor) for name, value in self._sum.items()}
        self._leaves |= self._update.update(self.weights(), clipped)
        self.global_steps += 1
        self._recording.after_update(self._norm)
        self.zero_grad()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        loss = float(np.mean(self._losses)) if self._losses else None
        self._losses.clear()
        self._recording.end_step(loss)

    def eval_batch(self, data_iter: Any) -> jax.Array:
        """Compute the loss of a micro-batch without gradients."""
        batch = next(data_iter) if hasattr(data_iter, "__next__") else data_iter
        loss, self.aux = self._programs.without(self._named_leaves(), as_inputs(batch))
        return loss

    def zero_grad(self) -> None:
        """Discard all gradients."""
        self._sum.clear()

    def _differentiate(self, batch: Any, count: int) -> jax.Array:
        """The loss of `count` micro-batches in one batch, whose gradients are added. See [Note: Whole batches]."""
        inputs = as_inputs(batch)
        draws = self._programs.draws(self._leaves, inputs)
        if self._record is not None and not self._record.has_choices:
            self._record.has_choices = self._programs.has_choices(self._leaves, inputs)
        found = [self._of_part(part, key, weight) for part, key, weight in self._parts(batch, count)]
        if len(found) > 1 and not draws:
            whole = self._of_part(inputs, self._key_of(self.micro_steps, 0), count)
            found = found if _is_combination(whole[1], [of_part for _, of_part in found]) else [whole]
        for _, gradients in found:
            for name, gradient in gradients.items():
                self._sum[name] = self._sum[name] + gradient if name in self._sum else gradient
        loss = jnp.stack([each for each, _ in found]).sum() / count
        self._losses += [float(loss)] * count
        return loss

    def _of_part(self, inputs: Any, key: Any, weight: float) -> tuple[Any, dict[str, Array]]:
        """The loss and gradients of a part of a batch, with a weight."""
        trained = {name: jnp.asarray(value) for name, value in self.weights().items()}
        (loss, self.aux), found = self._programs.with_gradients(trained, self._frozen(), inputs, key)
        return weight * loss, {name: np.asarray(one, np.float32) * np.float32(weight) for name, one in found.items()}

    def _parts(self, batch: Any, count: int) -> list[tuple[Any, Any, float]]:
        """(inputs, key, weight) of what the engine computes by itself: parts over micro-batches, then over devices."""
        cures = {"length_cure": "give all arrays a first axis over samples"}
        found = []
        for micro, one in enumerate(split_batch(batch, count, over="micro-batches", **cures)):
            for at, part in enumerate(split_batch(one, self._own_devices, over="devices", **cures)):
                found.append((as_inputs(part), self._key_of(self.micro_steps + micro, at), 1 / self._own_devices))
        return found

    def _key_of(self, micro_steps: int, device: int) -> Any:
        """The key of a micro-batch: by the rank along the axis of data, and the number of micro-batches."""
        rank = self.communicator.rank
        if self.config.jax.execution != "native":
            rank = self.mesh.coordinates(rank)["data"]
        key = jax.random.fold_in(self._key, rank * self._own_devices + device)
        return jax.random.fold_in(key, micro_steps)

    def _frozen(self) -> dict[str, Any]:
        return {
            name: jnp.asarray(self._leaves[name])
            for name, wanted in zip(self._names, self._trained, strict=True)
            if not wanted
        }

    def _named_leaves(self) -> dict[str, Any]:
        return {name: jnp.asarray(value) for name, value in self._leaves.items()}

    def _average(self) -> None:
        """Average the sums over micro-batches and ranks. Collective."""
        factor = 1.0 / self.gradient_accumulation_steps()
        if self.config.gradient_allreduce_op == "sum":
            factor *= self.mesh.size_of(("data",))
        size = self.communicator.world_size
        for name in [name for name, wanted in zip(self._names, self._trained, strict=True) if wanted]:
            value = self._sum.get(name, np.zeros_like(self._leaves[name]))
            if size > 1:
                travels = self.communicator.allocate(value.size, DType.FLOAT32)
                travels.copy_from(NumpyBuffer(np.ascontiguousarray(value.reshape(-1))))
                self.communicator.all_reduce(travels)
                value = np.frombuffer(travels.to_bytes(), np.float32).reshape(value.shape)
            self._sum[name] = value * np.float32(factor / size)

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
