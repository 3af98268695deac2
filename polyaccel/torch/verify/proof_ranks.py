"""`ProofRanks`: the mesh of a proof, whose ranks are threads of one process.

[Note: Ranks of a proof]
A rank of the job that failed alone would leave the others in a collective until its time limit. So rank 0 alone runs a
proof, with every rank of a small mesh as a thread: one that fails takes the others out of whatever they wait for. The
other ranks of the job wait for the result in one collective. No group of the job, no file and no connection is made or
used. Axes along which ranks share samples keep their sizes, and few data ranks stand for all. A proof of one rank runs
in the process's own thread and on its device. Several run on the host, because autograd has one thread a device, which
a rank that waits would keep from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any
from unittest.mock import patch

from torch.distributed import distributed_c10d

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import host_accelerator
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.comm.default import own_thread_communicator, set_thread_communicator
from polyaccel.comm.init.threads import run_threads
from polyaccel.config import Config
from polyaccel.core.mesh import Mesh, MeshAxis
from polyaccel.torch.verify.untouched import NotProvenError

SHARED_AXES = ("pipe", "sequence", "tensor")
"""Axes along which ranks compute parts of one sample."""
LIMIT_S = 120.0
"""Most seconds of a run whose ranks are threads."""
_MOST_RANKS = 8
_DATA_AXES = ("data", "expert_data")
_SECTIONS = ("mesh", "pipeline", "tensor_parallel", "sequence_parallel", "expert_parallel", "sequence_parallel_size")


@dataclass(frozen=True, slots=True)
class ProofRanks:
    """A small mesh, its config, and for each of its ranks the rank of the job whose samples it takes."""

    config: Config
    mesh: Mesh
    sources: tuple[int, ...]

    @staticmethod
    def from_mesh(config: Config, mesh: Mesh, data_ranks: int) -> ProofRanks:
        """Return the mesh with `data_ranks` at most, or 1 where there are many others."""
        others = mesh.world_size // max(1, mesh.size_of(_DATA_AXES))
        most = data_ranks if others * data_ranks <= _MOST_RANKS else 1
        axes = [
            MeshAxis(axis.name, min(axis.size, most) if axis.name in _DATA_AXES else axis.size) for axis in mesh.axes
        ]
        small = Mesh(tuple(axes))
        zero = config.zero_optimization
        if small.world_size % zero.zero_hpz_partition_size:
            zero = zero.model_copy(update={"zero_hpz_partition_size": 1})
        sizes = {"data": None, **{name: small.size_of((name,)) for name in (*SHARED_AXES, "expert")}}
        changes: dict[str, Any] = {
            "zero_optimization": zero,
            "data_parallel_size": None,
            "mesh": config.mesh.model_copy(update=sizes),
        }
        return ProofRanks(config.model_copy(update=changes), small, _sources(small, mesh))

    def plain(self) -> ProofRanks:
        """Return the ranks with their own samples, for runs of plain torch."""
        axes = tuple(axis for axis in self.mesh.axes if axis.name not in SHARED_AXES)
        default = type(self.config)()
        changes = {name: getattr(default, name) for name in _SECTIONS}
        small = Mesh(axes or (MeshAxis("data", 1),))
        places = [small.coordinates(rank) for rank in range(small.world_size)]
        first = [self.mesh.rank_at({**dict.fromkeys((axis.name for axis in self.mesh.axes), 0), **at}) for at in places]
        return ProofRanks(self.config.model_copy(update=changes), small, tuple(self.sources[rank] for rank in first))

    @property
    def shares_samples(self) -> bool:
        """Whether several ranks compute parts of one sample."""
        return self.mesh.size_of(SHARED_AXES) > 1

    def run(self, program: Callable[[int], None], accelerator: Accelerator) -> None:
        """Call `program` with each rank. Raises what the first rank that fails raises, once all have ended."""
        size = self.mesh.world_size
        with _without_torch_groups():
            if size > 1:
                host = host_accelerator(accelerator)
                run_threads(size, lambda ranks: _alone(program, ranks.rank), timeout_s=LIMIT_S, accelerator=host)
                return
            before = own_thread_communicator()
            set_thread_communicator(SingleCommunicator(accelerator, timeout_s=LIMIT_S))
            try:
                _alone(program, 0)
            finally:
                set_thread_communicator(before)


def _sources(small: Mesh, mesh: Mesh) -> tuple[int, ...]:
    places = (small.coordinates(rank) for rank in range(small.world_size))
    return tuple(
        mesh.rank_at({name: 0 if name in SHARED_AXES else at for name, at in place.items()}) for place in places
    )


_is_alone: ContextVar[bool] = ContextVar("polyaccel_proof", default=False)


def _alone(program: Callable[[int], None], rank: int) -> None:
    token = _is_alone.set(True)
    try:
        program(rank)
    except Exception as error:
        clear_frames(error.__traceback__)  # which hold copies of the model, in cycles through autograd's graph
        raise
    finally:
        _is_alone.reset(token)


@contextmanager
def _without_torch_groups() -> Iterator[None]:
    """Refuse torch's collectives in the ranks of a proof: the other processes do not take part."""
    inner = distributed_c10d._rank_not_in_group

    def refuse(group: Any) -> bool:
        if _is_alone.get():
            raise NotProvenError("the model uses groups of torch.distributed")
        return inner(group)

    with patch.object(distributed_c10d, "_rank_not_in_group", refuse):
        yield
