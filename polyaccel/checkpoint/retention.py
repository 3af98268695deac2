"""Which tags stay when a save has ended, and the deletion of the others.

[Note: Checkpoint deletion]
A deletion is a save backwards. The commit marker goes first, in one durable call: from then on no reader takes the tag
for a checkpoint, whatever of its files is still there. Then its save goes, then the empty folder. A deletion that is
cut short after the marker leaves what a save that was cut short leaves, a folder that no marker names, which the next
save clears away; one that is cut short before it leaves the checkpoint, whole. A reader that opened the tag before
meets files that are missing, never others. Right before, the tag is looked at again: one whose marker was replaced, or
in which another process has begun a save, stays.

Nothing is deleted before the newest good checkpoint has been opened again, with all of its files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

from polyaccel.checkpoint.format.commit import MARKER, Commit, read_commit, read_latest, read_manifest, tag_names
from polyaccel.checkpoint.format.save_folders import save_folders
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.errors import CheckpointError

_log = logging.getLogger(__name__)


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


_read: dict[str, dict[tuple[Commit, str], SavedTag]] = {}
"""By location: what this process has read of checkpoints, which do not change, by marker and metric."""


def prune(storage: Storage, retention: Retention) -> tuple[str, ...]:
    """Delete the tags that `retention` does not keep; return them. Failures are logged."""
    deleted: list[str] = []
    if retention.keeps_all:
        return ()
    try:
        tags, commits = _look(storage, retention)
        for tag in _plan(storage, retention, tags, commits):
            if _delete(storage, commits[tag]):
                deleted.append(tag)
    except CheckpointError as error:
        _log.warning("could not delete old checkpoints in %s: %s", storage.location, error)
    if deleted:
        _log.info("deleted %s from %s, by the checkpoint section", ", ".join(deleted), storage.location)
    return tuple(deleted)


def _look(storage: Storage, retention: Retention) -> tuple[list[SavedTag], dict[str, Commit]]:
    """Every tag, and the markers of those that have one. Reads manifests, each once, and no tensors."""
    metric = retention.keep_best.metric if retention.keep_best else ""
    before, now = _read.get(storage.location, {}), dict[tuple[Commit, str], SavedTag]()
    tags, commits = [], {}
    for tag in tag_names(storage):
        folders = save_folders(storage, tag)
        try:
            commit = read_commit(storage, tag)
        except CheckpointError:
            commit = None
        if commit is None or commit.tag != tag:
            tags.append(SavedTag(tag, 0.0, state=TagState.UNREADABLE))
            continue
        known = before.get((commit, metric)) or _open(storage, commit, retention)
        now[commit, metric] = known
        commits[tag] = commit
        tags.append(replace(known, is_busy=set(folders) != {commit.save}))
    _read[storage.location] = now
    return tags, commits


def _open(storage: Storage, commit: Commit, retention: Retention) -> SavedTag:
    try:
        manifest = read_manifest(storage, commit)
    except CheckpointError:
        return SavedTag(commit.tag, commit.saved_at_s, state=TagState.UNREADABLE)
    counters: Any = manifest.scalars.get("counters")
    step = counters.get("global_steps") if isinstance(counters, Mapping) else None
    best = retention.keep_best
    return SavedTag(
        commit.tag,
        commit.saved_at_s,
        step=step if isinstance(step, int) else None,
        metric=best.number_in(manifest.scalars.get("client_state")) if best else None,
        state=TagState.NOT_FINITE if manifest.not_finite else TagState.GOOD,
    )


def _plan(
    storage: Storage, retention: Retention, tags: list[SavedTag], commits: Mapping[str, Commit]
) -> tuple[str, ...]:
    """The tags to delete, once the newest good one that stays has been opened again."""
    latest = read_latest(storage)
    best = retention.keep_best
    if best is not None and not any(each.metric is not None for each in tags):
        _log.warning(
            'no checkpoint in %s has the number %r of "checkpoint.keep_best" in its client_state: all of them stay',
            storage.location, best.metric,
        )  # fmt: skip
    while planned := retention.deletable(tags, latest):
        newest = max(
            (each for each in tags if each.state is TagState.GOOD), key=lambda each: (each.saved_at_s, each.tag)
        )
        try:
            read_manifest(storage, commits[newest.tag])
        except CheckpointError as error:
            _log.warning("%s; it does not count as kept", error.message)
            tags[tags.index(newest)] = replace(newest, state=TagState.UNREADABLE)
        else:
            return planned
    return ()


def _delete(storage: Storage, commit: Commit) -> bool:
    """Delete the checkpoint that `commit` names, in the order of [Note: Checkpoint deletion]. Returns whether it was
    deleted."""
    tag = commit.tag
    if save_folders(storage, tag) != (commit.save,) or read_commit(storage, tag) != commit:
        return False
    marker = f"{tag}/{MARKER}"
    storage.delete(marker)
    if storage.size(marker) is not None:
        raise CheckpointError(
            f"the storage {storage.name!r} did not delete {marker}",
            hint="a storage whose delete_tree removes folders only needs a method delete, which is new in version 1.3",
            value=marker,
        )
    storage.delete_tree(commit.folder)
    storage.clear_unfinished(tag, if_empty=True)
    return True
