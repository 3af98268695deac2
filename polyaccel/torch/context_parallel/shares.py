"""Who has what of a sequence: the tokens of each rank, and the heads that it computes. Integers only.

Tokens are numbered by their place in the whole sequence, from 0. Ranks count inside the sequence group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from polyaccel.errors import ShardingError

Span = tuple[int, int]
"""First and last-but-one number: `start <= n < end`."""


def even_spans(count: int, parts: int) -> tuple[Span, ...]:
    """`count` things in `parts` consecutive spans, the first ones longer by one where it does not divide."""
    size, rest = divmod(count, parts)
    bounds = [part * size + min(part, rest) for part in range(parts + 1)]
    return tuple(pairwise(bounds))


@dataclass(frozen=True)
class TokenShares:
    """`spans[rank]` are the tokens of a rank, in the order in which they stand in its tensors."""

    spans: tuple[tuple[Span, ...], ...]

    @classmethod
    def contiguous(cls, length: int, ranks: int) -> TokenShares:
        """Equal consecutive parts; the first ones have one token more where `length` does not divide."""
        return cls(tuple((span,) for span in even_spans(length, ranks)))

    @classmethod
    def balanced(cls, length: int, ranks: int) -> TokenShares:
        """The sequence in twice as many parts as ranks, of which rank r has part r and the r-th from the end.

        Under a causal mask a token attends to those before it. The early and the late tokens of a rank together
        make its work that of any other rank ("zig-zag").
        """
        parts = even_spans(length, 2 * ranks)
        return cls(tuple((parts[rank], parts[2 * ranks - 1 - rank]) for rank in range(ranks)))

    @classmethod
    def of_lengths(cls, lengths: list[int] | tuple[int, ...]) -> TokenShares:
        """Consecutive parts of these lengths."""
        bounds = [sum(lengths[:rank]) for rank in range(len(lengths) + 1)]
        return cls(tuple((span,) for span in pairwise(bounds)))

    @property
    def ranks(self) -> int:
        return len(self.spans)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each rank has."""
        return tuple(sum(end - start for start, end in own) for own in self.spans)

    @cached_property
    def total(self) -> int:
        """The length of the whole sequence."""
        return sum(self.lengths)

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the ranks' tokens, side by side in rank order, are the sequence."""
        bounds = [bound for own in self.spans for span in own for bound in span]
        return all(end == start for end, start in zip(bounds[1:-1:2], bounds[2::2], strict=True))


@dataclass(frozen=True)
class HeadShares:
    """Which query heads, and which key/value heads those need, each rank computes."""

    query: tuple[Span, ...]
    key: tuple[Span, ...]
    """Spans of neighbours overlap where query heads that share a key head are computed by several ranks."""
    group: int
    """The query heads for one key head."""

    @classmethod
    def from_counts(cls, query_heads: int, key_heads: int, ranks: int) -> HeadShares:
        """Query heads as evenly as they divide, and the key heads that they attend to. Ranks beyond the number of heads
        have none. Raises ShardingError where query heads are not a multiple of the key heads."""
        if key_heads < 1 or query_heads % key_heads:
            raise ShardingError(
                f"{query_heads} query heads cannot share {key_heads} key heads equally",
                hint="give the same number of query heads to each key head",
                value=(query_heads, key_heads),
            )
        group = query_heads // key_heads
        query = even_spans(query_heads, ranks)
        key = tuple((start // group, -(-end // group) if end > start else start // group) for start, end in query)
        return cls(query, key, group)

    def key_of_query(self, rank: int) -> list[int] | None:
        """For each query head of `rank` the place of its key head among those of the rank. None where the rank's query
        heads share its key heads equally and in order, as attention with grouped queries expects."""
        start, end = self.query[rank]
        first, last = self.key[rank]
        count, keys = end - start, last - first
        places = [head // self.group - first for head in range(start, end)]
        if keys and count % keys == 0 and places == [place // (count // keys) for place in range(count)]:
            return None
        return places if keys else None
