"""The carried states of native mode, one for each device of the mesh. See [Note: State over ranks] in
`polyaccel.jax.carried_state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.comm.base import Communicator
from polyaccel.jax.carried_state import Array, CarriedState, Reduction, different_error
from polyaccel.jax.native.mesh import AXIS, CUT, WHOLE, DeviceMesh
from polyaccel.jax.program.carried import StateForm


class NativeState(CarriedState):
    """The states of this process's devices in native mode, cut over them along a leading axis."""

    def __init__(
        self, form: StateForm, tree: Any, reduction: Reduction, communicator: Communicator, mesh: DeviceMesh
    ) -> None:
        self._mesh, self._states = mesh, len(mesh.local)
        super().__init__(form, tree, reduction, communicator)
        self._reduced = jax.jit(mesh.spread(self.reduce_here, (CUT,), (CUT, WHOLE)))

    @property
    def _first_rank(self) -> int:
        return self._mesh.first_rank

    @property
    def _all_states(self) -> int:
        return self._mesh.world_size

    def _placed(self, at: int, parts: Sequence[Array]) -> jax.Array:
        return self._mesh.over_devices([jnp.array(part)[None] for part in parts])

    def _parts(self, value: jax.Array) -> Sequence[Any]:
        return [part[0] for part in self._mesh.own_parts(value)]

    def reduce(self) -> None:
        """As `CarriedState.reduce`."""
        if self._mesh.world_size == 1:
            return
        self.data, different = self._reduced(self.data)
        self.require_equal(different)

    def require_equal(self, different: jax.Array) -> None:
        """Raise PolyaccelError for the first leaf that `different` of `reduce_here` names in any step."""
        of_leaves: Any = np.asarray(different.addressable_data(0)).reshape(-1, len(self.form.leaves)).any(axis=0)
        for leaf, differs in zip(self.form.leaves, of_leaves, strict=True):
            if differs:
                raise different_error(leaf.name)

    def reduce_here(self, data: Sequence[Any]) -> Any:
        """(states, which differ) of one device, to be traced by JAX."""
        found, different = [], []
        for leaf, value, mean in zip(self.form.leaves, data, self.is_averaged, strict=True):
            differs = jnp.bool_(False)
            if mean and leaf.is_inexact:
                wide = jnp.promote_types(leaf.dtype, jnp.float32)
                value = jax.lax.pmean(value.astype(wide), AXIS).astype(leaf.dtype)
            elif mean:
                bits = value.astype(jnp.promote_types(jnp.int32, leaf.dtype))
                differs = jnp.any(jax.lax.pmax(bits, AXIS) != jax.lax.pmin(bits, AXIS))
            found.append(value)
            different.append(differs)
        return found, jnp.stack(different)
