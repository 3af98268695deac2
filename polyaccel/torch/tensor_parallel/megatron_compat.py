"""Meshes that scripts bring along: `mesh_param`, and an `mpu` of Megatron's shape, which has made its own groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import distributed, nn

from polyaccel.core.block import Block
from polyaccel.core.mesh import Mesh
from polyaccel.errors import ConfigError, Problem, ShardingError
from polyaccel.torch.sharding.tensor_shard import TensorShard

_GETTERS = {
    "tensor": ("get_tensor_model_parallel_{}", "get_model_parallel_{}"),
    "sequence": ("get_sequence_parallel_{}",),
    "data": ("get_data_parallel_{}",),
}


def mesh_sizes(mesh_param: Any, mpu: Any) -> dict[str, int]:
    """Return ranks by axis that `mesh_param` or `mpu` states. Raises ConfigError for both."""
    if mesh_param is not None and mpu is not None:
        raise ConfigError([Problem("mesh_param", mesh_param, "is given together with mpu", "pass one of the two")])
    if mesh_param is not None:
        is_pair = isinstance(mesh_param, Sequence) and len(mesh_param) == 2
        if not is_pair or not all(isinstance(size, int) and size > 0 for size in mesh_param):
            expected = "should be (data-parallel ranks, sequence-parallel ranks)"
            raise ConfigError([Problem("mesh_param", mesh_param, expected, "pass two numbers, for example (4, 2)")])
        return {"data": mesh_param[0], "sequence": mesh_param[1]}
    sizes = {axis: size for axis in ("tensor", "sequence") if (size := _asked(mpu, axis, "world_size")) is not None}
    pipe = getattr(mpu, "get_pipeline_model_parallel_world_size", None) or getattr(
        mpu, "get_pipe_parallel_world_size", None
    )
    if pipe is not None and pipe() > 1:
        hint = 'leave mpu out, and give a polyaccel.torch.pipeline.PipelineModule, or "pipeline": {"stages": N}'
        raise ConfigError([Problem("mpu", pipe(), "has pipeline stages, which this engine would not run", hint)])
    return {axis: size for axis, size in sizes.items() if size > 1}


def require_groups(mpu: Any, mesh: Mesh, rank: int) -> None:
    """Raise ShardingError where `mpu`'s groups are not lines of `mesh`."""
    for axis in _GETTERS if mpu is not None else ():
        group = _asked(mpu, axis, "group")
        if group is None or not mesh.has_several(axis) or not isinstance(group, distributed.ProcessGroup):
            continue
        theirs, ours = tuple(distributed.get_process_group_ranks(group)), mesh.line(axis, rank)
        if theirs != ours:
            raise ShardingError(
                f"the {axis} group of mpu has the ranks {list(theirs)}, and the mesh {list(ours)}",
                hint="number ranks as Megatron does: neighbours share tensors, then sequences, and data comes last",
                value=theirs,
            )


def cut_as_megatron_says(model: nn.Module, mesh: Mesh, rank: int) -> tuple[str, ...]:
    """Register blocks marked by Megatron's layers; return their names."""
    size = mesh.size_of(("tensor",))
    if size == 1:
        return ()
    found: list[str] = []
    place = mesh.group(("tensor",), rank).index(rank)
    for path, module in model.named_modules():
        cuts = {}
        for name, parameter in module._parameters.items():
            if parameter is None or not getattr(parameter, "tensor_model_parallel", False):
                continue
            if getattr(parameter, "partition_stride", 1) != 1:
                raise ShardingError(
                    f"{path}.{name} is cut with partition_stride {parameter.partition_stride}",
                    hint="set its block in the module's parallel_cuts (polyaccel.torch.sharding.tensor_shard)",
                    value=path,
                )
            dim, shape = parameter.partition_dim, list(parameter.shape)
            length = shape[dim]
            shape[dim] *= size
            cuts[name] = TensorShard(Block.whole(shape).cut(dim, (place * length, length)))
        if cuts and getattr(module, "parallel_cuts", None) is None:
            module.parallel_cuts = cuts
            found += [f"{path}.{name}" if path else name for name in cuts]
    return tuple(found)


def _asked(mpu: Any, axis: str, what: str) -> Any:
    """The size that `mpu` has for an axis; None where it has none."""
    for pattern in _GETTERS[axis]:
        getter = getattr(mpu, pattern.format(what), None)
        if getter is not None:
            return getter()
    return None
