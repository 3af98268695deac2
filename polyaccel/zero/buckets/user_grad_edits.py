"""What user code did to gradients between the backward pass and the update, for all ranks to agree on.

A gradient belongs to all ranks. A change that only some of them made, or that they made differently, would be lost in
part, or would let replicated parameters come apart. So the ranks compare before the update. What decides whether they
compare travels with the arrivals (`GradNormReducer`), so a step in which no user touched a gradient exchanges no more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyaccel.errors import ShardingError

DIFFERENCE = 1e-6
"""Squared norms that differ by a greater share are of gradients that were changed differently; a smaller one is
rounding, as between two kinds of device."""


@dataclass
class UserGradEdits:
    """Gradient edits of user code since the last optimizer step: parameters by name, buckets by index.

    `written`: gradients that it changed or set. `dropped`: those that it set to None. `shown`: buckets with a gradient
    that it saw after their last backward pass.
    """

    written: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    shown: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.written or self.dropped or self.shown)

    def forget(self) -> None:
        """The gradients are gone."""
        self.written.clear()
        self.dropped.clear()
        self.shown.clear()

    def counts(self, names: Sequence[str], buckets: Sequence[int]) -> array[float]:
        """Return flags of writes, then drops by `names`, then shown buckets."""
        flags = [name in self.written for name in names] + [name in self.dropped for name in names]
        return array("d", flags + [index in self.shown for index in buckets])


def require_same_edits(counts: Sequence[float], names: Sequence[str], ranks: int) -> None:
    """Raise ShardingError unless all ranks changed the same gradients, by summed `counts`."""
    for verb, found in (("changed", counts[: len(names)]), ("dropped", counts[len(names) : 2 * len(names)])):
        for name, count in zip(names, found, strict=True):
            if count not in (0, ranks):
                raise ShardingError(
                    f"the gradient of {name!r} was {verb} by user code on {int(count)} of {ranks} ranks",
                    hint="make the same change on every rank, or call engine.zero_grad() and start over",
                    value=name,
                )


def require_equal(squares: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    """Raise ShardingError unless all ranks have gradients of equal squared norms; `squares` has a row a rank."""
    for name, *found in zip(names, *squares, strict=True):
        least, most = min(found), max(found)
        if most - least > DIFFERENCE * most:
            raise ShardingError(
                f"the gradient of {name!r} was changed by user code, differently on different ranks",
                hint="make the same change on every rank, random numbers from equal seeds included, or call "
                "engine.zero_grad() and start over",
                value=name,
            )


def require_shown_whole(late: Sequence[int], counts: Sequence[float], names: Sequence[str]) -> None:
    """Raise ShardingError where user code saw a gradient before its `late` part; `names` for messages."""
    for position in late:
        if counts[position]:
            raise ShardingError(
                f"user code looked at gradients of the bucket of {names[position]!r} before a part of them was reduced "
                "that came late on some rank, as in a second backward pass",
                hint="call polyaccel.utils.safe_get_full_grad for the parameter first, on all ranks: it reduces the "
                "rest; then call engine.zero_grad() and start over",
                value=names[position],
            )
