"""An engine's saves: written next to training where that is possible, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from polyaccel.accelerators.memory.host import memory_stats
from polyaccel.checkpoint.collective_call import require_success, run_on_all
from polyaccel.checkpoint.format.pieces import reading
from polyaccel.checkpoint.in_memory.replicas import ReplicaPolicy
from polyaccel.checkpoint.retention import KEEP_ALL, Retention
from polyaccel.checkpoint.save import async_client
from polyaccel.checkpoint.save.async_image import Image
from polyaccel.checkpoint.save.per_node_thread import SavingThread, thread_communicator
from polyaccel.checkpoint.save.protocol import (
    SaveContents,
    SavePart,
    SaveTask,
    TagValidation,
    agree_on_parts,
    begin_save,
    remove,
    save_parts,
)
from polyaccel.checkpoint.save.ranks import CollectiveRanks
from polyaccel.checkpoint.storage.base import open_storage
from polyaccel.checkpoint.storage.limited import LimitedStorage
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError

_log = logging.getLogger(__name__)
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """How an engine saves.

    `in_background`: a process next to the rank writes, from a copy in memory of at most `staging_nbytes` (None: half of
    what the host has left, shared by its ranks). `retention` decides which tags stay. `storage` and `options` are the
    plugin and its options. `allows_bytes`: a client state may have bytes. `limit_s` is the longest wait for what writes
    in the background, and for a call of the storage before it. With `raises_later` a failure there is raised by the
    next step or save, else logged there.
    """

    tag_validation: TagValidation = "Warn"
    in_background: bool = True
    staging_nbytes: int | None = None
    retention: Retention = KEEP_ALL
    replica: ReplicaPolicy | None = None
    """How each step is replicated; None: not at all."""
    storage: str = "file"
    options: Mapping[str, Any] = field(default_factory=dict)
    allows_bytes: bool = False
    limit_s: float = 1800.0
    raises_later: bool = False


class Saver:
    """The saves of the ranks of `communicator`, of which at most one is under way."""

    def __init__(self, communicator: Communicator, policy: SavePolicy, about: Mapping[str, Any]) -> None:
        self._communicator = communicator
        self.policy = policy
        self._about = about
        self._under_way: _UnderWay | None = None
        self._image: Image | None = None
        self._has_logged = False
        self._for_threads: list[Communicator | None] = []

    def save(
        self,
        location: str,
        tag: str,
        contents: SaveContents,
        *,
        save_latest: bool,
    ) -> None:
        """Save as `save_checkpoint`; returns once `contents` may change. Collective; raises for an earlier failure."""
        self._wait(raises=self.policy.raises_later)
        storage = open_storage(self.policy.storage, location, self.policy.options)
        rank = self._communicator.rank
        make = partial(SavePart.checked, rank, contents, self._about)
        tag, part, intents = agree_on_parts(
            self._communicator, tag, make, self.policy.tag_validation, has_room=self._has_room
        )
        nbytes = [intent.nbytes for intent in intents]
        task = SaveTask(storage, tag, part, reading(part.contents), save_latest, self.policy.retention)
        ranks = CollectiveRanks.discover(storage, self._communicator)
        is_apart, has_room = ranks.nodes.count > 1, all(intent.has_room for intent in intents)
        thread_comm = self._thread_communicator() if is_apart and has_room else None
        if thread_comm is not None:
            self._under_way = self._begin_in_thread(CollectiveRanks(thread_comm, ranks.nodes), task, nbytes)
        elif has_room and not is_apart:
            self._under_way = self._begin_in_process(ranks, task, nbytes)
        else:
            save_parts(ranks, task, nbytes)

    def _begin_in_process(self, ranks: CollectiveRanks, task: SaveTask, nbytes: Sequence[int]) -> _UnderWay | None:
        """Copy every rank's part, and let the processes next to the ranks write them. Collective.

        Returns None where the storage hangs, and a failure in the background is only logged.
        """
        owned, pending, tag = ExitStack(), list[async_client.Save](), task.tag
        storage = LimitedStorage(task.storage, self.policy.limit_s)
        try:
            folder = begin_save(ranks, storage, tag, nbytes, owned, async_client.owner)

            def hand_over() -> None:
                pending.append(
                    async_client.start(
                        task.part,
                        self._filled(task.part),
                        self.policy.limit_s,
                        rank=self._communicator.rank,
                        world_size=self._communicator.world_size,
                        storage=self.policy.storage,
                        location=task.storage.location,
                        options=self.policy.options,
                        tag=tag,
                        folder=folder,
                        save_latest=task.save_latest,
                        retention=task.retention,
                    )
                )

            try:
                run_on_all(self._communicator, f"staging {tag!r}", hand_over)
            except CheckpointError:
                if pending:
                    pending[0].give_up()
                    async_client.await_end(pending[0])
                elif ranks.is_leader:
                    remove(storage, tag, folder)
                raise
        except CheckpointError as error:
            owned.close()
            if self.policy.raises_later or not any(self._communicator.all_gather_object(storage.is_hung)):
                raise
            self._log_failure(error)
            return None
        return _UnderWay(self._communicator, tag, pending[0], owned)

    def _begin_in_thread(self, ranks: CollectiveRanks, task: SaveTask, nbytes: Sequence[int]) -> _UnderWay:
        """Copy every rank's part, and let a thread of each rank write it: `ranks` are theirs. Collective."""
        part, images = task.part, list[Image]()
        run_on_all(self._communicator, f"staging {task.tag!r}", lambda: images.append(self._filled(part)))
        task = replace(task, read=images[0].reading(part.layout))
        pending = SavingThread(partial(save_parts, ranks, task, nbytes), self.policy.limit_s)
        async_client.register_pending(pending)
        return _UnderWay(self._communicator, task.tag, pending, ExitStack())

    def poll(self) -> None:
        """Check the save under way. Collective while there is one; raises on every rank if it `raises_later`."""
        if self._under_way is not None and self._under_way.has_ended():
            self._end(raises=self.policy.raises_later)

    def wait(self) -> None:
        """Wait until no save is under way. Collective where one is; raises on every rank if it failed on any."""
        self._wait(raises=True)

    def _wait(self, *, raises: bool) -> None:
        if self._under_way is None:
            return
        wait = async_client.LimitedWait(self._under_way.pending)
        while not self._under_way.has_ended(timeout_s=_LOOK_AGAIN_S):
            wait.look()
        self._end(raises=raises)

    def close(self) -> None:
        """Wait until this rank's part of the save under way has ended, without asking others."""
        ended, self._under_way = self._under_way, None
        image, self._image = self._image, None
        try:
            if ended is not None:
                ended.close()
        finally:
            if image is not None:
                image.close()
            while self._for_threads:
                thread_comm = self._for_threads.pop()
                if thread_comm is not None:
                    thread_comm.close()

    def _end(self, *, raises: bool) -> None:
        ended, self._under_way = self._under_way, None
        assert ended is not None  # as its callers have seen
        try:
            ended.check()
        except CheckpointError as error:
            if raises:
                raise
            self._log_failure(error)

    def _log_failure(self, error: CheckpointError) -> None:
        if self._communicator.rank == 0:
            _log.error("training continues without a checkpoint (checkpoint.on_failure): %s", error)

    def _thread_communicator(self) -> Communicator | None:
        """That of the threads that save where hosts have separate storages. Collective the first time."""
        if not self._for_threads:
            self._for_threads.append(thread_communicator(self._communicator))
            if self._for_threads[0] is None and self._communicator.rank == 0:
                _log.info(
                    "checkpoints are written while training waits: hosts send each other copies of their files, in "
                    "messages that lie on a device; logged once"
                )
        return self._for_threads[0]

    def _filled(self, part: SavePart) -> Image:
        """Copy a part into the memory of the save before if it fits: new pages cost more than the copy."""
        nbytes = part.layout.nbytes
        if self._image is not None and self._image.nbytes != nbytes:
            self._image.close()
            self._image = None
        self._image = self._image or Image.new(nbytes)
        self._image.fill(part.layout, part.contents)
        return self._image

    def _has_room(self, nbytes: int) -> bool:
        """Whether a file of that length is to be written in the background."""
        if not self.policy.in_background or not async_client.can_save_in_background():
            return False
        most = self.policy.staging_nbytes
        if most is None:
            most = memory_stats().free_nbytes // 2 // self._communicator.host_topology.local_size
            most += 0 if self._image is None else self._image.nbytes
        if nbytes > most and not self._has_logged:
            self._has_logged = True
            _log.warning(
                "checkpoints are written while training waits: rank %d would stage %s bytes, and may stage %s "
                "(checkpoint.staging_memory); logged once", self._communicator.rank, f"{nbytes:,}", f"{most:,}",
            )  # fmt: skip
        return nbytes <= most


class _UnderWay:
    """A save in the background, as the ranks see it."""

    def __init__(self, communicator: Communicator, tag: str, pending: async_client.Save, owned: ExitStack) -> None:
        self._communicator, self._tag, self.pending, self._owned = communicator, tag, pending, owned
        self._outcomes: dict[int, async_client.SaveOutcome | None] = {}

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Return whether every rank's part has ended, after waiting for this rank's at most so long. Collective."""
        mine = self.pending.outcome(timeout_s)
        gathered = self._communicator.all_gather_object(None if mine is None else (mine.error, mine.hint))
        self._outcomes = {
            rank: None if each is None else async_client.SaveOutcome(*each) for rank, each in enumerate(gathered)
        }
        if all(outcome is not None for outcome in self._outcomes.values()):
            self._owned.close()
            return True
        if any(outcome is not None and outcome.error for outcome in self._outcomes.values()):
            self.pending.give_up()
        return False

    def check(self) -> None:
        """Raise CheckpointError if anything failed on any rank."""
        self.pending.is_reported = True
        require_success(
            f"saving {self._tag!r} in the background",
            {rank: (each.error, each.hint) for rank, each in self._outcomes.items() if each is not None and each.error},
        )

    def close(self) -> None:
        """Wait for this rank's part alone. Raises CheckpointError if it failed."""
        self.pending.finish_soon()
        self._outcomes = {self._communicator.rank: async_client.await_end(self.pending)}
        self._owned.close()
        self.check()
