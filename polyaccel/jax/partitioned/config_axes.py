"""The mesh that a config asks for by `mesh.tensor`, `mesh.sequence` and `mesh.expert` in native mode.

A batch is cut along its axes `data` and `expert`, and parameters by the names of their dimensions or by `param_specs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import AxisType, Mesh, PartitionSpec

from polyaccel.errors import ShardingError
from polyaccel.jax.native.mesh import DeviceMesh
from polyaccel.jax.partitioned.logical_axes import (
    DEFAULT_RULES,
    checked_rules,
    named_axes,
    require_names,
    rules_of_context,
    specs_by_rules,
)
from polyaccel.jax.partitioned.places import Partition

_OF_BATCH = ("data", "expert")


def partition_of(
    sizes: Mapping[str, int], devices: DeviceMesh, params: Any, specs: Any, batch_spec: Any, rules: Any
) -> Partition:
    """Return the mesh of `devices` with axes of these `sizes`, and how it cuts `params`.

    Raises ShardingError for names of dimensions without a rule, and where an axis would cut no parameter.
    """
    axes = tuple(sizes)
    places = devices.mesh.devices.reshape(tuple(sizes.values()))
    mesh = Mesh(places, axes, axis_types=(AxisType.Auto,) * len(axes))
    all_rules = (*(rules_of_context() or () if rules is None else checked_rules(rules)), *DEFAULT_RULES)
    found = named_axes(params)
    if specs is None:
        if rules is not None:
            require_names(found)
        specs = specs_by_rules(found, all_rules, mesh)
    partition = Partition.of(mesh, specs, PartitionSpec(_OF_BATCH) if batch_spec is None else batch_spec)
    cut = partition.axes_of_params()
    asked = {axis: size for axis, size in sizes.items() if axis != "data" and size > 1}
    for axis, size in asked.items():
        if axis != "sequence" and axis not in cut:
            names = sorted({str(name) for one in found.values() for name in one.names if name is not None})
            what = f"their dimensions have the names {names}" if names else "their dimensions have no names"
            raise ShardingError(
                f"mesh.{axis} = {size} would cut no parameter: {what}",
                hint="name dimensions in flax (nn.with_logical_partitioning, nnx.with_partitioning) with rules "
                f'axis_rules=(("name", "{axis}"),), or pass param_specs= with PartitionSpecs of {list(axes)}',
                value=axis,
            )
    return replace(partition, rules=all_rules, must_use=frozenset(asked) - cut)
