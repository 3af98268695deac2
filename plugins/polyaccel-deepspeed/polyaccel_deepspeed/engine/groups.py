"""Groups of ranks as torch has them, which is what DeepSpeed's functions return: those of the last engine's mesh."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist

from polyaccel.comm.default import default_communicator
from polyaccel.core.mesh import Mesh
from polyaccel.errors import PolyaccelError

_of_axes: dict[tuple[str, ...], Any] = {}
_mesh: Mesh | None = None


def stand_along(mesh: Mesh) -> None:
    """The ranks stand along the axes of `mesh` from now on. Collective where it has more than one. Torch has groups of
    ranks that are processes alone."""
    global _mesh
    _mesh = mesh
    _of_axes.clear()
    if len(mesh.axes) == 1 or not dist.is_initialized() or dist.get_world_size() != mesh.world_size:
        return
    rank = default_communicator().rank
    both = [("data", "sequence")] if mesh.has_several("sequence") else []
    for axes in dict.fromkeys((("data",), *((axis.name,) for axis in mesh.axes), *both)):
        for ranks in mesh.groups(axes):
            group = dist.new_group(list(ranks))
            if rank in ranks:
                _of_axes[axes] = group


def _size(*axes: str) -> int:
    if _mesh is None:
        return dist.get_world_size() if "data" in axes else 1
    return _mesh.size_of(axes)


def _rank(*axes: str) -> int:
    rank = dist.get_rank()
    if _mesh is None:
        return rank if "data" in axes else 0
    return _mesh.group(axes, rank).index(rank)


def _group(*axes: str) -> Any:
    if axes in _of_axes:
        return _of_axes[axes]
    if "data" in axes:
        return dist.group.WORLD
    raise PolyaccelError(
        f"no ranks stand along the axis {axes[-1]!r}",
        hint="name its size in the config, for example tensor_parallel.autotp_size, and ask after deepspeed.initialize",
        value=axes[-1],
    )


def get_data_parallel_group() -> Any:
    """torch's group of the ranks with other batches and the same part of the model."""
    return _group("data")


def _get_data_parallel_group() -> Any:
    """As `get_data_parallel_group`, but None where ranks share sequences, which torch takes as all ranks. DeepSpeed
    answers so, and scripts average their losses over it."""
    return None if _size("sequence") > 1 else get_data_parallel_group()


def get_data_parallel_world_size() -> int:
    return _size("data")


def get_data_parallel_rank() -> int:
    return _rank("data")


def get_sequence_data_parallel_group() -> Any:
    """torch's group of the ranks with other batches or other parts of a sequence."""
    axes = ("data", "sequence")
    return _of_axes[axes] if axes in _of_axes else _group("data")


def get_tensor_model_parallel_group() -> Any:
    """torch's group of the ranks that share layers."""
    return _group("tensor")


def get_tensor_model_parallel_world_size() -> int:
    return _size("tensor")


def get_tensor_model_parallel_rank() -> int:
    return _rank("tensor")


def get_tensor_model_parallel_src_rank() -> int:
    """The number of the first of the ranks that share layers with this one."""
    return dist.get_rank() if _mesh is None else _mesh.group(("tensor",), dist.get_rank())[0]


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """The place of this rank among those that share layers, by a `mpu` as Megatron has it; 0 without one."""
    return int(_asked_of(mpu, "rank", 0))


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """How many ranks share layers, by a `mpu` as Megatron has it; 1 without one."""
    return int(_asked_of(mpu, "world_size", 1))


def _asked_of(mpu: Any, what: str, otherwise: int) -> int:
    for kind in ("tensor_model_parallel", "slice_parallel", "model_parallel"):
        ask = getattr(mpu, f"get_{kind}_{what}", None)
        if ask is not None:
            return int(ask())
    return otherwise


def is_model_parallel_parameter(p: Any) -> bool:
    """Whether a parameter is one rank's part of a layer's, as Megatron marks it."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def get_sequence_parallel_group() -> Any:
    """torch's group of the ranks that share sequences."""
    return _group("sequence")


def get_sequence_parallel_world_size() -> int:
    return _size("sequence")


def get_sequence_parallel_rank() -> int:
    return _rank("sequence")


def _get_max_expert_size() -> int:
    """How many ranks share the experts of a layer."""
    return _size("expert")


def _get_max_expert_size_name() -> str:
    """The name of their groups, for example `ep_size_2`."""
    return f"ep_size_{_size('expert')}"


def _get_max_expert_parallel_group() -> Any:
    """torch's group of the ranks that share experts with this one."""
    return _group("expert")


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    """`_get_expert_parallel_group` by name; empty where no ranks share experts."""
    return {_get_max_expert_size_name(): _group("expert")} if _size("expert") > 1 else {}


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    """`_get_expert_data_parallel_group` by name; empty where no ranks share experts."""
    return {_get_max_expert_size_name(): _group("expert_data")} if _size("expert") > 1 else {}


def _get_expert_parallel_group(group_name: str) -> Any:
    """torch's group of the ranks that share experts with this one. Raises PolyaccelError for a name that is not that of
    `_get_max_expert_size_name`, as all functions below."""
    return _group(_known("expert", group_name))


def _get_expert_parallel_group_ranks(group_name: str) -> tuple[int, ...]:
    """Their numbers."""
    return _members(_known("expert", group_name))


def _get_expert_parallel_rank(group_name: str) -> int:
    return _rank(_known("expert", group_name))


def _get_expert_parallel_world_size(group_name: str) -> int:
    return _size(_known("expert", group_name))


def _get_expert_data_parallel_group(group_name: str) -> Any:
    """torch's group of the ranks with the same experts as this one and other batches."""
    return _group(_known("expert_data", group_name))


def _get_expert_data_parallel_group_ranks(group_name: str) -> tuple[int, ...]:
    """Their numbers."""
    return _members(_known("expert_data", group_name))


def _get_expert_data_parallel_rank(group_name: str) -> int:
    return _rank(_known("expert_data", group_name))


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    return _size(_known("expert_data", group_name))


def _members(axis: str) -> tuple[int, ...]:
    assert _mesh is not None  # the name was found
    return _mesh.group((axis,), dist.get_rank())


def _known(axis: str, group_name: str) -> str:
    """`axis`, where groups of experts have the name."""
    if _size("expert") == 1 or group_name != _get_max_expert_size_name():
        there = f"use {_get_max_expert_size_name()}" if _size("expert") > 1 else "give MoE an ep_size above 1"
        raise PolyaccelError(f"no ranks share experts by the name {group_name!r}", hint=there, value=group_name)
    return axis
