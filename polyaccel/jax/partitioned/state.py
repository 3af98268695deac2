"""The state that a function on a script's own mesh carries: one for all devices, as plain `jax.jit` has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyaccel.comm.base import Communicator
from polyaccel.errors import PolyaccelError
from polyaccel.jax.carried_state import Array, CarriedState, Reduction, reduction_of
from polyaccel.jax.partitioned.places import host_tree, sharding_on
from polyaccel.jax.program.carried import Result, StateForm


class MeshState(CarriedState):
    """A state whose leaves rest on `mesh` where they lay there, and are whole on all its devices elsewhere.

    The function sees the samples of all devices, so ranks have nothing to agree on. Raises PolyaccelError for the
    reduction "none", ShardingError for a leaf on another mesh.
    """

    def __init__(
        self, form: StateForm, tree: Any, reduction: Reduction, communicator: Communicator, mesh: Mesh
    ) -> None:
        for leaf in form.leaves:
            if reduction_of(reduction, leaf.name) != "mean":
                raise PolyaccelError(
                    f"state_reduction keeps {leaf.name!r} per rank, and a program on a mesh has one state",
                    hint="leave state_reduction out; or leave mesh= out, where each device has its own state",
                    value=leaf.name,
                )
        found = [sharding_on(mesh, leaf) for leaf in jax.tree.leaves(tree)]
        self.places = [NamedSharding(mesh, PartitionSpec()) if one is None else one for one in found]
        self._gathered = jax.jit(lambda value: value, out_shardings=NamedSharding(mesh, PartitionSpec()))
        super().__init__(form, host_tree(tree), reduction, communicator)

    @property
    def tree(self) -> Any:
        """The state on the mesh."""
        return self.form.tree(self.data)

    def assign(self, tree: Any) -> None:
        """As `CarriedState.assign`. Collective where leaves have parts in other processes."""
        super().assign(host_tree(tree))

    def reduce(self) -> None:
        """Do nothing: there is one state."""

    @property
    def _first_rank(self) -> int:
        return self.communicator.rank  # one saves

    @property
    def _all_states(self) -> int:
        return 1

    def _placed(self, at: int, parts: Sequence[Array]) -> jax.Array:
        (value,), place = parts, self.places[at]
        return jax.make_array_from_callback(value.shape, place, lambda index: value[index])

    def _parts(self, value: jax.Array) -> Sequence[Any]:
        return ((value if value.is_fully_replicated else self._gathered(value)).addressable_data(0),)


def settled(found: Any, places: Sequence[NamedSharding]) -> Any:
    """A program's auxiliary output, whose state is where it was before; to be traced by JAX."""
    if not isinstance(found, Result):
        return found
    pairs = zip(found.state, places, strict=True)
    return Result([jax.lax.with_sharding_constraint(value, place) for value, place in pairs], found.aux)
