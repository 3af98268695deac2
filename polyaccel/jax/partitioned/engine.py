"""The engine of native mode whose parameters are leaves on a mesh: stage 3, transformations of whole parameters, and
meshes of the script's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from polyaccel.core.mesh import Mesh
from polyaccel.engine.policies.steps import persistent_params
from polyaccel.jax.carried_state import CarriedState
from polyaccel.jax.native.engine import NativeEngine
from polyaccel.jax.native.many_steps import StepsProgram
from polyaccel.jax.native.mesh import CUT, WHOLE, DeviceMesh
from polyaccel.jax.native.optimizers import slice_update
from polyaccel.jax.native.step import NativeStep
from polyaccel.jax.optax_on_mesh import OptaxOnMesh
from polyaccel.jax.partitioned.batches import (
    parts_of_process,
    placed_batch,
    placed_steps,
    require_same_samples,
    shares_parts,
)
from polyaccel.jax.partitioned.gradients import LeafGradients
from polyaccel.jax.partitioned.memory import PartitionedMemory
from polyaccel.jax.partitioned.places import LeafPlaces, Partition
from polyaccel.jax.partitioned.program import PartitionedProgram
from polyaccel.jax.partitioned.state import MeshState
from polyaccel.jax.partitioned.units import unit_leaves
from polyaccel.jax.partitioned.update import LeafUpdate
from polyaccel.jax.program.batches import as_inputs, split_batch
from polyaccel.jax.program.carried import StateForm
from polyaccel.jax.rewrites import RewriteContext
from polyaccel.zero.plan.layout import plan_layout


class PartitionedEngine(NativeEngine):
    """JAX engine of one compiled step on leaves that rest cut over a mesh.

    Native mode is this engine at stage 3, with a transformation of optax that needs whole parameters, and with a mesh
    of the script's own, where the function is a program of all devices.
    """

    _program: PartitionedProgram

    def __init__(self, rewrites: RewriteContext, mesh: DeviceMesh) -> None:
        self._partition: Partition | None = rewrites.partition
        super().__init__(rewrites, mesh)

    @property
    def _are_sharded(self) -> bool:
        return False  # the function gets whole leaves

    @property
    def _devices_of_aux(self) -> int:
        return 1 if self._partition is not None else super()._devices_of_aux

    def shard_parameters(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        optimizer, runtime = self._rewrites.slice_optimizer, self.runtime
        self._loss_function.own_meshes = {"shard_map": self._mesh.world_size}
        if self._partition is not None:
            names = ("shard_map", "sharding_constraint", "reshard")
            self._loss_function.own_meshes = dict.fromkeys(names, self._mesh.world_size)
            self._loss_function.must_use = self._partition.must_use
        specs = tuple(self.adapter.param_specs())
        offloads = self._rewrites.offloads_states
        places = self._places = LeafPlaces(self._mesh, self._partition, runtime.policy, offloads=offloads)
        leaves = unit_leaves(self.adapter.leaves(), self._rewrites.stacked)
        small = persistent_params(runtime.config, {spec.fqn: spec.numel for spec in specs})
        places.add(specs, {leaf.fqn for leaf in leaves if leaf.is_stacked}, small)
        layout = plan_layout(specs, mesh=Mesh.flat(self._mesh.world_size), max_bucket_numel=1)
        on_mesh = optimizer if isinstance(optimizer, OptaxOnMesh) else None
        update: Any = None if optimizer is None else on_mesh or slice_update(optimizer)
        if on_mesh is not None:
            on_mesh.settle(places)
        else:
            self.adapter.separate(optimizer)
        step_policy = runtime.step_policy
        gradients = LeafGradients(
            *(places, layout, runtime.policy, step_policy, specs[::-1], leaves),
            *(self._loss_function, self._rewrites.seed),
        )
        program = self._program = PartitionedProgram(
            *(places, specs[::-1], gradients, LeafUpdate(places, layout, step_policy, update)),
            rounds_stochastically=step_policy.stochastic_rounding,
        )
        first = self._first_values(self._rewrites.params)
        memory = PartitionedMemory(places, layout, program, on_mesh, first, self._starts)
        self.zero = NativeStep(layout, memory, program, optimizer, update, self.communicator)
        self.adapter.let_go()
        return (), tuple(spec.fqn for spec in specs)

    def _why_one_by_one(self) -> str:
        reason = super()._why_one_by_one()
        return "optimizer states rest in host memory" if self._rewrites.offloads_states else reason

    @cached_property
    def _many_steps(self) -> StepsProgram:
        reduce = self._reduce_here
        over_devices = None if reduce is None else self._mesh.spread(reduce, (CUT,), (CUT, WHOLE))
        return self._program.many(over_devices)

    def _cut_steps(self, steps: list[list[Any]]) -> Any:
        if self._partition is None:
            return super()._cut_steps(steps)
        if self._shares_parts:
            require_same_samples(self._partition, steps, self.communicator)
        return placed_steps(self._partition, steps)

    def _losses_of_steps(self, losses: jax.Array) -> Any:
        if self._partition is None:
            return super()._losses_of_steps(losses)
        return np.asarray(self._mesh.own_parts(losses)[0])

    def _carry(self, form: StateForm, first: Any) -> CarriedState:
        if self._partition is None:
            return super()._carry(form, first)
        reduction = self._rewrites.state_reduction
        carried = MeshState(form, first, reduction, self.communicator, self._partition.mesh)
        self._places.carried = carried.places
        return carried

    # With a mesh of the script: one program, and one micro-batch, of all devices.

    def _cut(self, batch: Any) -> Any:
        if self._partition is None:
            return super()._cut(batch)
        split_batch(  # for its errors
            batch,
            parts_of_process(self._partition),
            over="parts of this process",
            length_cure="give arrays a first axis that the mesh divides",
        )
        if self._shares_parts:
            require_same_samples(self._partition, batch, self.communicator)
        found = self._with_state(placed_batch(self._partition, batch))
        arguments = (self.zero.params.held.params, None, found, np.uint32(0), np.float32(1.0))
        self._checks.require_scalable(as_inputs(batch))
        self._loss_function.check(self._program.differentiate, arguments)
        return found

    @cached_property
    def _shares_parts(self) -> bool:
        return self._partition is not None and shares_parts(self._partition)

    def _own_mean(self, losses: jax.Array) -> jax.Array:
        if self._partition is None:
            return super()._own_mean(losses)
        return self._mesh.own_parts(losses)[0]

    def _own_aux(self, aux: Any) -> Any:
        if self._partition is None:
            return super()._own_aux(aux)
        return jax.tree.map(lambda value: value.addressable_data(0) if value.is_fully_replicated else value, aux)

    def _mean_gradients(
        self, leaves: Sequence[Any] | None, batch: Any, rng: Any, number: int, factor: float
    ) -> tuple[jax.Array, Any, list[Any]]:
        """As `GradientsOfEngine._mean_gradients`. On a script's mesh gradients lie where the parameters do."""
        if self._partition is None:
            return super()._mean_gradients(leaves, batch, rng, number, factor)
        names = [leaf.fqn for leaf in self.adapter.leaves()]
        given = None if leaves is None else self._where_called(leaves, names)
        cut = self._cut(batch)
        self._meet("gradients of JAX")
        keys = None if rng is None else [rng]
        held = self.zero.params.held.params
        loss, aux, found = self._program.mean_gradients(held, given, keys, cut, np.uint32(number), np.float32(factor))
        return self._own_mean(loss), self._own_aux(self._keep_state(aux)), found

    def _take_gradients(self, gradients: Sequence[jax.Array]) -> None:
        if self._partition is None:
            super()._take_gradients(gradients)
            return
        names = [leaf.fqn for leaf in self.adapter.leaves() if leaf.is_trained]
        self._meet("gradients of JAX")
        self.zero.take_gradients(self._where_called(gradients, names))

    def _where_called(self, leaves: Sequence[Any], names: Sequence[str]) -> list[jax.Array]:
        """Leaves where the function gets the parameters of these names."""
        places = [self._places.function[name] for name in names]
        return [jax.device_put(leaf, place) for leaf, place in zip(leaves, places, strict=True)]


def needs_leaves(rewrites: RewriteContext) -> bool:
    """Whether native mode has to keep whole leaves for what was given, and not flat buckets."""
    is_whole = isinstance(rewrites.slice_optimizer, OptaxOnMesh)
    return rewrites.partition is not None or is_whole or rewrites.offloads_states or rewrites.shards_parameters
