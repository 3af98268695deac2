"""Who reads which extent of a save when, and where it lies in whose window. Integers only, the same on all ranks.

An *extent* is a byte range of a file, identified by its number. Ranks that share memory are a *group*. A rank has two
*windows*: one that its whole group sees, and a private one, for extents that no other rank of its group wants. Extents
come in rounds, in the order of their numbers, so that a round fits the windows. An extent comes into each group that
wants it once: from storage where the group's host holds the file, from another group where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from polyaccel.errors import InvariantError

ALIGNMENT_NBYTES = 64


class ReadTarget(NamedTuple):
    """Where an extent comes into a group: in a window of `rank`, at byte `offset`, from the storage of the group
    `source`. `is_shared`: in the window that the group sees."""

    group: int
    rank: int
    is_shared: bool
    offset: int
    source: int


class ScheduledRead(NamedTuple):
    """An extent in a round."""

    extent: int
    landings: tuple[ReadTarget, ...]

    def landing(self, group: int) -> ReadTarget | None:
        """Where it comes into a group; None where it does not."""
        return next((landing for landing in self.landings if landing.group == group), None)


Round = tuple[ScheduledRead, ...]


def window_for(nbytes: Iterable[int], least: int) -> int:
    """The length of windows that hold the largest of these extents, and are `least` long or little longer."""
    return max([_aligned(least), *map(_aligned, nbytes)])


def plan_rounds(
    wanted: Iterable[tuple[int, Sequence[int]]],
    nbytes: Sequence[int],
    holders: Callable[[int], Collection[int]],
    groups: Sequence[Sequence[int]],
    window_nbytes: int,
) -> tuple[Round, ...]:
    """The rounds that bring every extent of `wanted`, which are (extent, ranks that want it) in ascending order.

    `nbytes[extent]` is its length, `holders(extent)` the groups whose storage has it, at least one; `groups[g]` are the
    ranks of group g. The two windows of a rank never hold more than `window_nbytes` together, what it reads for other
    groups included. What several ranks of a group want is read by those that have read least in the round, and so is
    what other groups want.
    """
    plan = _Plan(groups, window_nbytes)
    for extent, ranks in wanted:
        plan.add(extent, ranks, _aligned(nbytes[extent]), holders(extent))
    plan.end_round()
    return tuple(plan.rounds)


class _Plan:
    """Rounds as they are made."""

    def __init__(self, groups: Sequence[Sequence[int]], window_nbytes: int) -> None:
        self.rounds: list[Round] = []
        self._groups = groups
        self._group_of = {rank: group for group, ranks in enumerate(groups) for rank in ranks}
        self._window_nbytes = window_nbytes
        self._read = [0] * len(groups)
        self._current: list[ScheduledRead] = []
        self._filled: dict[int, list[int]] = {}
        """Of each rank: the bytes in its own window, and in that which its group sees."""
        self.end_round()

    def end_round(self) -> None:
        if self._current:
            self.rounds.append(tuple(self._current))
        self._current, self._filled = [], {rank: [0, 0] for rank in self._group_of}

    def add(self, extent: int, ranks: Sequence[int], nbytes: int, held: Collection[int]) -> None:
        """Let an extent of `nbytes`, which the groups `held` have, come to the groups of `ranks`."""
        if not held or nbytes > self._window_nbytes:
            raise InvariantError(
                f"extent {extent} of {nbytes} bytes, held by {held}, fits no window of {self._window_nbytes}"
            )
        wanting: dict[int, list[int]] = {}
        for rank in ranks:
            wanting.setdefault(self._group_of[rank], []).append(rank)
        sources = {group: group for group in wanting if group in held}
        lacking = [group for group in wanting if group not in held]
        if lacking:
            source = min(held, key=lambda group: (group not in sources, self._read[group], group))
            sources |= {source: source, **dict.fromkeys(lacking, source)}
        carrying = self._carrying(sources, wanting)
        if any(sum(self._filled[rank]) + nbytes > self._window_nbytes for rank in carrying.values()):
            self.end_round()
            carrying = self._carrying(sources, wanting)
        landings = []
        for group, source in sorted(sources.items()):
            rank, is_shared = carrying[group], len(wanting.get(group, ())) > 1
            landings.append(ReadTarget(group, rank, is_shared, self._filled[rank][is_shared], source))
            self._filled[rank][is_shared] += nbytes
            self._read[group] += nbytes if group == source else 0
        self._current.append(ScheduledRead(extent, tuple(landings)))

    def _carrying(self, groups: Iterable[int], wanting: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """The rank of each group that brings an extent: the one that wants it, or the one with the most room."""
        found = {}
        for group in groups:
            ranks = wanting.get(group, ())
            among = ranks if len(ranks) == 1 else self._groups[group]
            found[group] = min(among, key=lambda rank: (sum(self._filled[rank]), rank))
        return found


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT_NBYTES
