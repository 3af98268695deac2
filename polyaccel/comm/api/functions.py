"""Collectives, messages and groups of ranks, as users of torch.distributed and deepspeed.comm expect them.

`all_reduce` and `all_gather_into_tensor` are the usual ones. Every rank of the group calls the same collectives in the
same order. Tensors are contiguous arrays of the accelerator's framework, or `Buffer`s. As in torch, ranks in arguments
are global, and on a rank outside of the group a call does nothing.

Every function raises ShardingError for tensors that do not fit (before any communication), CommTimeout if ranks do not
take part in time, and CommError for other failures.
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
    """Group that `new_group` returns on ranks outside of it. None would mean the default group."""


NON_MEMBER: Final = NonMember()
Group = Communicator | NonMember | None


def get_rank(group: Group = None) -> int:
    """Return this rank's number in the group: -1 outside of it, 0 before `init_distributed`.

    Args:
        group: Group to ask; None is the default group.

    Returns:
        Rank within the group, from 0.
    """
    if isinstance(group, NonMember):
        return -1
    return _communicator(group).rank if group is not None or is_initialized() else 0


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in the group: -1 outside of it, 1 before `init_distributed`.

    Args:
        group: Group to ask; None is the default group.

    Returns:
        Number of ranks.
    """
    if isinstance(group, NonMember):
        return -1
    return _communicator(group).world_size if group is not None or is_initialized() else 1


def get_local_rank() -> int:
    """Return this rank's number on its host as the launcher set it, or the global rank without a launcher."""
    return local_rank(default=get_rank())


def get_global_rank(group: Group, group_rank: int) -> int:
    """Return the global rank of a member of a group.

    Args:
        group: Group to ask; None is the default group.
        group_rank: Rank within the group.

    Returns:
        Global rank of that member.

    Raises:
        CommError: This rank is not in the group.
    """
    if isinstance(group, NonMember):
        raise CommError("this rank is not in the group", value=group_rank)
    return _communicator(group).ranks[group_rank]


def new_group(ranks: Sequence[int]) -> Communicator | NonMember:
    """Make a group of some ranks. Collective: all ranks of the default group call it, in the same order.

    Args:
        ranks: Global ranks of the members, in the order of their group ranks, equal on all ranks.

    Returns:
        Communicator of the group, which the caller closes by `destroy_process_group(group)`; `NON_MEMBER` on ranks
        outside of it.

    Raises:
        CommError: The ranks name different groups.
    """
    return default_communicator().split(ranks) or NON_MEMBER


def barrier(group: Group = None) -> None:
    """Wait until every rank of the group calls it.

    Args:
        group: Ranks that take part; None is the default group.
    """
    if not isinstance(group, NonMember):
        _communicator(group).barrier()


def all_reduce(tensor: Any, op: ReduceOp = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Work | None:
    """Combine `tensor` over all ranks, in place.

    Args:
        tensor: Input and result, of one size and dtype on all ranks.
        op: Reduction, elementwise. Sums of 16-bit floats are made in float32 and rounded once.
        group: Ranks that take part; None is the default group.
        async_op: Return at once. The tensors belong to the `Work` until its `wait` returns.

    Returns:
        The `Work` with `async_op`, otherwise None.
    """
    if isinstance(group, NonMember):
        return _none(async_op)
    comm = _communicator(group)
    return _result(comm.all_reduce(_buffer(comm, tensor), op, async_op=async_op), async_op)


def inference_all_reduce(tensor: Any, op: ReduceOp = ReduceOp.SUM, group: Group = None) -> None:
    """Combine `tensor` over all ranks, in place. DeepSpeed's name; the same as a synchronous `all_reduce`.

    Args:
        tensor: Input and result, of one size and dtype on all ranks.
        op: Reduction, elementwise. Sums of 16-bit floats are made in float32 and rounded once.
        group: Ranks that take part; None is the default group.
    """
    all_reduce(tensor, op, group)


def reduce_scatter_tensor(
    output: Any,
    input: Any,  # noqa: A002
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `input` over all ranks, and keep this rank's part. torch's name and arguments.

    Args:
        output: Receives part `rank` of the result: `input.numel() / world_size` elements. It may be the view of `input`
            at that part; the rest of `input` is then undefined.
        input: Whole tensor, of one size and dtype on all ranks.
        op: Reduction, elementwise. Sums of 16-bit floats are made in float32 and rounded once.
        group: Ranks that take part; None is the default group.
        async_op: Return at once. The tensors belong to the `Work` until its `wait` returns.

    Returns:
        The `Work` with `async_op`, otherwise None.
    """
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
    """Gather every rank's `input` into `output`, in rank order. torch's name and arguments.

    Args:
        output: Receives `world_size * input.numel()` elements, flat in rank order.
        input: This rank's part, of one size and dtype on all ranks. It may be the view of `output` at this rank's part.
        group: Ranks that take part; None is the default group.
        async_op: Return at once. The tensors belong to the `Work` until its `wait` returns.

    Returns:
        The `Work` with `async_op`, otherwise None.
    """
    if isinstance(group, NonMember):
        return _none(async_op)
    comm = _communicator(group)
    return _result(comm.all_gather(_buffer(comm, output), _buffer(comm, input), async_op=async_op), async_op)


def all_reduce_coalesced(
    tensors: Sequence[Any], op: ReduceOp = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Combine each of several tensors over all ranks, in place, by one collective for each dtype.

    Args:
        tensors: Inputs and results, of the same sizes and dtypes in the same order on all ranks.
        op: Reduction, elementwise. Sums of 16-bit floats are made in float32 and rounded once.
        group: Ranks that take part; None is the default group.
        async_op: Return at once. The tensors belong to the `Work` until its `wait` returns.

    Returns:
        The `Work` with `async_op`, otherwise None.
    """
    if isinstance(group, NonMember):
        return _none(async_op)
    comm = _communicator(group)
    buffers = [_buffer(comm, tensor) for tensor in tensors]
    return _result(coalescing.all_reduce_coalesced(comm, buffers, op, async_op=async_op), async_op)


def all_gather_coalesced(
    output_tensors: Sequence[Any], input_tensors: Sequence[Any], group: Group = None, async_op: bool = False
) -> Work | None:
    """Gather each of several tensors from all ranks, by one collective for each dtype.

    Args:
        output_tensors: One for each input, of `world_size` times its elements, flat in rank order.
        input_tensors: This rank's parts, of the same sizes and dtypes in the same order on all ranks.
        group: Ranks that take part; None is the default group.
        async_op: Return at once. The tensors belong to the `Work` until its `wait` returns.

    Returns:
        The `Work` with `async_op`, otherwise None.
    """
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
    """Combine each of several tensors over all ranks and keep this rank's parts, by one collective for each dtype.

    Args:
        output_tensors: One for each input, which receives part `rank` of its result: `1 / world_size` of its elements.
        input_tensors: Whole tensors, of the same sizes and dtypes in the same order on all ranks.
        op: Reduction, elementwise. Sums of 16-bit floats are made in float32 and rounded once.
        group: Ranks that take part; None is the default group.
        async_op: Return at once. The tensors belong to the `Work` until its `wait` returns.

    Returns:
        The `Work` with `async_op`, otherwise None.
    """
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
    """Send part j of `input` to rank j, and receive part i of `output` from rank i. torch's name and arguments.

    Args:
        output: Receives one part from each rank, in rank order. It does not overlap `input`.
        input: One part for each rank, in rank order.
        output_split_sizes: Rows (along the first dimension) of each part of `output`, one number for each rank. None
            makes equal parts.
        input_split_sizes: Rows of each part of `input`, equal to what the other rank expects. None makes equal parts.
        group: Ranks that take part; None is the default group.
        async_op: Return at once. The tensors belong to the `Work` until its `wait` returns.

    Returns:
        The `Work` with `async_op`, otherwise None.
    """
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
    """Copy every rank's `tensor` into `gather_list` on rank `dst`.

    Args:
        tensor: This rank's part, of one size and dtype on all ranks.
        gather_list: On `dst` one tensor for each rank, in rank order, of the size and dtype of `tensor`; None
            elsewhere.
        dst: Global rank that receives.
        group: Ranks that take part; None is the default group.
        async_op: Return at once. The tensors belong to the `Work` until its `wait` returns.

    Returns:
        The `Work` with `async_op`, otherwise None.

    Raises:
        ShardingError: On `dst`, `gather_list` does not have one fitting tensor for each rank.
        CommError: `dst` is not in the group.
    """
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
    """Copy each tensor of `scatter_list` on rank `src` into `tensor` on the rank that it is for.

    Args:
        tensor: Receives this rank's part, of one size and dtype on all ranks.
        scatter_list: On `src` one tensor for each rank, in rank order, of the size and dtype of `tensor`; None
            elsewhere.
        src: Global rank that sends.
        group: Ranks that take part; None is the default group.
        async_op: Return at once. The tensors belong to the `Work` until its `wait` returns.

    Returns:
        The `Work` with `async_op`, otherwise None.

    Raises:
        ShardingError: On `src`, `scatter_list` does not have one fitting tensor for each rank.
        CommError: `src` is not in the group.
    """
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
    """Overwrite `tensor` with the one of rank `src`.

    Args:
        tensor: Input on `src`, result elsewhere, of one size and dtype on all ranks.
        src: Global rank that sends.
        group: Ranks that take part; None is the default group.
        async_op: Return at once. The tensors belong to the `Work` until its `wait` returns.

    Returns:
        The `Work` with `async_op`, otherwise None.

    Raises:
        CommError: `src` is not in the group.
    """
    if isinstance(group, NonMember):
        return _none(async_op)
    comm = _communicator(group)
    return _result(comm.broadcast(_buffer(comm, tensor), _member(comm, src), async_op=async_op), async_op)


def send(tensor: Any, dst: int, group: Group = None) -> None:
    """Send `tensor` to rank `dst`, and return once it may be written again.

    Args:
        tensor: Contiguous array of the accelerator's framework, or a `Buffer`. Messages between two ranks keep their
            order.
        dst: Global rank that receives.
        group: Ranks among which the message is; None is the default group. A rank outside of it does nothing.

    Raises:
        CommError: `dst` is not in the group, or the message failed.
        CommTimeout: `dst` does not receive in time.
    """
    if not isinstance(group, NonMember):
        comm = _communicator(group)
        comm.send(_buffer(comm, tensor), _member(comm, dst))


def recv(tensor: Any, src: int, group: Group = None) -> int:
    """Fill `tensor` with the message of rank `src`.

    Args:
        tensor: Contiguous array of the accelerator's framework, or a `Buffer`, of the size and dtype that `src` sends.
        src: Global rank that sends. Unlike in torch it must be given.
        group: Ranks among which the message is; None is the default group. A rank outside of it does nothing.

    Returns:
        `src`, or -1 on a rank outside of the group.

    Raises:
        CommError: `src` is not in the group, or the message failed.
        CommTimeout: `src` does not send in time.
    """
    if isinstance(group, NonMember):
        return -1
    comm = _communicator(group)
    comm.recv(_buffer(comm, tensor), _member(comm, src))
    return src


def isend(tensor: Any, dst: int, group: Group = None) -> Work:
    """Start to send `tensor` to rank `dst`.

    Args:
        tensor: As in `send`. It belongs to the work until `wait` returns.
        dst: Global rank that receives.
        group: Ranks among which the message is; None is the default group. A rank outside of it does nothing.

    Returns:
        The message under way.

    Raises:
        CommError: `dst` is not in the group.
    """
    if isinstance(group, NonMember):
        return DONE
    comm = _communicator(group)
    return comm.send(_buffer(comm, tensor), _member(comm, dst), async_op=True)


def irecv(tensor: Any, src: int, group: Group = None) -> Work:
    """Start to receive a message of rank `src`.

    Args:
        tensor: As in `recv`. It belongs to the work until `wait` returns, and then holds the message.
        src: Global rank that sends.
        group: Ranks among which the message is; None is the default group. A rank outside of it does nothing.

    Returns:
        The message under way.

    Raises:
        CommError: `src` is not in the group.
    """
    if isinstance(group, NonMember):
        return DONE
    comm = _communicator(group)
    return comm.recv(_buffer(comm, tensor), _member(comm, src), async_op=True)


class P2POp:
    """One message of `batch_isend_irecv`. torch's name and arguments.

    Args:
        op: `polyaccel.comm.isend` or `polyaccel.comm.irecv`.
        tensor: Tensor to send or to fill.
        peer: Global rank at the other end.
        group: Ranks among which the message is; None is the default group.

    Raises:
        CommError: `op` is another function.
    """

    def __init__(self, op: Callable[..., Work], tensor: Any, peer: int, group: Group = None) -> None:
        if op not in (isend, irecv):
            raise CommError(
                f"{op!r} is not a message", hint="pass polyaccel.comm.isend or polyaccel.comm.irecv", value=op
            )
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = group


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Start all messages at once, so that no order of them can make ranks wait for each other in a circle.

    Args:
        p2p_op_list: Messages, at least one, all of one group. Their tensors belong to the works until `wait` returns.

    Returns:
        One work for all messages, in a list; an empty list on a rank outside of the group.

    Raises:
        CommError: There is no message, or messages of several groups, or a peer is not in the group.
    """
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
    """Fill `object_list` with every rank's `obj`, in rank order.

    Plain values need nothing: None, bool, int, float, str, bytes, and lists, tuples and dicts of these. Other objects
    are sent as pickles, for which all ranks need the same POLYACCEL_JOB_SECRET; `polyaccel run` sets it.

    Args:
        object_list: List with one element for each rank; every element is overwritten.
        obj: This rank's object.
        group: Ranks that take part; None is the default group.

    Raises:
        CommError: The list has another length, an object that is not plain has no secret, or a message is not signed by
            this job.
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
    """Overwrite the objects of `object_list` with those of rank `src`.

    Objects are plain, or pickled with the secret of the job, as in `all_gather_object`.

    Args:
        object_list: Objects on `src`; elsewhere a list whose contents are replaced.
        src: Global rank that sends.
        group: Ranks that take part; None is the default group.

    Raises:
        CommError: `src` is not in the group, an object that is not plain has no secret, or a message is not signed by
            this job.
    """
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
    if len(buffers) != comm.world_size or any(
        (buffer.numel, buffer.dtype) != (like.numel, like.dtype) for buffer in buffers
    ):
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
