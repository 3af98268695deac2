"""The carried state of a plain run: one for each device of this process, and averages over all of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from polyaccel.comm.base import Communicator
from polyaccel.jax.carried_state import CARRIED, Reduction, reduction_of
from polyaccel.jax.program.carried import StateForm


class PlainState:
    """The states of `devices`, all of which begin with rank 0's where they are averaged. Collective."""

    def __init__(self, form: StateForm, tree: Any, reduction: Reduction, ranks: Communicator, devices: int) -> None:
        self.form, self._ranks = form, ranks
        self._is_averaged = [reduction_of(reduction, leaf.name) == "mean" for leaf in form.leaves]
        first: list[Any] = list(form.host_data(tree))
        if ranks.world_size > 1:
            of_first = ranks.all_gather_object([value.tobytes() for value in first])[0]
            for at, mean in enumerate(self._is_averaged):
                if mean:
                    first[at] = np.frombuffer(of_first[at], first[at].dtype).reshape(first[at].shape)
        self.of_device = [[jnp.asarray(value) for value in first] for _ in range(devices)]

    @property
    def tree(self) -> Any:
        """The state of the first device."""
        return self.form.tree(self.of_device[0])

    def assign(self, tree: Any) -> None:
        """Replace the states of all devices."""
        self.of_device = [[jnp.asarray(value) for value in self.form.host_data(tree)] for _ in self.of_device]

    def average(self) -> None:
        """Average the floating leaves over devices and ranks. Collective."""
        for at, (leaf, mean) in enumerate(zip(self.form.leaves, self._is_averaged, strict=True)):
            if not (mean and leaf.is_inexact):
                continue
            own = [np.asarray(state[at], np.result_type(leaf.dtype, np.float64)) for state in self.of_device]
            every = [
                value for found in self._ranks.all_gather_object([one.tobytes() for one in own]) for value in found
            ]
            total = np.mean([np.frombuffer(value, own[0].dtype) for value in every], axis=0)
            for state in self.of_device:
                state[at] = jnp.asarray(total.reshape(leaf.shape), leaf.dtype)

    def values(self) -> dict[str, Any]:
        """The state of the first device, by the names that `EngineValues.states` gives."""
        pairs = zip(self.form.leaves, self.of_device[0], strict=True)
        return {f"{CARRIED} {leaf.name}": np.asarray(value) for leaf, value in pairs}
