"""Tokens travel to the ranks of their experts, and what was computed of them travels back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyaccel.comm.base import Communicator
from polyaccel.torch.experts.routing import Routing


class Journey(NamedTuple):
    """Where the pairs of a `Routing` go: rows of tokens, in the pairs' order, to the ranks that have their experts."""

    communicator: Communicator
    sent: tuple[int, ...]
    """How many rows go to each rank."""
    received: tuple[int, ...]
    """How many come from each."""
    order: Tensor
    """(rows,), int64: of the rows that came, ordered by rank, those of the first own expert, then of the second, ...
    Empty on one rank, where rows stay where they are."""
    parts: tuple[tuple[int, ...], ...]
    """The rows of each own expert, by the rank that they come from."""

    @property
    def counts(self) -> tuple[int, ...]:
        """The rows of each own expert."""
        return tuple(map(sum, self.parts))

    def there(self, rows: Tensor) -> Tensor:
        """(rows of own experts, features), ordered by expert, then by the rank that they come from, for `rows` (pairs,
        features). Collective, in backward too."""
        if self.communicator.world_size == 1:
            return rows
        out: Tensor = _Move.apply(rows, self.communicator, self.sent, self.received)  # type: ignore[no-untyped-call]
        return out.index_select(0, self.order)

    def back(self, rows: Tensor) -> Tensor:
        """The reverse of `there`. Collective, in backward too."""
        if self.communicator.world_size == 1:
            return rows
        came = torch.empty_like(self.order)
        came[self.order] = torch.arange(len(self.order), device=self.order.device)
        out: Tensor = _Move.apply(  # type: ignore[no-untyped-call]
            rows.index_select(0, came), self.communicator, self.received, self.sent
        )
        return out


def plan_journey(communicator: Communicator, routing: Routing, experts: Sequence[int]) -> Journey:
    """Tell the other ranks how many rows come; rank r has the next `experts[r]` experts. Collective."""
    rank, ranks = communicator.rank, communicator.world_size
    if ranks == 1:
        rows = len(routing.tokens)
        return Journey(
            communicator, (rows,), (rows,), routing.tokens[:0], tuple((int(one),) for one in routing.counts.tolist())
        )
    ends = [0, *accumulate(experts)]
    own = experts[rank]
    counts = routing.counts.contiguous()
    told = counts.new_empty(ranks * own)
    wrap = communicator.accelerator.wrap
    communicator.all_to_all(
        wrap(told), wrap(counts), counts=[own] * ranks, source_counts=list(experts), label="tokens of experts"
    )
    table = told.view(ranks, own)
    lines = [[int(one) for one in line] for line in table.tolist()] if own else [[] for _ in range(ranks)]
    everywhere = [int(one) for one in counts.tolist()]
    starts = [0, *accumulate(sum(line) for line in lines)]
    parts = []
    for expert in range(own):
        for source in range(ranks):
            begin = starts[source] + sum(lines[source][:expert])
            parts.append(torch.arange(begin, begin + lines[source][expert]))
    order = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    return Journey(
        communicator,
        tuple(sum(everywhere[ends[other] : ends[other + 1]]) for other in range(ranks)),
        tuple(map(sum, lines)),
        order.to(counts.device),
        tuple(tuple(line[expert] for line in lines) for expert in range(own)),
    )


class _Move(torch.autograd.Function):
    """Rows to other ranks, in order: the next `sent[r]` to rank r."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, communicator: Communicator, sent: tuple[int, ...], received: tuple[int, ...]
    ) -> Tensor:
        ctx.way = communicator, received, sent
        return _moved(rows, communicator, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        communicator, sent, received = ctx.way
        return _moved(gradient, communicator, sent, received), None, None, None


def _moved(rows: Tensor, communicator: Communicator, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    width = rows.shape[1]
    rows = rows.contiguous()
    out = rows.new_empty(sum(received), width)
    wrap = communicator.accelerator.wrap
    communicator.all_to_all(
        wrap(out.view(-1)),
        wrap(rows.view(-1)),
        counts=[count * width for count in received],
        source_counts=[count * width for count in sent],
        label="tokens to experts",
    )
    return out
