"""The groups of ranks along the axes of the mesh, by the names that users of Megatron and DeepSpeed expect.

An engine that is made sets the groups; before that, all ranks are data-parallel. Groups are communicators, which every
function of `polyaccel.comm` takes as `group`. None of these functions is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple
from weakref import WeakKeyDictionary

from polyaccel.comm.base import Communicator
from polyaccel.comm.default import default_communicator
from polyaccel.core.mesh import Mesh
from polyaccel.errors import CommError


class _Axes(NamedTuple):
    mesh: Mesh
    along: Callable[[Collection[str]], Communicator]


_PRESENT: WeakKeyDictionary[Communicator, list[_Axes]] = WeakKeyDictionary()
"""Those of each engine that has several axes, the last one made at the end: by the communicator of all ranks, of which
ranks that are threads have one each."""


def set_mesh(communicator: Communicator, mesh: Mesh, along: Callable[[Collection[str]], Communicator]) -> None:
    """Place `communicator`'s ranks along `mesh` until `forget_mesh`; `along` has groups of single axes."""
    _PRESENT.setdefault(communicator, []).append(_Axes(mesh, along))


def forget_mesh(communicator: Communicator, along: Callable[[Collection[str]], Communicator]) -> None:
    """Undo `set_mesh`: the last mesh left counts; without one, all ranks are data-parallel."""
    left = [axes for axes in _PRESENT.pop(communicator, []) if axes.along != along]
    if left:
        _PRESENT[communicator] = left


def _present(communicator: Communicator) -> _Axes | None:
    return _PRESENT.get(communicator, [None])[-1]


def get_mesh() -> Mesh:
    """The axes along which the ranks stand."""
    present = _present(communicator := default_communicator())
    return Mesh.flat(communicator.world_size) if present is None else present.mesh


def _group(*axes: str) -> Communicator:
    communicator = default_communicator()
    present = _present(communicator)
    if present is None and "data" in axes:
        return communicator
    if present is None or ("data" not in axes and not any(present.mesh.has_several(axis) for axis in axes)):
        raise CommError(
            f"no ranks stand along the axis {axes[-1]!r}",
            hint="name its size in the config, such as tensor_parallel.autotp_size or sequence_parallel_size, and ask "
            "after polyaccel.initialize; the _rank and _world_size functions answer without it",
        )
    return present.along(axes)


def _size(*axes: str) -> int:
    return get_mesh().size_of(axes)


def _rank(*axes: str) -> int:
    mesh, rank = get_mesh(), default_communicator().rank
    return mesh.group(axes, rank).index(rank)


def get_data_parallel_group() -> Communicator:
    """The ranks with other batches and the same part of the model."""
    return _group("data")


def get_data_parallel_world_size() -> int:
    return _size("data")


def get_data_parallel_rank() -> int:
    return _rank("data")


def get_tensor_model_parallel_group() -> Communicator:
    """The ranks that share the weights of layers with this one. Raises CommError where there are none."""
    return _group("tensor")


def get_tensor_model_parallel_world_size() -> int:
    return _size("tensor")


def get_tensor_model_parallel_rank() -> int:
    return _rank("tensor")


get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank


def get_sequence_parallel_group() -> Communicator:
    """The ranks that share the sequences of a batch with this one. Raises CommError where there are none."""
    return _group("sequence")


def get_sequence_parallel_world_size() -> int:
    return _size("sequence")


def get_sequence_parallel_rank() -> int:
    return _rank("sequence")


def get_expert_parallel_group() -> Communicator:
    """The ranks that share the experts of a layer with this one. Raises CommError where there are none."""
    return _group("expert")


def get_expert_parallel_world_size() -> int:
    return _size("expert")


def get_expert_parallel_rank() -> int:
    return _rank("expert")


def get_expert_data_parallel_group() -> Communicator:
    """The ranks with the same experts as this one and other batches. Raises CommError where no ranks share experts."""
    return _group("expert_data")


def get_expert_data_parallel_world_size() -> int:
    return _size("expert_data")


def get_expert_data_parallel_rank() -> int:
    return _rank("expert_data")


def get_sequence_data_parallel_group() -> Communicator:
    """The ranks over which ZeRO shards what is not cut along `tensor`: data and sequence together."""
    return _group("data", "sequence")


def get_sequence_data_parallel_world_size() -> int:
    return _size("data", "sequence")


def get_sequence_data_parallel_rank() -> int:
    return _rank("data", "sequence")
