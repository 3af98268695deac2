"""Layers of a list over pipeline stages: which rank has which, and who owns whole parameters there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from polyaccel.engine.runtime import EngineBuilder
from polyaccel.jax.owners.exchange import Owners, balanced_owners
from polyaccel.jax.pipeline import LayerList, numels_of, shapes_of_params
from polyaccel.jax.pytree import named_leaves
from polyaccel.pipeline.partition import layer_weights, split_layers
from polyaccel.pipeline.select import select_schedule
from polyaccel.pipeline.table import PipelineTable
from polyaccel.zero.plan.policy import Placement


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """The layers of a list over pipeline stages. `parts` has those of each chunk."""

    layers: LayerList
    stage: int
    parts: Sequence[range]
    table: PipelineTable
    table_for: Callable[[int], PipelineTable]
    """The schedule for so many micro-batches."""
    shapes_of_params: Any
    """Shapes of the parameters of all layers."""
    state_clashes: bool
    """Whether a parameter of any layer has the name of a leaf of the state."""

    def layers_of(self, stage: int) -> set[int]:
        """Return the indices of a stage's layers."""
        pairs = zip(self.table.placement, self.parts, strict=True)
        return {index for at, part in pairs if at == stage for index in part}


def cut_of_stages(runtime: EngineBuilder, layers: LayerList, params: Sequence[Any]) -> StageCut:
    """Cut a list of layers by the config, the same way on every rank."""
    asked, stages = runtime.config.pipeline, runtime.mesh.size_of(("pipe",))
    table_for = partial(select_schedule, asked.schedule, stages, chunks=asked.chunks or None)
    table = table_for(runtime.config.gradient_accumulation_steps)
    method = "parameters" if asked.partition == "best" else asked.partition
    in_state = {f"{at}.{leaf.name}" for at, form in enumerate(layers.forms) if form for leaf in form.leaves}
    return StageCut(
        layers=layers,
        stage=runtime.mesh.coordinates(runtime.communicator.rank)["pipe"],
        parts=split_layers(layer_weights(method, layers.names(), numels_of(params)), table.chunks),
        table=table,
        table_for=table_for,
        shapes_of_params=shapes_of_params(list(params), runtime.param_dtype),
        state_clashes=not in_state.isdisjoint(named_leaves(params)[0]),
    )


def owners_of(runtime: EngineBuilder, params: Any, cut: StageCut | None) -> Owners:
    """Choose the ranks that own whole parameters. Collective.

    In a pipeline they are ranks of the parameter's stage. Where these have it whole, every line of stages updates it.
    """
    numels = {fqn: int(np.size(leaf)) for fqn, leaf in named_leaves(params)[0].items()}
    ranks, mesh = runtime.communicator, runtime.mesh
    if cut is None:
        owners = balanced_owners(numels, ranks.world_size)
        return Owners(ranks, owners, owners)
    stage_of = {layer: stage for stage in range(cut.table.stages) for layer in cut.layers_of(stage)}
    stages = {fqn: stage_of[int(fqn.partition(".")[0])] for fqn in numels}
    if runtime.policy.optim is not Placement.SHARDED:
        is_first = not any(value for axis, value in mesh.coordinates(ranks.rank).items() if axis != "pipe")
        return Owners(runtime.process_group_for(("pipe",)), stages, None, saves=is_first)
    in_step: dict[str, int] = {}
    in_job: dict[str, int] = {}
    for group in mesh.groups(mesh.others(("pipe",))):
        stage = mesh.coordinates(group[0])["pipe"]
        own = balanced_owners({fqn: numel for fqn, numel in numels.items() if stages[fqn] == stage}, len(group))
        in_step |= own
        in_job |= {fqn: group[at] for fqn, at in own.items()}
    return Owners(ranks, in_job, in_step)
