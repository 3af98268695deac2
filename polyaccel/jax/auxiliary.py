"""Means of a function's auxiliary outputs over the micro-batches and ranks of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.accelerators.memory.numpy import NumpyBuffer, numpy_dtype
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import PolyaccelError

Array = np.ndarray[Any, Any]


class AuxMeans:
    """Sums auxiliary outputs until a step ends. Floats keep their type in the mean; other numbers become float32.

    Leaves of outputs have a leading axis over `devices` where there are several.
    """

    def __init__(self, communicator: Communicator, devices: int = 1) -> None:
        self._communicator, self._devices = communicator, devices
        self._structure: Any = None
        self._sums: list[Array] = []
        self._dtypes: list[Any] = []
        self._count = 0

    def add(self, aux: Any) -> None:
        """Add the output of a micro-batch. Raises PolyaccelError where there is no mean."""
        leaves, structure = jax.tree.flatten(aux)
        values = [_wide(leaf) for leaf in leaves]
        if self._devices > 1:
            values = [value.mean(axis=0) for value in values]
        if not self._count:
            self._structure, self._sums = structure, values
            self._dtypes = [jnp.result_type(leaf) for leaf in leaves]
        elif structure != self._structure or [one.shape for one in values] != [one.shape for one in self._sums]:
            raise _no_mean("it has another shape in each micro-batch", str(structure)[:200])
        else:
            self._sums = [before + value for before, value in zip(self._sums, values, strict=True)]
        self._count += 1

    def add_all(self, auxes: Sequence[Any]) -> None:
        """Add several, as `add` does."""
        for aux in auxes:
            self.add(aux)

    def clear(self) -> None:
        """Forget what was added."""
        self._sums, self._count = [], 0

    def of_one(self, aux: Any) -> Any:
        """Return the mean of one output over devices and ranks. Collective."""
        alone = AuxMeans(self._communicator, self._devices)
        alone.add(aux)
        return alone.take(aux)

    def take(self, otherwise: Any) -> Any:
        """Return the mean of what was added on all ranks, and forget it; `otherwise` if nothing was. Collective."""
        if not self._count:
            return otherwise
        means = mean_over_ranks([one / self._count for one in self._sums], self._communicator, label="aux")
        leaves = [jnp.asarray(mean.astype(_type_of_mean(of))) for mean, of in zip(means, self._dtypes, strict=True)]
        self.clear()
        return jax.tree.unflatten(self._structure, leaves)


def mean_over_ranks(values: Sequence[Array], communicator: Communicator, *, label: str) -> list[Array]:
    """Return the mean over ranks of each array of float32 or float64. Collective."""
    found = list(values)
    if communicator.world_size == 1:
        return found
    for dtype in (DType.FLOAT32, DType.FLOAT64):
        chosen = [at for at, value in enumerate(values) if value.dtype == numpy_dtype(dtype)]
        if not chosen:
            continue
        flat = NumpyBuffer(np.concatenate([values[at].reshape(-1) for at in chosen]))
        travels = communicator.allocate(flat.numel, dtype)
        travels.copy_from(flat)
        communicator.all_reduce(travels, ReduceOp.AVG, label=label).wait()
        means, start = np.frombuffer(travels.to_bytes(), numpy_dtype(dtype)), 0
        for at in chosen:
            found[at] = means[start : start + values[at].size].reshape(values[at].shape)
            start += values[at].size
    return found


def _wide(leaf: Any) -> Array:
    dtype = jnp.result_type(leaf)
    if not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_) or jnp.issubdtype(dtype, jnp.complexfloating):
        raise _no_mean(f"a leaf is of type {dtype}", str(dtype))
    return np.asarray(leaf).astype(np.float64 if dtype.name == "float64" else np.float32)


def _type_of_mean(dtype: Any) -> Any:
    return dtype if jnp.issubdtype(dtype, jnp.floating) else np.float32


def _no_mean(why: str, value: str) -> PolyaccelError:
    return PolyaccelError(
        f"the auxiliary output has no mean: {why}",
        hint='return numbers of the same shapes, or keep the last output: "jax": {"aux": "last"}',
        value=value,
    )
