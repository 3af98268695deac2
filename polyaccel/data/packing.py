"""Documents packed into rows of one length, without attention or loss across their borders.

A row marks its documents by positions that begin again at 0. Transformers reads them as separate documents, and so do
sequence ranks. A document's first label is ignored, since the token before it belongs to another document.
Best fit in the order of decreasing lengths is that of Ding et al. 2024 (arXiv 2404.10830).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyaccel.errors import PolyaccelError

Order = Literal["best_fit", "sequential"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `stop` of document `document`."""

    document: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def pack(lengths: ArrayLike, capacity: int, order: Order = "best_fit") -> list[list[Piece]]:
    """Assign documents to rows of at most `capacity` tokens.

    A document that is longer than a row is cut into pieces, which count as documents. Empty ones are left out.

    Args:
        lengths: Tokens of each document, (documents,).
        capacity: Tokens of a row.
        order: "best_fit" puts each document, the longest first, into the fullest row that has room. "sequential" keeps
            the order, and begins a new row where a document does not fit.

    Returns:
        The pieces of each row.

    Raises:
        PolyaccelError: `capacity` or a length is out of range, or the order is unknown.
    """
    sizes = np.asarray(lengths)
    if capacity < 1 or sizes.ndim != 1 or (sizes.size and (sizes.dtype.kind not in "iu" or sizes.min() < 0)):
        raise PolyaccelError(
            f"lengths of shape {sizes.shape} cannot be packed into rows of {capacity}",
            hint="give a list of lengths, which are integers from 0, and a capacity of at least 1",
            value=capacity,
        )
    if order not in ("best_fit", "sequential"):
        raise PolyaccelError(
            f"unknown order of packing: {order}", hint='choose "best_fit" or "sequential"', value=order
        )
    pieces = [
        Piece(number, start, min(int(size), start + capacity))
        for number, size in enumerate(sizes)
        for start in range(0, int(size), capacity)
    ]
    return _sequential(pieces, capacity) if order == "sequential" else _best_fit(pieces, capacity)


def _sequential(pieces: list[Piece], capacity: int) -> list[list[Piece]]:
    rows: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if len(piece) > room:
            rows.append([])
            room = capacity
        rows[-1].append(piece)
        room -= len(piece)
    return rows


def _best_fit(pieces: list[Piece], capacity: int) -> list[list[Piece]]:
    rows: list[list[Piece]] = []
    rooms: list[int] = []  # sorted, those that a row has
    with_room: dict[int, list[int]] = {}
    for piece in sorted(pieces, key=lambda one: (-len(one), one.document, one.start)):
        at = bisect_left(rooms, len(piece))
        if at == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows[row].append(piece)
        if left := room - len(piece):
            if left not in with_room:
                insort(rooms, left)
                with_room[left] = []
            with_room[left].append(row)
    return rows


class PackedDataset:
    """Map-style dataset of packed rows.

    An item has these arrays of int64, (capacity,): `input_ids`, `labels` for models that shift them as transformers
    does, and `position_ids`. Padding at the end is a document without labels. torch's DataLoader stacks items. Rows
    without any label, of single tokens, are left out: their mean loss would not be a number.

    Args:
        documents: Token sequences by number, such as an `IndexedDataset`.
        capacity: Tokens of a row.
        lengths: Tokens of each document; None takes `documents.sizes`, or reads them all once.
        pad_id: Token of the padding.
        ignore_index: Label without loss.
        order: "best_fit" or "sequential", see `pack`.
        masks: Give `attention_mask` too, (1, capacity, capacity), for models that do not read position_ids as borders.
            True gives bool, True where a token is seen. "additive" gives float32, 0 there and -inf elsewhere, for
            models that add masks to scores. Both have no future.

    Raises:
        PolyaccelError: The lengths do not fit the documents, or no document has two tokens.
    """

    def __init__(
        self,
        documents: Sequence[ArrayLike] | Any,
        capacity: int,
        *,
        lengths: ArrayLike | None = None,
        pad_id: int = 0,
        ignore_index: int = -100,
        order: Order = "best_fit",
        masks: bool | Literal["additive"] = False,
    ) -> None:
        self.documents, self.capacity = documents, capacity
        self.pad_id, self.ignore_index, self.masks = pad_id, ignore_index, masks
        known = getattr(documents, "sizes", None) if lengths is None else lengths
        sizes = np.asarray([np.size(documents[at]) for at in range(len(documents))] if known is None else known)
        if len(sizes) != len(documents):
            hint = "give one length a document"
            raise PolyaccelError(f"{len(sizes)} lengths of {len(documents)} documents", hint=hint, value=len(sizes))
        self.rows = [row for row in pack(sizes, capacity, order) if max(map(len, row)) > 1]
        if not self.rows:
            hint = "give documents of two tokens or more, and such a capacity"
            raise PolyaccelError("there are no tokens to predict: 0", hint=hint, value=0)
        self._sizes = sizes
        self.tokens = sum(len(piece) for row in self.rows for piece in row)

    @property
    def density(self) -> float:
        """Share of positions that are tokens, not padding."""
        return self.tokens / (len(self.rows) * self.capacity)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Return a row."""
        ids = np.full(self.capacity, self.pad_id, np.int64)
        labels = np.full(self.capacity, self.ignore_index, np.int64)
        positions = np.zeros(self.capacity, np.int64)
        at = 0
        for piece in self.rows[index]:
            tokens = self._document(piece.document)[piece.start : piece.stop]
            end = at + len(piece)
            ids[at:end] = tokens
            labels[at + 1 : end] = tokens[1:]
            positions[at:end] = np.arange(len(piece))
            at = end
        positions[at:] = np.arange(self.capacity - at)
        row: dict[str, NDArray[Any]] = {"input_ids": ids, "labels": labels, "position_ids": positions}
        if self.masks:
            seen = block_diagonal_mask(positions)[None]
            row["attention_mask"] = np.where(seen, np.float32(0), -np.inf) if self.masks == "additive" else seen
        return row

    def _document(self, number: int) -> NDArray[Any]:
        """The tokens of a document. Raise PolyaccelError where they are not as many as were counted, or no tokens."""
        tokens, counted = np.asarray(self.documents[number]), int(self._sizes[number])
        if tokens.shape != (counted,) or tokens.dtype.kind not in "iu":
            raise PolyaccelError(
                f"document {number} is {tokens.dtype} of shape {tokens.shape} where {counted} tokens were counted",
                hint="give integers in one dimension, and the lengths of these documents",
                value=number,
            )
        return tokens


def cu_seqlens(position_ids: ArrayLike) -> NDArray[np.int32]:
    """Return the cumulated lengths of a row's documents, as kernels for packed sequences take them.

    Args:
        position_ids: Positions that begin again at 0 with each document, (length,).

    Returns:
        Borders from 0 to length, (documents + 1,).

    Raises:
        PolyaccelError: It is not one row whose documents begin at 0.
    """
    positions = np.asarray(position_ids)
    begins = np.flatnonzero(positions == 0)
    bounds = np.append(begins, positions.size)
    wanted = np.arange(positions.size) - np.repeat(begins, np.diff(bounds)) if len(begins) and not begins[0] else None
    if positions.ndim != 1 or wanted is None or not np.array_equal(positions, wanted):
        hint = "give one row of positions, which count from 0 in each document"
        raise PolyaccelError(
            f"positions of shape {positions.shape} mark no documents", hint=hint, value=positions.shape
        )
    return bounds.astype(np.int32)


def block_diagonal_mask(position_ids: ArrayLike, *, causal: bool = True) -> NDArray[np.bool_]:
    """Return which tokens see which: those of the same document only.

    Args:
        position_ids: Positions that begin again at 0 with each document, (length,).
        causal: Leave out the tokens after each one.

    Returns:
        True where the token of the row sees that of the column, (length, length).
    """
    bounds = cu_seqlens(position_ids)
    documents = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    mask: NDArray[np.bool_] = documents[:, None] == documents[None, :]
    return np.tril(mask) if causal else mask


def unpack(values: ArrayLike, position_ids: ArrayLike) -> list[NDArray[Any]]:
    """Cut values of a row, such as its losses, into those of its documents.

    Args:
        values: One for each token, (length, ...).
        position_ids: Positions of the row, (length,).

    Returns:
        A view for each document, padding included as the last one.
    """
    return np.split(np.asarray(values), cu_seqlens(position_ids)[1:-1])
