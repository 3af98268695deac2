"""Checks of batches against the user's function: `BatchChecks`. They trace it, and run nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import getLogger
from typing import Any

import jax
import jax.numpy as jnp

from polyaccel.engine.loss_scale import LossScaler
from polyaccel.errors import PolyaccelError
from polyaccel.jax.program.batches import as_inputs, is_weak, looked_up, samples_of
from polyaccel.jax.program.homogeneity import require_homogeneous

log = getLogger(__name__)


class BatchChecks:
    """Checks of batches, once for each combination of shapes.

    `traced` returns the function's jaxpr for a batch: parameters come first, then the batch, and the key last.
    """

    def __init__(self, traced: Callable[[Any], Any], loss_scaler: LossScaler) -> None:
        self._traced = traced
        self._loss_scaler = loss_scaler
        self._split: set[Any] = set()
        """Shapes of batches that `warn_of_lookups` has checked."""
        self._scalable: set[Any] = set()
        """Shapes of micro-batches that `require_scalable` has checked."""

    def warn_of_lookups(self, batch: Any, parts: Sequence[Any]) -> None:
        """Warn of an entry of `batch` that was cut into `parts` though the function looks up rows in it."""
        if len(parts) == 1:
            return
        key = _shapes_key(parts[0])
        if key in self._split:
            return
        self._split.add(key)
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), weak_type=is_weak(leaf)),
            as_inputs(batch),
        )
        try:
            program = self._traced(shapes)
        except Exception:  # it will be raised where the function runs
            return
        at, first = samples_of(batch), len(program.jaxpr.invars) - len(jax.tree.leaves(shapes)) - 1  # the key is last
        for index in sorted(looked_up(program, [first + index for index in at])):
            log.warning(
                "the function looks up rows of %s, which is cut into %d parts along its first axis: if it is not an "
                "array of samples, pass polyaccel.jax.replicated(value) in its place",
                *(at[index - first], len(parts)),
            )

    @contextmanager
    def explaining_parts(self, whole: Any, count: int) -> Iterator[None]:
        """Raise PolyaccelError where the function takes the batch `whole` and fails on one of its `count` parts: an
        array in it has no axis over samples."""
        try:
            yield
        except (TypeError, ValueError) as error:
            if count == 1 or isinstance(error, PolyaccelError) or is_iterator(whole) or not self._takes(whole):
                raise
            raise PolyaccelError(
                f"the function takes this batch, but no part of it: {type(error).__name__}: {error}",
                hint="declare arrays that do not hold samples: polyaccel.jax.replicated(value) in the batch",
                value=str(error),
            ) from error

    def require_scalable(self, batch: Any) -> None:
        """Raise PolyaccelError for a loss that a loss scale makes wrong."""
        if not self._loss_scaler.is_active or (key := _shapes_key(batch)) in self._scalable:
            return
        require_homogeneous(self._traced(batch))
        self._scalable.add(key)

    def _takes(self, batch: Any) -> bool:
        """Return whether the function can be traced with a batch."""
        try:
            self._traced(as_inputs(batch))
        except Exception:
            return False
        return True


def is_iterator(data: Any) -> bool:
    """Return whether `data` yields batches, and is not one."""
    return hasattr(data, "__next__")


def _shapes_key(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple(getattr(leaf, "shape", ()) for leaf in leaves)
