"""Token dispatch and combine by all-to-all for expert parallelism.

[Note: Strided token dispatch]
Rows of tokens are ordered by expert where they are sent, and by own expert, then by rank, where they are computed.
Where ranks can read each other's memory (`supports_strided`), rows are gathered right into memory that the others see,
and each rank copies what is for it to where it belongs: one copy there, and one back. Elsewhere rows are put in order
before and after.

[Note: Expert gradient sums]
An expert gets the tokens of all ranks along the axis `expert`, so its gradient is the sum of theirs, and other ranks
along that axis have no part of it. The engine takes the mean over ranks that hold the same
([Note: Gradient means over ranks]), which would be the mean over fewer. So gradients are divided by the ranks along
`expert` when they set out to experts, and multiplied again when they set out from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyaccel.accelerators.memory.torch import dtype_of
from polyaccel.comm.arguments import StridedParts
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.torch.experts.routing import Routing

_LEAST_NBYTES = 128 << 10


class DispatchBuffers:
    """Memory of `communicator` from which rows are sent, kept from one plan to the next."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._rooms: dict[torch.dtype, Tensor] = {}
        self._counts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def rows(self, count: int, width: int, dtype: torch.dtype) -> Tensor:
        """(count, width) with anything in it: until the next call."""
        numel = count * width
        room = self._rooms.get(dtype)
        if room is None or room.numel() < numel:
            rounded = max(numel + numel // 8, _LEAST_NBYTES // dtype.itemsize)
            room = self._rooms[dtype] = self._communicator.allocate(rounded, dtype_of(dtype)).raw
        return room.as_strided((count, width), (width, 1))

    def counts(self, sent: int, received: int) -> tuple[Tensor, Tensor]:
        """Two int64 tensors on the host, of these lengths, with anything in them: until the next call."""
        if (sent, received) not in self._counts:
            self._counts[sent, received] = tuple(torch.empty(each, dtype=torch.int64) for each in (sent, received))  # type: ignore[assignment]
        return self._counts[sent, received]


class TokenDispatch(NamedTuple):
    """Where the pairs of a `Routing` go: rows of tokens, in the pairs' order, to the ranks that have their experts."""

    communicator: Communicator
    room: DispatchBuffers | None
    """None where rows are put in order here."""
    sent: tuple[int, ...]
    """How many rows go to each rank."""
    received: tuple[int, ...]
    """How many come from each."""
    longest: int | None
    """The most rows that some rank sends another one; None where the communicator has no use for it."""
    order: Tensor
    """What comes from rank after rank, ordered by own expert, then by rank. With a `room`, (ranks, own experts, 2),
    int64: in this order the first row of each part, and its rows. Else (rows,), int64: which of the rows that came.
    Empty on one rank, where rows stay where they are."""
    of_experts: Tensor
    """(own experts,), int64, on the device: the rows of each."""
    parts: tuple[tuple[int, ...], ...]
    """The rows of each own expert, by the rank that they come from."""
    tables: dict[int, Buffer]
    """By features of a row, the numbers of `order` in elements; as they are asked for."""

    def repeat_expert_indices(self) -> Tensor:
        """(rows,), int64: the own expert of each row that `dispatch` returns."""
        return torch.repeat_interleave(self.of_experts, output_size=sum(self.received))

    def dispatch(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        """Dispatch `tokens[numbers]`; return rows by own expert, then source rank. Collective."""
        if self.communicator.world_size == 1:
            return tokens.index_select(0, numbers)
        out: Tensor = _Dispatch.apply(tokens, numbers, self)  # type: ignore[no-untyped-call]
        return out

    def combine(self, rows: Tensor) -> Tensor:
        """Combine expert rows back to (pairs, features), the reverse of `dispatch`. Collective."""
        if self.communicator.world_size == 1:
            return rows
        out: Tensor = _Combine.apply(rows, self)  # type: ignore[no-untyped-call]
        return out


def plan_dispatch(
    communicator: Communicator, routing: Routing, experts: Sequence[int], room: DispatchBuffers | None = None
) -> TokenDispatch:
    """Exchange token counts and plan the dispatch; rank r has the next `experts[r]` experts. Collective."""
    rank, ranks = communicator.rank, communicator.world_size
    if ranks == 1:
        counts = tuple((int(one),) for one in routing.counts.tolist())
        rows = sum(map(sum, counts))
        empty = routing.tokens[:0]
        return TokenDispatch(communicator, None, (rows,), (rows,), None, empty, routing.counts, counts, {})
    ends = [0, *accumulate(experts)]
    own = experts[rank]
    sees_others = communicator.supports_strided and routing.counts.device.type == "cpu"
    bounds = int(communicator.coalesces_small_sends and not sees_others)
    room = (room or DispatchBuffers(communicator)) if sees_others else None
    if room is None:
        mine = _with_bounds(routing.counts, experts) if bounds else routing.counts.contiguous()
        their_counts = mine.new_empty(ranks * (own + bounds))
    else:
        mine, their_counts = room.counts(len(routing.counts), ranks * own)
        mine.copy_(routing.counts)
    wrap = communicator.accelerator.wrap
    communicator.all_to_all(
        wrap(their_counts),
        wrap(mine),
        counts=[own + bounds] * ranks,
        source_counts=[one + bounds for one in experts],
        max_send_numel=max(experts) + bounds,
        label="tokens of experts",
    )
    table = their_counts.view(ranks, own + bounds)[:, :own]
    # Both at once: a device is waited for once.
    numbers: list[int] = torch.cat((their_counts, routing.counts)).tolist()
    each, everywhere = own + bounds, numbers[ranks * (own + bounds) :]
    lines = [numbers[first : first + own] for first in range(0, ranks * each, each)] if each else [[]] * ranks
    return TokenDispatch(
        communicator,
        room,
        tuple(sum(everywhere[ends[other] : ends[other + 1]]) for other in range(ranks)),
        tuple(map(sum, lines)),
        max(numbers[own : ranks * each : each]) if bounds else None,
        _order(table, sum(map(sum, lines))) if room is None else _starts(table),
        table.sum(0),
        tuple(zip(*lines, strict=True)),
        {},
    )


def _with_bounds(counts: Tensor, experts: Sequence[int]) -> Tensor:
    """`counts`, and behind those for each rank the most rows that this one sends to any."""
    parts = torch.split(counts, list(experts))
    longest = torch.stack([part.sum() for part in parts]).max().view(1)
    return torch.cat([piece for part in parts for piece in (part, longest)])


def _order(table: Tensor, rows: int) -> Tensor:
    ranks, own = table.shape
    experts = torch.arange(own, device=table.device).repeat(ranks)
    of_rows = torch.repeat_interleave(experts, table.reshape(-1), output_size=rows)
    return torch.sort(of_rows, stable=True).indices


def _starts(table: Tensor) -> Tensor:
    ranks, own = table.shape
    by_expert = table.T.reshape(-1)
    starts = (torch.cumsum(by_expert, 0) - by_expert).view(own, ranks).T
    return torch.stack((starts, table), dim=2)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, numbers: Tensor, plan: TokenDispatch) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.plan, ctx.shape = plan, tokens.shape
        room = None if plan.room is None else plan.room.rows(len(numbers), tokens.shape[1], tokens.dtype)
        return _sent(torch.index_select(tokens, 0, numbers, out=room), plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (numbers,) = ctx.saved_tensors
        arrived = _returned(_scaled(gradient, float(ctx.plan.communicator.world_size), ctx.plan), ctx.plan)
        return arrived.new_zeros(ctx.shape).index_add_(0, numbers, arrived), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: TokenDispatch) -> Tensor:
        ctx.plan = plan
        if plan.room is not None:
            ours = plan.room.rows(len(rows), rows.shape[1], rows.dtype)
            rows = rows if rows.data_ptr() == ours.data_ptr() else ours.copy_(rows)
        return _returned(rows, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sent(_scaled(gradient, 1.0 / ctx.plan.communicator.world_size, ctx.plan), ctx.plan), None


def _scaled(gradient: Tensor, factor: float, plan: TokenDispatch) -> Tensor:
    """See [Note: Expert gradient sums]."""
    room = None if plan.room is None else plan.room.rows(len(gradient), gradient.shape[1], gradient.dtype)
    return torch.mul(gradient, factor, out=room)


def _sent(rows: Tensor, plan: TokenDispatch) -> Tensor:
    if plan.room is not None:
        return _moved(rows, plan, plan.sent, plan.received, returns=False)
    return _moved(rows, plan, plan.sent, plan.received, returns=False).index_select(0, plan.order)


def _returned(rows: Tensor, plan: TokenDispatch) -> Tensor:
    if plan.room is None:
        before = torch.empty_like(rows)
        rows = before.index_copy_(0, plan.order, rows)
    return _moved(rows, plan, plan.received, plan.sent, returns=True)


def _moved(rows: Tensor, plan: TokenDispatch, sent: Sequence[int], received: Sequence[int], *, returns: bool) -> Tensor:
    communicator, width = plan.communicator, rows.shape[1]
    rows = rows.contiguous()
    out = rows.new_empty(sum(received), width)
    wrap = communicator.accelerator.wrap
    pieces = None
    if plan.room is not None:
        if width not in plan.tables:
            plan.tables[width] = wrap((plan.order * width).view(-1))
        pieces = StridedParts(plan.tables[width], plan.order.shape[1], cuts_source=returns)
    communicator.all_to_all(
        wrap(out),
        wrap(rows),
        counts=[count * width for count in received],
        source_counts=[count * width for count in sent],
        pieces=pieces,
        max_send_numel=None if plan.longest is None else plan.longest * width,
        label="tokens to experts",
    )
    return out
