"""The functions that users of torch.distributed and deepspeed.comm expect, over the default group or a given one.

They take arrays of the accelerator's framework (contiguous) or `Buffer`s. As in torch, ranks in arguments are global,
`async_op=True` returns a `Work` and otherwise nothing is returned, and on a rank outside a group calls do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from polyaccel.buffer import Buffer
from polyaccel.comm import coalescing
from polyaccel.comm.base import Communicator, DoneWork, Work
from polyaccel.comm.default import default_communicator, is_initialized
from polyaccel.comm.discovery import local_rank
from polyaccel.errors import CommError
from polyaccel.types import ReduceOp


class NonMember:
    """What `new_group` gives ranks outside the group. (Not None: that means the default group.)"""


NON_MEMBER: Final = NonMember()
Group = Communicator | NonMember | None
_DONE = DoneWork()


def get_rank(group: Group = None) -> int:
    """This rank's number in the group: -1 outside of it, 0 before `init_distributed`."""
    if isinstance(group, NonMember):
        return -1
    return _communicator(group).rank if group is not None or is_initialized() else 0


def get_world_size(group: Group = None) -> int:
    """The number of ranks in the group: -1 outside of it, 1 before `init_distributed`."""
    if isinstance(group, NonMember):
        return -1
    return _communicator(group).world_size if group is not None or is_initialized() else 1


def get_local_rank() -> int:
    """This rank's number on its host, as the launcher said; the rank where no launcher said anything."""
    return local_rank(default=get_rank())


def get_global_rank(group: Group, group_rank: int) -> int:
    """The global rank of member `group_rank`. Raises CommError outside the group."""
    if isinstance(group, NonMember):
        raise CommError("this rank is not in the group", value=group_rank)
    return _communicator(group).ranks[group_rank]


def new_group(ranks: Sequence[int]) -> Communicator | NonMember:
    """A group of these global ranks. All ranks of the default group call it, in the same order."""
    return default_communicator().split(ranks) or NON_MEMBER


def barrier(group: Group = None) -> None:
    """Wait until every rank of the group is here."""
    if not isinstance(group, NonMember):
        _communicator(group).barrier()


def all_reduce(tensor: Any, op: ReduceOp = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Work | None:
    """`Communicator.all_reduce`."""
    if isinstance(group, NonMember):
        return _none(async_op)
    comm = _communicator(group)
    return _result(comm.all_reduce(_buffer(comm, tensor), op, async_op=async_op), async_op)


def inference_all_reduce(tensor: Any, op: ReduceOp = ReduceOp.SUM, group: Group = None) -> None:
    """`all_reduce`, by the name that DeepSpeed has for what a forward pass waits for. It is the same one here."""
    all_reduce(tensor, op, group)


def reduce_scatter_tensor(
    output: Any,
    input: Any,  # noqa: A002
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """`Communicator.reduce_scatter`; the names are torch's."""
    if isinstance(group, NonMember):
        return _none(async_op)
    comm = _communicator(group)
    return _result(comm.reduce_scatter(_buffer(comm, output), _buffer(comm, input), op, async_op=async_op), async_op)


def all_gather_into_tensor(
    output: Any,
    input: Any,  # noqa: A002
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """`Communicator.all_gather`; the names are torch's."""
    if isinstance(group, NonMember):
        return _none(async_op)
    comm = _communicator(group)
    return _result(comm.all_gather(_buffer(comm, output), _buffer(comm, input), async_op=async_op), async_op)


def all_reduce_coalesced(
    tensors: Sequence[Any], op: ReduceOp = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """`all_reduce` of each tensor, as one collective for each element type."""
    if isinstance(group, NonMember):
        return _none(async_op)
    comm = _communicator(group)
    buffers = [_buffer(comm, tensor) for tensor in tensors]
    return _result(coalescing.all_reduce_coalesced(comm, buffers, op, async_op=async_op), async_op)


def all_gather_coalesced(
    output_tensors: Sequence[Any], input_tensors: Sequence[Any], group: Group = None, async_op: bool = False
) -> Work | None:
    """`all_gather_into_tensor` of each pair, as one collective for each element type."""
    if isinstance(group, NonMember):
        return _none(async_op)
    comm = _communicator(group)
    outs, sources = ([_buffer(comm, tensor) for tensor in given] for given in (output_tensors, input_tensors))
    return _result(coalescing.all_gather_coalesced(comm, outs, sources, async_op=async_op), async_op)


def reduce_scatter_coalesced(
    output_tensors: Sequence[Any],
    input_tensors: Sequence[Any],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """`reduce_scatter_tensor` of each pair, as one collective for each element type."""
    if isinstance(group, NonMember):
        return _none(async_op)
    comm = _communicator(group)
    outs, sources = ([_buffer(comm, tensor) for tensor in given] for given in (output_tensors, input_tensors))
    return _result(coalescing.reduce_scatter_coalesced(comm, outs, sources, op, async_op=async_op), async_op)


def all_to_all_single(
    output: Any,
    input: Any,  # noqa: A002
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """`Communicator.all_to_all`, equal parts; the names are torch's."""
    if isinstance(group, NonMember):
        return _none(async_op)
    comm = _communicator(group)
    return _result(comm.all_to_all(_buffer(comm, output), _buffer(comm, input), async_op=async_op), async_op)


def broadcast(tensor: Any, src: int, group: Group = None, async_op: bool = False) -> Work | None:
    """`Communicator.broadcast` from global rank `src`."""
    if isinstance(group, NonMember):
        return _none(async_op)
    comm = _communicator(group)
    return _result(comm.broadcast(_buffer(comm, tensor), _member(comm, src), async_op=async_op), async_op)


def send(tensor: Any, dst: int, group: Group = None) -> None:
    """Send to global rank `dst`; returns once the tensor may be written again."""
    if not isinstance(group, NonMember):
        comm = _communicator(group)
        comm.send(_buffer(comm, tensor), _member(comm, dst))


def recv(tensor: Any, src: int, group: Group = None) -> int:
    """Receive from global rank `src`; returns it (-1 outside the group)."""
    if isinstance(group, NonMember):
        return -1
    comm = _communicator(group)
    comm.recv(_buffer(comm, tensor), _member(comm, src))
    return src


def isend(tensor: Any, dst: int, group: Group = None) -> Work:
    """`send` that returns at once; leave the tensor alone until `wait`."""
    if isinstance(group, NonMember):
        return _DONE
    comm = _communicator(group)
    return comm.send(_buffer(comm, tensor), _member(comm, dst), async_op=True)


def irecv(tensor: Any, src: int, group: Group = None) -> Work:
    """`recv` that returns at once; the tensor is there after `wait`."""
    if isinstance(group, NonMember):
        return _DONE
    comm = _communicator(group)
    return comm.recv(_buffer(comm, tensor), _member(comm, src), async_op=True)


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Fill `object_list`, which has an element for every rank, with every rank's `obj`."""
    if isinstance(group, NonMember):
        return
    comm = _communicator(group)
    if len(object_list) != comm.world_size:
        raise CommError(
            f"all_gather_object into a list of {len(object_list)} on {comm.world_size} ranks",
            cure="pass a list with one element for every rank",
            value=len(object_list),
        )
    object_list[:] = comm.all_gather_object(obj)


def broadcast_object_list(object_list: list[Any], src: int = 0, group: Group = None) -> None:
    """Overwrite `object_list` with global rank `src`'s."""
    if not isinstance(group, NonMember):
        comm = _communicator(group)
        object_list[:] = comm.broadcast_object(object_list, _member(comm, src))


def _communicator(group: Communicator | None) -> Communicator:
    return default_communicator() if group is None else group


def _buffer(comm: Communicator, array: Any) -> Buffer:
    return array if isinstance(array, Buffer) else comm.accelerator.wrap(array)


def _member(comm: Communicator, rank: int) -> int:
    if rank not in comm.ranks:
        raise CommError(f"global rank {rank} is not in the group of ranks {list(comm.ranks)}", value=rank)
    return comm.ranks.index(rank)


def _result(work: Work, async_op: bool) -> Work | None:
    return work if async_op else None


def _none(async_op: bool) -> Work | None:
    return _DONE if async_op else None
