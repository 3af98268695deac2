"""Which keys a query may attend to, and the rectangles of tokens in which attention is computed.

A token sees another one of its own segment (a packed document, or the whole sequence) that is a key (not padding), is
not later where the attention is causal, and is not farther back than the window where there is one.

[Note: Mask pieces]
The sequence is cut wherever its segments or its padding change, and where tokens of a rank begin. Then any two parts
see each other wholly, not at all, or, a part and itself, causally; so no mask is ever made, and what sees nothing is
not computed: a packed sequence costs what its documents cost. Masks remain in two cases, in squares of at most
`TILE` tokens: at the edge of a window, and where parts would be so short that their number would cost more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor

from polyaccel.errors import ShardingError
from polyaccel.torch.context_parallel.shares import Span
from polyaccel.torch.graph_breaks import outside_graphs
from polyaccel.torch.host_values import host_values

TILE = 512
"""The longest side, in tokens, of a rectangle that has a mask."""
SHORTEST_MEAN = 16
"""Parts that are shorter on average are not computed one by one."""


class MaskKind(Enum):
    """Mask type of an attention block: full, causal or windowed."""

    WHOLE = "whole"
    """Each query sees each key."""
    CAUSAL = "causal"
    """Queries and keys are the same tokens, and see themselves and what is before them."""
    MASKED = "masked"
    """A mask decides it."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What the model's attention allows: causal or not, and a window (that many last tokens, the own one included)."""

    causal: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not self.causal:
            raise ShardingError(
                "a window of attention that is not causal is not cut over ranks",
                hint='compute it whole: Ulysses with the attention "sdpa" or "eager"',
                value=self.window,
            )


@dataclass(frozen=True, slots=True)
class AttentionPiece:
    """Queries [q0, q1) and keys [k0, k1), by their places in the rank's tensors."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: MaskKind
    mask: Tensor | None = None
    """(queries, keys), True where a query sees a key."""


@dataclass(frozen=True)
class RowMarks:
    """The marks of one row of a batch, or of all rows if equal: a segment for each token, and whether it is a key."""

    segments: Tensor
    is_key: Tensor
    cuts: tuple[int, ...] = field(init=False)
    """Where segments or padding change, the ends included."""

    def __post_init__(self) -> None:
        changes = (torch.diff(self.segments) != 0) | (torch.diff(self.is_key.to(torch.int8)) != 0)
        inner = (changes.nonzero().flatten() + 1).tolist()
        object.__setattr__(self, "cuts", (0, *inner, len(self.segments)))


class DocumentMask:
    """The marks of a batch's tokens, on the host: what every rank has of the whole sequence.

    `segments` (rows, length) numbers the documents of packed rows; None where each row is one. `is_key` (rows, length)
    is False at padding; None where there is none. `rows` is 1 where all rows are the same.
    """

    @outside_graphs
    @host_values()
    def __init__(self, length: int, segments: Tensor | None = None, is_key: Tensor | None = None) -> None:
        self.length = length
        plain = torch.zeros(1, length, dtype=torch.int64), torch.ones(1, length, dtype=torch.bool)
        of_tokens = plain[0] if segments is None else segments.detach().to("cpu", torch.int64)
        keys = plain[1] if is_key is None else is_key.detach().to("cpu", torch.bool)
        for given, name in ((of_tokens, "segments"), (keys, "is_key")):
            if given.dim() != 2 or given.shape[1] != length:
                raise ShardingError(
                    f"{name} of shape {tuple(given.shape)} for a sequence of {length} tokens",
                    hint=f"give (rows, {length})",
                    value=tuple(given.shape),
                )
        rows = max(len(of_tokens), len(keys))
        of_tokens, keys = of_tokens.expand(rows, -1), keys.expand(rows, -1)
        self.is_plain = segments is None and bool(keys.all())
        are_equal = rows > 1 and bool((of_tokens == of_tokens[0]).all()) and bool((keys == keys[0]).all())
        self.rows = [RowMarks(of_tokens[row], keys[row]) for row in range(1 if are_equal else rows)]

    @classmethod
    def of_positions(cls, positions: Tensor, is_key: Tensor | None = None) -> DocumentMask:
        """Marks of `positions` (rows, length): a document begins wherever they do not continue by one."""
        return cls(positions.shape[-1], segments_of_positions(positions), is_key)

    @classmethod
    def of_boundaries(cls, boundaries: Sequence[int] | Tensor) -> DocumentMask:
        """Marks of one row by the cumulated lengths of its documents, `[0, ..., length]` (cu_seqlens)."""
        bounds = [int(bound) for bound in boundaries]
        if len(bounds) < 2 or bounds[0] != 0 or any(end <= start for start, end in pairwise(bounds)):
            raise ShardingError(
                f"{bounds} are not cumulated lengths", hint="begin with 0 and let each be larger", value=bounds
            )
        lengths = torch.tensor(bounds).diff()
        return cls(bounds[-1], torch.arange(len(lengths)).repeat_interleave(lengths)[None])


def segments_of_positions(positions: Tensor) -> Tensor | None:
    """The number of each token's document, counted from 0 in its row, (rows, length); None where each row is one."""
    began = torch.diff(positions, dim=-1) != 1
    if not bool(began.any()):
        return None
    return torch.nn.functional.pad(began.to(torch.int64).cumsum(-1), (1, 0))


@outside_graphs
@host_values()
def pieces(
    row: RowMarks, rule: AttentionRule, queries: Sequence[Span], keys: Sequence[Span], longest: int | None = None
) -> list[AttentionPiece]:
    """The pieces in which tokens `queries` attend to tokens `keys`, both in the order of their tensors, of one row.

    See [Note: Mask pieces]. `longest` bounds the sides of all pieces, where what computes them needs memory for each
    pair.
    """
    bounds = {bound for span in (*queries, *keys) for bound in span} | set(row.cuts)
    tile = longest
    if rule.window is not None or len(row.segments) < SHORTEST_MEAN * (len(row.cuts) - 1):
        if rule.window is None:
            bounds = {bound for span in (*queries, *keys) for bound in span}
        tile = min(TILE, longest or TILE)
    if tile is not None:
        bounds |= set(range(0, len(row.segments), tile))
    cuts = sorted(bounds)
    theirs = _parts(row, keys, cuts)
    found: list[AttentionPiece] = []
    for query in _parts(row, queries, cuts):
        begun: AttentionPiece | None = None
        for key in theirs:
            made = _piece(row, rule, query, key)
            if made is None:
                continue
            if (
                begun is not None
                and begun.kind is made.kind is MaskKind.WHOLE
                and begun.k1 == made.k0
                and longest is None
            ):
                begun = found[-1] = AttentionPiece(begun.q0, begun.q1, begun.k0, made.k1, MaskKind.WHOLE)
            else:
                found.append(made)
                begun = made
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive tokens [start, end) of the sequence, their place in a rank's tensor, and what their marks are."""

    start: int
    end: int
    place: int
    lowest: int
    highest: int
    """The least and the greatest number of their segments."""
    has_keys: bool
    all_keys: bool


def _parts(row: RowMarks, spans: Sequence[Span], cuts: Sequence[int]) -> list[_Part]:
    """`spans`, cut at `cuts`, in the order of a tensor that has them side by side."""
    found, place = [], 0
    for first, last in spans:
        inner = [first, *(cut for cut in cuts if first < cut < last), last]
        for start, end in pairwise(inner):
            if end > start:
                segments, is_key = row.segments[start:end], row.is_key[start:end]
                lowest, highest = (int(one) for one in segments.aminmax())
                found.append(_Part(start, end, place, lowest, highest, bool(is_key.any()), bool(is_key.all())))
                place += end - start
    return found


def _piece(row: RowMarks, rule: AttentionRule, q: _Part, k: _Part) -> AttentionPiece | None:
    """The piece of two parts of the sequence; None where no query of the one sees a key of the other."""
    if not k.has_keys or q.highest < k.lowest or k.highest < q.lowest or (rule.causal and k.start > q.end - 1):
        return None
    if rule.window is not None and q.start - (k.end - 1) >= rule.window:
        return None
    ends = q.place, q.place + q.end - q.start, k.place, k.place + k.end - k.start
    is_near = rule.window is None or q.end - 1 - k.start < rule.window
    if is_near and k.all_keys and q.lowest == q.highest == k.lowest == k.highest:
        if not rule.causal or k.end <= q.start:
            return AttentionPiece(*ends, MaskKind.WHOLE)
        if (q.start, q.end) == (k.start, k.end):
            return AttentionPiece(*ends, MaskKind.CAUSAL)
    of_queries, of_keys = row.segments[q.start : q.end], row.segments[k.start : k.end]
    mask = (of_queries[:, None] == of_keys) & row.is_key[k.start : k.end]
    if rule.causal:
        distance = torch.arange(q.start, q.end)[:, None] - torch.arange(k.start, k.end)
        mask &= distance >= 0
        if rule.window is not None:
            mask &= distance < rule.window
    if not bool(mask.any()):
        return None
    return AttentionPiece(*ends, MaskKind.WHOLE) if bool(mask.all()) else AttentionPiece(*ends, MaskKind.MASKED, mask)
