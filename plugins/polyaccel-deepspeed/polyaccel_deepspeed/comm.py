"""`deepspeed.comm`: torch.distributed's functions over its default group, with the arguments that DeepSpeed adds.

`prof`, `log_name` and `debug` set how a call is to be logged; polyaccel's log is about the engine's own collectives
(`"comms_logger"` in the config), so they have no effect. Groups are torch's.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.distributed import P2POp as P2POp
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed import ReduceOp as ReduceOp
from torch.distributed.device_mesh import init_device_mesh

import polyaccel.comm
from polyaccel.comm import get_local_rank as get_local_rank
from polyaccel.comm import is_initialized as is_initialized
from polyaccel_deepspeed.initialize import init_distributed as init_distributed


def all_gather(tensor_list: Any, tensor: Tensor, group: Any = None, async_op: bool = False, prof: bool = False,
               log_name: str = "all_gather", debug: Any = None) -> Any:  # fmt: skip
    return dist.all_gather(tensor_list, tensor, group, async_op)


def all_gather_coalesced(
    output_tensors: list[Tensor], input_tensors: list[Tensor], group: Any = None, async_op: bool = False
) -> Any:
    """`all_gather_into_tensor` of several tensors; with `async_op` an object to wait for all of them."""
    works = [
        dist.all_gather_into_tensor(output, each, group, async_op)
        for output, each in zip(output_tensors, input_tensors, strict=True)
    ]
    return Works(works) if async_op else None


class Works:
    """Several collectives under way, to be waited for together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def all_gather_into_tensor(output_tensor: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False,
                           prof: bool = False, log_name: str = "all_gather_into_tensor",
                           debug: Any = None) -> Any:  # fmt: skip
    return dist.all_gather_into_tensor(output_tensor, tensor, group, async_op)


def all_gather_object(object_list: Any, obj: Any, group: Any = None, prof: bool = False,
                      log_name: str = "all_gather_object", debug: Any = None) -> Any:  # fmt: skip
    return dist.all_gather_object(object_list, obj, group)


def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, prof: bool = False,
               log_name: str = "all_reduce", debug: Any = None) -> Any:  # fmt: skip
    return dist.all_reduce(tensor, op, group, async_op)


def all_reduce_coalesced(tensors: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False,
                         prof: bool = False, log_name: str = "all_reduce", debug: Any = None) -> Any:  # fmt: skip
    """`all_reduce` of several tensors; with `async_op` an object to wait for all of them."""
    works = [dist.all_reduce(tensor, op, group, async_op) for tensor in tensors]
    return Works(works) if async_op else None


def all_to_all(output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False,
               prof: bool = False, log_name: str = "all_to_all", debug: Any = None) -> Any:  # fmt: skip
    return dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)


def all_to_all_single(output: Tensor, tensor: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None,
                      group: Any = None, async_op: bool = False, prof: bool = False,
                      log_name: str = "all_to_all_single", debug: Any = None) -> Any:  # fmt: skip
    return dist.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group, async_op)


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, prof: bool = False,
            log_name: str = "barrier", debug: Any = None) -> Any:  # fmt: skip
    return dist.barrier(group, async_op, device_ids)


def batch_isend_irecv(p2p_op_list: Any, prof: bool = False, log_name: str = "batch_isend_irecv",
                      debug: Any = None) -> Any:  # fmt: skip
    return dist.batch_isend_irecv(p2p_op_list)


def broadcast(tensor: Tensor, src: int, group: Any = None, async_op: bool = False, prof: bool = False,
              log_name: str = "broadcast", debug: Any = None) -> Any:  # fmt: skip
    return dist.broadcast(tensor, src, group, async_op)


def broadcast_object_list(object_list: Any, src: int, group: Any = None, device: Any = None, prof: bool = False,
                          log_name: str = "broadcast_object_list", debug: Any = None) -> Any:  # fmt: skip
    return dist.broadcast_object_list(object_list, src, group, device)


def gather(tensor: Tensor, gather_list: Any = None, dst: int = 0, group: Any = None, async_op: bool = False,
           prof: bool = False, log_name: str = "gather", debug: Any = None) -> Any:  # fmt: skip
    return dist.gather(tensor, gather_list, dst, group, async_op)


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The rank in the job of a rank of the group."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def inference_all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False,
                         prof: bool = False, log_name: str = "all_reduce", debug: Any = None) -> Any:  # fmt: skip
    """`all_reduce`, by the name that DeepSpeed has for what a forward pass waits for."""
    return dist.all_reduce(tensor, op, group, async_op)


def irecv(tensor: Tensor, src: Any = None, group: Any = None, tag: int = 0, prof: bool = False,
          log_name: str = "irecv", debug: Any = None) -> Any:  # fmt: skip
    return dist.irecv(tensor, src, group, tag)


def isend(tensor: Tensor, dst: int, group: Any = None, tag: int = 0, prof: bool = False, log_name: str = "isend",
          debug: Any = None) -> Any:  # fmt: skip
    return dist.isend(tensor, dst, group, tag)


def monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False,
                      prof: bool = False, log_name: str = "monitored_barrier", debug: Any = None) -> Any:  # fmt: skip
    return dist.monitored_barrier(group, timeout, wait_all_ranks)


def new_group(ranks: Any = None, *args: Any, **named: Any) -> Any:
    """torch's `new_group`; DeepSpeed's takes the ranks only."""
    return dist.new_group(ranks, *args, **named)


def recv(tensor: Tensor, src: Any = None, group: Any = None, tag: int = 0, prof: bool = False, log_name: str = "recv",
         debug: Any = None) -> Any:  # fmt: skip
    return dist.recv(tensor, src, group, tag)


def reduce(tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False,
           prof: bool = False, log_name: str = "reduce", debug: Any = None) -> Any:  # fmt: skip
    return dist.reduce(tensor, dst, op, group, async_op)


def reduce_scatter(output: Tensor, input_list: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False,
                   prof: bool = False, log_name: str = "reduce_scatter", debug: Any = None) -> Any:  # fmt: skip
    return dist.reduce_scatter(output, input_list, op, group, async_op)


def reduce_scatter_tensor(output_tensor: Tensor, tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None,
                          async_op: bool = False, prof: bool = False, log_name: str = "reduce_scatter_tensor",
                          debug: Any = None) -> Any:  # fmt: skip
    return dist.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def scatter(tensor: Tensor, scatter_list: Any = None, src: int = 0, group: Any = None, async_op: bool = False,
            prof: bool = False, log_name: str = "scatter", debug: Any = None) -> Any:  # fmt: skip
    return dist.scatter(tensor, scatter_list, src, group, async_op)


def send(tensor: Tensor, dst: int, group: Any = None, tag: int = 0, prof: bool = False, log_name: str = "send",
         debug: Any = None) -> Any:  # fmt: skip
    return dist.send(tensor, dst, group, tag)


def allgather_fn(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False,
                 debug: Any = None) -> Any:  # fmt: skip
    """`all_gather_into_tensor` by DeepSpeed's older name."""
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reduce_scatter_fn(output_tensor: Tensor, tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None,
                      async_op: bool = False, prof: bool = False, debug: Any = None) -> Any:  # fmt: skip
    """`reduce_scatter_tensor` by DeepSpeed's older name."""
    return dist.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return True


def has_coalescing_manager() -> bool:
    """False: several collectives are launched one after the other."""
    return False


def is_available() -> bool:
    """Whether torch has its collectives."""
    return dist.is_available()


def get_rank(group: Any = None) -> int:
    """This rank's number in the group; 0 before `init_distributed`."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """The number of ranks in the group; 1 before `init_distributed`."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_world_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The global ranks of a group, in its order."""
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def destroy_process_group(group: Any = None) -> None:
    """End a group, by default all: polyaccel's first."""
    if group is None:
        polyaccel.comm.destroy_process_group()
    if dist.is_initialized():
        dist.destroy_process_group(group)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Any:
    """Print what the engine's collectives took, if the config has `comms_logger`."""
    return polyaccel.comm.log_summary(show_straggler, return_dict)


def initialize_mesh_device(mesh_shape: Any, mesh_dim_names: Any) -> Any:
    """torch's mesh of the ranks."""
    kind = "cpu" if dist.get_backend() == "gloo" else dist.get_backend_config().partition(":")[0]
    return init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def get_world_rank_from_launcher() -> int:
    """RANK, or 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def get_world_size_from_launcher() -> int:
    """WORLD_SIZE, or 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def get_local_rank_from_launcher() -> int:
    """LOCAL_RANK, or 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def configure(deepspeed_config: Any = None, enabled: bool | None = None, prof_all: bool | None = None,
              prof_ops: Any = None, verbose: bool | None = None, debug: bool | None = None) -> None:  # fmt: skip
    """Nothing to do: the section `comms_logger` of the engine's config chooses what is recorded."""


default_pg_timeout = timedelta(minutes=30)
