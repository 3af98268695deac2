"""The functions that users of torch.distributed and deepspeed.comm expect, over the default group or a given one.

They take arrays of the accelerator's framework (contiguous) or `Buffer`s. As in torch, ranks in arguments are global,
`async_op=True` returns a `Work` and otherwise nothing is returned, and on a rank outside a group calls do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

from polyaccel.comm.api import coalescing, objects
from polyaccel.comm.base import Communicator, message_from, message_to
from polyaccel.comm.default import default_communicator, is_initialized
from polyaccel.comm.discovery import local_rank
from polyaccel.comm.work import DONE, CombinedWork, Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import ReduceOp
from polyaccel.errors import CommError, ShardingError


class NonMember:
    """The group that `new_group` returns on ranks outside of it. (Not None: that means the default group.)"""


NON_MEMBER: Final = NonMember()
Group = Communicator | NonMember | None


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
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """`Communicator.all_to_all`; names and arguments are torch's. Split sizes count along the first dim, one a rank;
    without them parts are equal."""
    if isinstance(group, NonMember):
        return _none(async_op)
    comm = _communicator(group)
    counts, source_counts = _counts(output, output_split_sizes), _counts(input, input_split_sizes)
    if counts is None and source_counts is not None:
        counts = _equal_counts(comm, output)
    elif source_counts is None and counts is not None:
        source_counts = _equal_counts(comm, input)
    out, source = _buffer(comm, output), _buffer(comm, input)
    work = comm.all_to_all(out, source, counts=counts, source_counts=source_counts, async_op=async_op)
    return _result(work, async_op)


def gather(
    tensor: Any, gather_list: Sequence[Any] | None = None, dst: int = 0, group: Group = None, async_op: bool = False
) -> Work | None:
    """Put every rank's `tensor`, all of one size, into the tensors of `gather_list` on global rank `dst`, in rank
    order; None elsewhere."""
    if isinstance(group, NonMember):
        return _none(async_op)
    comm, root = _communicator(group), _member(_communicator(group), dst)
    source = _buffer(comm, tensor)
    if comm.rank != root:
        return _result(comm.gather(None, source, root, async_op=async_op), async_op)
    outs = _one_a_rank("gather", comm, gather_list, source)
    whole = comm.allocate(source.numel * comm.world_size, source.dtype)
    work = comm.gather(whole, source, root, async_op=async_op)

    def unpack() -> None:
        for rank, out in enumerate(outs):
            out.copy_from(whole.view(rank * source.numel, source.numel))

    return _finished(work, unpack, async_op)


def scatter(
    tensor: Any, scatter_list: Sequence[Any] | None = None, src: int = 0, group: Group = None, async_op: bool = False
) -> Work | None:
    """Overwrite `tensor` with this rank's of `scatter_list` on global rank `src`, whose tensors are all of one size;
    None elsewhere."""
    if isinstance(group, NonMember):
        return _none(async_op)
    comm, root = _communicator(group), _member(_communicator(group), src)
    out = _buffer(comm, tensor)
    if comm.rank != root:
        return _result(comm.scatter(out, None, root, async_op=async_op), async_op)
    whole = comm.allocate(out.numel * comm.world_size, out.dtype)
    for rank, source in enumerate(_one_a_rank("scatter", comm, scatter_list, out)):
        whole.view(rank * out.numel, out.numel).copy_from(source)
    return _result(comm.scatter(out, whole, root, async_op=async_op), async_op)


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
        return DONE
    comm = _communicator(group)
    return comm.send(_buffer(comm, tensor), _member(comm, dst), async_op=True)


def irecv(tensor: Any, src: int, group: Group = None) -> Work:
    """`recv` that returns at once; the tensor is there after `wait`."""
    if isinstance(group, NonMember):
        return DONE
    comm = _communicator(group)
    return comm.recv(_buffer(comm, tensor), _member(comm, src), async_op=True)


class P2POp:
    """A message for `batch_isend_irecv`: `op` is `isend` or `irecv`, `peer` a global rank. Arguments as in torch."""

    def __init__(self, op: Callable[..., Work], tensor: Any, peer: int, group: Group = None) -> None:
        if op not in (isend, irecv):
            raise CommError(f"{op!r} is no message", hint="pass polyaccel.comm.isend or polyaccel.comm.irecv", value=op)
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = group


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Start all messages at once; the tensors are the works' until `wait`. All messages are of one group."""
    groups = {id(message.group): message.group for message in p2p_op_list}
    if len(groups) != 1:
        raise CommError(
            f"a batch of {len(p2p_op_list)} messages in {len(groups)} groups",
            hint="pass at least one message, and those of each group apart",
            value=len(groups),
        )
    (group,) = groups.values()
    if isinstance(group, NonMember):
        return []
    comm = _communicator(group)
    messages = []
    for one in p2p_op_list:
        make = message_to if one.op is isend else message_from
        messages.append(make(_buffer(comm, one.tensor), _member(comm, one.peer)))
    return [comm.batch(messages, async_op=True)]


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Fill `object_list`, which has an element for every rank, with every rank's `obj`.

    Plain values (None, bool, int, float, str, bytes, and lists, tuples and dicts of these) need nothing; other objects
    travel as pickles, for which all ranks need the same POLYACCEL_JOB_SECRET, as `polyaccel run` gives it to them.
    """
    if isinstance(group, NonMember):
        return
    comm = _communicator(group)
    if len(object_list) != comm.world_size:
        raise CommError(
            f"all_gather_object into a list of {len(object_list)} on {comm.world_size} ranks",
            hint="pass a list with one element for every rank",
            value=len(object_list),
        )
    object_list[:] = objects.all_gather_objects(comm, obj)


def broadcast_object_list(object_list: list[Any], src: int = 0, group: Group = None) -> None:
    """Overwrite `object_list` with global rank `src`'s. What `all_gather_object` says of objects holds here too."""
    if not isinstance(group, NonMember):
        comm = _communicator(group)
        object_list[:] = objects.broadcast_objects(comm, list(object_list), _member(comm, src))


def _communicator(group: Communicator | None) -> Communicator:
    return default_communicator() if group is None else group


def _buffer(comm: Communicator, array: Any) -> Buffer:
    return array if isinstance(array, Buffer) else comm.accelerator.wrap(array)


def _member(comm: Communicator, rank: int) -> int:
    if rank not in comm.ranks:
        raise CommError(f"global rank {rank} is not in the group of ranks {list(comm.ranks)}", value=rank)
    return comm.ranks.index(rank)


def _counts(array: Any, sizes: Sequence[int] | None) -> list[int] | None:
    """Split sizes along the first dim of `array`, in elements."""
    if not sizes:
        return None
    row = 1 if isinstance(array, Buffer) else prod(array.shape[1:])
    return [size * row for size in sizes]


def _equal_counts(comm: Communicator, array: Any) -> list[int]:
    numel = _buffer(comm, array).numel
    return [numel // comm.world_size] * comm.world_size


def _one_a_rank(kind: str, comm: Communicator, arrays: Sequence[Any] | None, like: Buffer) -> list[Buffer]:
    """The buffers of a list with one array of `like`'s size and type for each rank."""
    buffers = [_buffer(comm, array) for array in arrays or ()]
    if len(buffers) != comm.world_size or any((one.numel, one.dtype) != (like.numel, like.dtype) for one in buffers):
        raise ShardingError(
            f"{kind}: {len(buffers)} tensors are not one of {like.numel} x {like.dtype.value} for each of "
            f"{comm.world_size} ranks",
            hint="pass a list with one tensor for every rank, all of this rank's size and type",
            value=len(buffers),
        )
    return buffers


def _finished(work: Work, finish: Callable[[], None], async_op: bool) -> Work | None:
    """`work`, and `finish` behind it."""
    whole = CombinedWork([work], finish)
    if async_op:
        return whole
    whole.wait()
    return None


def _result(work: Work, async_op: bool) -> Work | None:
    return work if async_op else None


def _none(async_op: bool) -> Work | None:
    return DONE if async_op else None
