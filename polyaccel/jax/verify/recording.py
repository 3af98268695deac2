"""What a run of a function of JAX records: whole gradients, norms, updates, states of optimizers, losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from polyaccel.accelerators.memory.numpy import NumpyBuffer
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.jax.engine import JaxEngine
from polyaccel.jax.native.engine import NativeEngine
from polyaccel.jax.optax_optimizer import OptaxOptimizer
from polyaccel.jax.optax_whole import WholeStates
from polyaccel.jax.views_engine import ViewsEngine
from polyaccel.verify.compare import MAGNITUDE
from polyaccel.verify.variant import ActiveRun
from polyaccel.zero.fragments import GRAD, PARAM, flush_reductions, read_whole

Array = npt.NDArray[Any]
_LEAST_LR = 1e-3
"""Learning rates below it, such as those of a warm-up, are raised: an update of zero would show no error."""


class Values(Protocol):
    """What is known of the trained parameters, whole and by name. Every method is collective."""

    def gradients(self) -> dict[str, Array]:
        """Gradients that the next update uses, averaged over micro-batches and ranks."""

    def weights(self) -> dict[str, Array]:
        """Values in the best precision there is."""

    def states(self) -> Mapping[str, Any]:
        """States of the optimizer, and the state that the function carries."""


class StepRecording:
    """The steps of one engine, the next of its rank."""

    def __init__(self, run: ActiveRun, rank: int, values: Values, groups: Callable[[], list[dict[str, Any]]]) -> None:
        self._run, self._rank, self._values, self._groups = run, rank, values, groups
        self._record = run.record_of(rank)
        index = self._record.engines
        self._record.engines += 1
        self._record.unfinished += 1
        self._index, self._prefix = index, f"{index}:" if index else ""
        self._step = 0
        self._before: dict[str, Array] = {}

    def _is_over(self) -> bool:
        return self._step >= self._run.variant.steps

    def before_update(self) -> None:
        """Record whole gradients, and keep the parameters that the update changes. Collective."""
        if self._is_over():
            return
        self._record.events.append(f"{self._index}/{self._step}")
        for group in self._groups():
            if group.get("lr") is not None and float(group["lr"]) < _LEAST_LR:
                group["lr"] = _LEAST_LR
        for name, gradient in self._values.gradients().items():
            self._add("gradient", name, gradient)
        self._before = self._values.weights()

    def after_update(self, norm: float | None) -> None:
        """Record the norm, updates and states. Collective."""
        if self._is_over():
            return
        if norm is not None:
            self._add("norm", "", np.float64(norm))
        for name, value in self._values.weights().items():
            self._add("update", name, value - self._before[name])
            self._add(MAGNITUDE, name, np.max(np.abs(value), initial=0.0))
        for name, state in self._values.states().items():
            if not jax.dtypes.issubdtype(getattr(state, "dtype", np.dtype(float)), jax.dtypes.extended):
                self._add("state", name, np.asarray(state, np.float32).reshape(-1))

    def end_step(self, loss: float | None) -> None:
        """Record the loss. Raises VerificationEnd when this was the last step of the last engine."""
        if self._is_over():
            return
        if loss is not None:
            self._add("loss", "", np.float64(loss))
        self._step += 1
        if self._is_over():
            self._run.end_engine(self._rank)

    def _add(self, kind: str, name: str, value: Any) -> None:
        array = np.asarray(value)
        self._record.add(self._step, kind, f"{self._prefix}{name}", _in_bins(array, self._run.variant.bins))


def _in_bins(value: Array, bins: int) -> Array:
    """`value`, or the sums of its elements by their place modulo `bins`, a prime: a change of any element changes one,
    and an exchange of rows, columns or blocks changes many."""
    if not bins or value.size <= bins or value.dtype.kind != "f":
        return value
    flat = value.reshape(-1)
    padded = np.pad(flat, (0, -flat.size % bins))
    sums: Array = padded.reshape(-1, bins).sum(0, dtype=value.dtype)
    return sums


def values_of(engine: JaxEngine) -> Values:
    """The values of an engine."""
    return NativeValues(engine) if isinstance(engine, NativeEngine) else ViewsValues(engine)


class EngineValues(ABC):
    """The common part: parts of stacked parameters are put together, and states have the names of plain optax."""

    def __init__(self, engine: JaxEngine) -> None:
        self._engine = engine
        self._names = [spec.fqn for spec in reversed(engine.adapter.param_specs()) if spec.trainable]

    def _whole(self, kind_of: Callable[[str], Array | None]) -> dict[str, Array]:
        """Whole parameters' values of one kind, where the engine has layers of some as parameters."""
        adapter = self._engine.adapter
        specs = {spec.fqn: spec for spec in adapter.param_specs()}
        shapes: dict[str, tuple[int, ...]] = {}
        found: dict[str, Array] = {}
        for name in self._names:
            part = kind_of(name)
            if part is None:
                continue
            fqn, shapes[fqn], start = adapter.stacking.in_whole(name, specs[name].shape, 0)
            whole = found.setdefault(fqn, np.zeros(int(np.prod(shapes[fqn])), np.float32))
            whole[start : start + part.size] = part
        return {fqn: value.reshape(shapes[fqn]) for fqn, value in found.items()}

    def states(self) -> Mapping[str, Any]:
        """As `Values.states`. Collective."""
        carried = self._engine._carried
        return self._of_optimizer() | ({} if carried is None else carried.values())

    def _of_optimizer(self) -> dict[str, Any]:
        optimizer = self._engine.zero.optimizer
        if isinstance(optimizer, WholeStates):
            return optimizer.states_by_path(self._engine.communicator)
        if not isinstance(optimizer, OptaxOptimizer):
            names = () if optimizer is None else optimizer.state_names
            by_state = {state: self._whole(partial(self._read, kind=state)) for state in names}
            return {f"{fqn} {state}": value for state, each in by_state.items() for fqn, value in each.items()}
        found: dict[str, Any] = {}
        paths, layers = optimizer.state_paths, self._engine.adapter.stacking.layers
        for state in optimizer.state_names:

            def read(name: str, state: str = state) -> Array | None:
                owner = layers[name].fqn if name in layers else name
                return self._read(name, state) if state in paths[owner] else None

            found |= {paths[fqn][state]: value for fqn, value in self._whole(read).items()}
        return found | optimizer.numbers_by_path()

    @abstractmethod
    def _read(self, fqn: str, kind: str) -> Array | None:
        """The whole value of a kind of a parameter; None where it has none."""


class ViewsValues(EngineValues):
    """Those of an engine of views mode."""

    _engine: ViewsEngine

    def gradients(self) -> dict[str, Array]:
        """As `Values.gradients`. Collective."""
        zero, scale = self._engine.zero, self._engine._gradient_scale
        specs = {spec.fqn: spec for spec in self._engine.adapter.param_specs()}

        def read(fqn: str) -> Array:
            if not flush_reductions(zero, fqn):
                return np.zeros(specs[fqn].numel, np.float32)
            return _array(read_whole(zero, fqn, GRAD)) / np.float32(scale)

        return self._whole(read)

    def weights(self) -> dict[str, Array]:
        """As `Values.weights`. Collective."""
        return self._whole(lambda fqn: self._read(fqn, PARAM))

    def _read(self, fqn: str, kind: str) -> Array:
        return _array(read_whole(self._engine.zero, fqn, kind))


class NativeValues(EngineValues):
    """Those of an engine of native mode."""

    _engine: NativeEngine

    def gradients(self) -> dict[str, Array]:
        """As `Values.gradients`. Collective."""
        engine = self._engine
        found = engine.total_gradients()
        scale = engine._gradient_scale
        by_bucket: dict[int, Array] = {}
        for index, array in found.items():
            bucket, memory = engine.zero.layout.buckets[index], engine.zero.params
            parts = [np.asarray(part, np.float32) for part in memory.mesh.own_parts(memory.flat(bucket, array))]
            if parts[0].size == bucket.numel:  # each device's own sum, which the update reduces
                is_sum = engine.config.gradient_allreduce_op == "sum"
                total = self._over_processes(np.sum(parts, axis=0))
                by_bucket[index] = total / np.float32(1 if is_sum else engine.zero.params.mesh.world_size)
            else:
                by_bucket[index] = self._from_parts(bucket.numel, parts)
        return self._whole(lambda fqn: self._slot(fqn, by_bucket) / np.float32(scale))

    def weights(self) -> dict[str, Array]:
        """As `Values.weights`. Collective."""
        return self._whole(lambda fqn: self._read(fqn, PARAM))

    def _read(self, fqn: str, kind: str) -> Array:
        place, _ = self._engine.zero.layout.locate(fqn)
        memory = self._engine.zero.params
        array = memory.kinds(place)[kind]
        parts = [np.asarray(part, np.float32) for part in memory.mesh.own_parts(array)]
        whole = parts[0] if parts[0].size == place.numel else self._from_parts(place.numel, parts)
        return self._slot(fqn, {place.index: whole})

    def _slot(self, fqn: str, by_bucket: Mapping[int, Array]) -> Array:
        place, slot = self._engine.zero.layout.locate(fqn)
        return by_bucket[place.index][slot.offset : slot.end]

    def _from_parts(self, numel: int, parts: list[Array]) -> Array:
        """All of a bucket, of which this process has some parts."""
        whole, first = np.zeros(numel, np.float32), self._engine.zero.params.mesh.first_rank
        for at, part in enumerate(parts):
            whole[(first + at) * part.size : (first + at + 1) * part.size] = part
        return self._over_processes(whole)

    def _over_processes(self, own: Array) -> Array:
        ranks = self._engine.communicator
        if ranks.world_size == 1:
            return own
        travels = ranks.allocate(own.size, DType.FLOAT32)
        travels.copy_from(NumpyBuffer(own))
        ranks.all_reduce(travels, label="a comparison")
        return _array(travels)


def _array(buffer: Buffer) -> Array:
    return np.frombuffer(buffer.to_bytes(), jnp.dtype(buffer.dtype.value)).astype(np.float32)
