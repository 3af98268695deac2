"""The grid of a pipeline: which ranks share a stage, a pipeline and the layers of a stage, with torch's groups of them.

Groups are made once for each set of ranks, when the first grid is: every rank makes a grid of the same topology.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import distributed as dist

from polyaccel.comm.default import default_communicator, is_initialized
from polyaccel.errors import PolyaccelError
from polyaccel.pipeline.table import PipelineError
from polyaccel_deepspeed.pipeline.topology import PipeDataParallelTopology, ProcessTopology

_groups: dict[tuple[int, ...], Any] = {}
_of_default: Any = None


class PipelineParallelGrid:
    """Where this rank stands in a topology. Raises PipelineError for a topology of another number of ranks."""

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank, self.world_size = 0, 1
        if is_initialized():
            ranks = default_communicator()
            self.global_rank, self.world_size = ranks.rank, ranks.world_size
        self._has_groups = dist.is_initialized() and dist.get_world_size() == self.world_size
        self._topo = topology = topology or _even_topology(self.world_size)
        self.data_parallel_size = max(topology.get_dim("data"), 1)
        self.pipe_parallel_size = max(topology.get_dim("pipe"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(topology.get_dim("model"), 1)
        if topology.world_size() != self.world_size:
            raise PipelineError(
                f"a topology of {topology.world_size()} ranks, and there are {self.world_size}",
                hint="let the product of its dims be the number of ranks, after deepspeed.init_distributed()",
                value=topology.world_size(),
            )
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        replicas = [sorted(topology.get_axis_list("data", at)) for at in range(self.data_parallel_size)]
        ds_group = self._mine(replicas if "data" in topology.axes else [list(range(self.world_size))])
        self.ds_model_rank, self.ds_model_world_size = ds_group.index(self.global_rank), len(ds_group)
        self.dp_groups = topology.get_axis_comm_lists("data")
        self.dp_group = self._mine(self.dp_groups)
        self.pipe_groups = topology.get_axis_comm_lists("pipe")
        self.pp_group = self._mine(self.pipe_groups)
        self.model_groups = topology.get_axis_comm_lists("model")
        self.slice_group = self.mp_group = self._mine(self.model_groups)
        self.p2p_groups = [self._neighbours(rank) for rank in range(self.world_size)]
        lines = ds_group, self.dp_group, self.pp_group, self.slice_group
        groups = [_groups[tuple(ranks)] if self._has_groups else None for ranks in lines]
        self.ds_model_proc_group, self.dp_proc_group, self.pp_proc_group, self.slice_proc_group = groups

    def _mine(self, lines: Sequence[Sequence[int]]) -> list[int]:
        """The line that this rank stands in; all have their groups made."""
        for line in lines if self._has_groups else ():
            _make_group(line)
        mine = next((line for line in lines if self.global_rank in line), None)
        if mine is not None:
            return list(mine)
        for rank in range(self.world_size) if self._has_groups else ():
            _make_group([rank])
        return [self.global_rank]

    def _neighbours(self, rank: int) -> list[int]:
        line = next((line for line in self.pipe_groups if rank in line), [rank])
        return [rank, line[(line.index(rank) + 1) % len(line)]]

    def topology(self) -> ProcessTopology:
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of another stage at this rank's place along the other axes, or at those of `kwargs`."""
        place = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)
        return self._topo.get_rank(**place._asdict())

    def _place_along(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis)) if axis in self._topo.axes else 0

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_stage_id(self) -> int:
        return self._place_along("pipe")

    def get_data_parallel_id(self) -> int:
        return self._place_along("data")

    def get_pipe_parallel_rank(self) -> int:
        """The stage of this rank."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """torch's group of this rank's pipeline: one rank of every stage."""
        return _required(self.pp_proc_group)

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    def get_data_parallel_rank(self) -> int:
        """The pipeline of this rank."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """torch's group of the ranks with the same part of the model and other batches."""
        return _required(self.dp_proc_group)

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """This rank's place among those that have the whole model together."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """torch's group of the ranks that have the whole model together."""
        return _required(self.ds_model_proc_group)

    def get_slice_parallel_rank(self) -> int:
        """This rank's place among those that share layers."""
        return self._place_along("model")

    def get_slice_parallel_world_size(self) -> int:
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        """torch's group of the ranks that share layers."""
        return _required(self.slice_proc_group)

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """Return how many stages `mpu` has, by whichever of its names."""
    names = ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size")
    return next((int(getattr(mpu, name)()) for name in names if hasattr(mpu, name)), 1)


def is_even(number: int) -> bool:
    return number % 2 == 0


def _even_topology(world_size: int) -> ProcessTopology:
    """Prime factors of the ranks dealt to stages and pipelines in turn."""
    sizes, left, prime, turn = [1, 1], world_size, 2, 0
    while left > 1:
        while left % prime == 0:
            sizes[turn % 2] *= prime
            left //= prime
            turn += 1
        prime += 1
    return PipeDataParallelTopology(num_pp=sizes[0], num_dp=sizes[1])


def _make_group(ranks: Sequence[int]) -> None:
    """Collective: every rank makes all groups in the same order."""
    global _of_default
    if _of_default is not dist.group.WORLD:
        _groups.clear()
        _of_default = dist.group.WORLD
    if tuple(ranks) not in _groups:
        _groups[tuple(ranks)] = dist.new_group(list(ranks))


def _required(group: Any) -> Any:
    if group is None:
        raise PolyaccelError(
            "this pipeline has no groups of torch, for torch.distributed was not initialized when it was made",
            hint="call deepspeed.init_distributed() before PipelineModule(...)",
        )
    return group
