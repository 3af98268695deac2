"""The rule for which tags stay, as values: what retention has about a tag, and which ones may go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal


class TagState(Enum):
    """The use that a tag has."""

    GOOD = "good"
    """A run may continue from it."""
    NOT_FINITE = "not finite"
    """It is complete, and a parameter has a value that is not finite."""
    UNREADABLE = "unreadable"
    """It cannot be opened: never completed, damaged, of another version, or no checkpoint of ours."""


@dataclass(frozen=True, slots=True)
class SavedTag:
    """What retention has about a tag.

    `saved_at_s` is seconds since 1970; `step` counts optimizer steps, None where the checkpoint does not have it;
    `metric` is the number that `KeepBest.metric` names, None where it has none; `is_busy`: it holds a save in addition
    to the one that counts, which a living process may be writing.
    """

    tag: str
    saved_at_s: float
    step: int | None = None
    metric: float | None = None
    state: TagState = TagState.GOOD
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class KeepBest:
    """The `count` tags with the lowest ("min") or highest ("max") number that `client_state` has at the dotted name
    `metric`; of equal ones the newest."""

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def number_in(self, client_state: object) -> float | None:
        """The metric in a checkpoint's client state; None where that has no finite number of this name."""
        found = client_state
        for name in self.metric.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            return None
        return float(found)


@dataclass(frozen=True, slots=True)
class Retention:
    """A rule for which tags stay: the `keep_last` newest, those whose step is a multiple of `keep_every`, and the best;
    without any of the three, all of them."""

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: KeepBest | None = None

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Retention:
        """The inverse of `dataclasses.asdict`."""
        best = tree["keep_best"]
        return cls(tree["keep_last"], tree["keep_every"], KeepBest(**best) if best else None)

    @property
    def keeps_all(self) -> bool:
        return self == KEEP_ALL

    def deletable(self, tags: Iterable[SavedTag], latest: str | None) -> tuple[str, ...]:
        """The tags that may be deleted, oldest first. Pure.

        Only good tags count as kept. The newest good one and the one that `latest` names stay whatever the rule is,
        and so does every tag that is busy or cannot be read, which may belong to another job. One with values that are
        not finite goes once a good one is newer. While no tag has the metric of `keep_best`, none is known to be worse,
        and all stay.
        """
        by_age = sorted(tags, key=lambda each: (each.saved_at_s, each.tag))
        good = [each for each in reversed(by_age) if each.state is TagState.GOOD]
        if self.keeps_all or not good:
            return ()
        kept = {good[0].tag, latest, *(each.tag for each in good[: self.keep_last or 0])}
        if self.keep_every is not None:
            kept |= {each.tag for each in good if each.step is not None and each.step % self.keep_every == 0}
        if self.keep_best is not None:
            sign = -1.0 if self.keep_best.mode == "max" else 1.0
            ranked = sorted(
                (sign * each.metric, at, each.tag) for at, each in enumerate(good) if each.metric is not None
            )
            if not ranked:
                return ()
            kept |= {tag for *_, tag in ranked[: self.keep_best.count]}
        older = by_age[: by_age.index(good[0])]
        return tuple(
            each.tag
            for each in by_age
            if each.tag not in kept
            and not each.is_busy
            and (each.state is TagState.GOOD or (each.state is TagState.NOT_FINITE and each in older))
        )


KEEP_ALL = Retention()
"""Nothing is deleted."""
