"""Several optimizer steps in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import getLogger
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.engine.base import Engine
from polyaccel.errors import InvariantError, PolyaccelError
from polyaccel.jax.program.calls import engine_call

log = getLogger(__name__)


class StepsOfEngine(Engine):
    """The part of an engine that trains several steps in a call."""

    _has_explained = False

    @engine_call
    def train_steps(self, batches: Iterable[Any]) -> jax.Array:
        """Run an optimizer step for each batch, with the numbers of as many calls of `train_batch`. Collective.

        In native mode steps with equal shapes are one compiled program, for each number of steps. Where something
        acts between steps (a loss scale that may skip one, a monitor, a call in `before_update`), and in views mode,
        they run one by one, and the log has the reason once.

        Args:
            batches: Sequence of batches, each as `train_batch` takes it.

        Returns:
            Shape (steps,): the mean loss of this process's micro-batches in each step.

        Raises:
            PolyaccelError: There are no batches, or one cannot be split evenly.

        Example:
            ```python
            losses = engine.train_steps([batch for batch, _ in zip(loader, range(100))])
            ```
        """
        if isinstance(batches, (Mapping, np.ndarray, jax.Array)):
            kind = type(batches).__name__
            hint = "pass a list of batches: train_steps([batch, batch])"
            raise PolyaccelError(f"train_steps takes a sequence of batches: got {kind}", hint=hint, value=kind)
        found = list(batches)
        if not found:
            raise PolyaccelError("train_steps has no batches", hint="pass a list of batches", value=0)
        if len(found) > 1:
            reason = self._why_one_by_one()
            if not reason:
                return self._train_together(found)
            if not self._has_explained and self.communicator.rank == 0:
                self._has_explained = True
                log.warning("train_steps runs steps one by one: %s (logged once)", reason)
        return jnp.stack([self.train_batch(batch) for batch in found])

    def _why_one_by_one(self) -> str:
        """The reason why steps are not one program, equal on all ranks; empty where they are. Collective."""
        return "views execution updates the parameters outside of JAX"

    def _train_together(self, batches: list[Any]) -> jax.Array:
        """`train_steps` in one program for each run of equal shapes. Collective."""
        raise InvariantError("steps of views execution are not one program", value=len(batches))
