"""The replicas of an engine: one of each step in the keeper's memory, and the one to continue from after a restart."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from secrets import token_hex
from typing import Any, TypeVar

from polyaccel.checkpoint.collective_call import on_rank_0
from polyaccel.checkpoint.in_memory.parts import files_of
from polyaccel.checkpoint.in_memory.recovery import (
    HostKeepers,
    RecoverableStep,
    as_checkpoint,
    drop_others,
    find_survivor,
)
from polyaccel.checkpoint.in_memory.writer import ReplicaWriter
from polyaccel.checkpoint.load.reader import CheckpointReader, TagStatus, list_checkpoints, open_checkpoint
from polyaccel.checkpoint.save.protocol import SaveContents
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError
from polyaccel.job.memory_server.client import KeeperClient

_log = logging.getLogger(__name__)
_engines = count()
"""Numbers of the engines with replicas whose rank 0 this process is: the same after a restart."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaPolicy:
    """How an engine makes replicas: in at most `memory_nbytes` a rank (None: half of what the host has left)."""

    memory_nbytes: int | None = None


class Replicas:
    """The replicas of one engine, whose ranks are those of `communicator`. All ranks make the same calls.

    They begin with the first call, which is collective. Without a keeper on every rank's host there are none, and that
    is logged. Where ranks are on several hosts, each host's keeper also has the parts of the host before.
    """

    def __init__(self, communicator: Communicator, policy: ReplicaPolicy, about: Mapping[str, Any]) -> None:
        self._communicator = communicator
        self._policy = policy
        self._about = about
        self._writer: ReplicaWriter | None = None
        self._keepers: HostKeepers | None = None
        self._engine = ""
        self._attempt = ""
        self._has_begun = False
        self._has_survivors = True

    def replicate(self, step: int, contents: Callable[[], SaveContents], *, in_background: bool, culprit: str) -> None:
        """Make the replica of a step that has just ended; see `ReplicaWriter.begin`. Collective."""
        self._begin()
        if self._writer is not None:
            self._writer.begin(step, contents(), in_background=in_background, not_finite=culprit)

    def settle(self) -> None:
        """Wait until everything may be written again."""
        if self._writer is not None:
            self._writer.settle()

    def has_survivor(self) -> bool:
        """Whether the starts of this job before this one have left a replica. Collective."""
        self._begin()
        if self._keepers is None or not self._has_survivors:
            return False
        try:
            return find_survivor(self._keepers, self._engine, self._attempt)[0] is not None
        except CheckpointError:  # `resume` logs why it cannot be used
            return False

    def resume(self, storage: Storage, open_saved: Callable[[], CheckpointReader], load: Callable[..., T]) -> T:
        """Load an earlier start's replica if newer than all good checkpoints, else `open_saved`. Collective."""
        self._begin()
        found, self._has_survivors = self._newer_than(storage), False
        if found is not None and self._keepers is not None:
            survivor, tag = found
            try:
                kept = self._keepers.storage(files_of(self._engine))
                loaded = load(open_checkpoint(kept, tag, communicator=self._communicator))
                kept.close()
                drop_others(self._keepers, survivor, self._engine)
                return loaded
            except CheckpointError as error:
                if self._communicator.rank == 0:
                    _log.warning("the replica of step %d in memory cannot be used: %s", survivor.step, error.message)
        loaded = load(open_saved())
        self.forget()
        return loaded

    def forget(self) -> None:
        """Forget replicas after the engine's state was replaced. Collective where there are replicas."""
        if self._writer is not None:
            self._writer.forget()
            self._communicator.barrier(label="replicas forgotten")  # before anybody makes another

    def close(self) -> None:
        """Release memory and connections of this rank."""
        if self._writer is not None:
            self._writer.close()
        if self._keepers is not None:
            self._keepers.client.close()
        self._writer = self._keepers = None

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        error, client = "", None
        try:
            client = KeeperClient.from_environment(os.environ)
        except CheckpointError as found:
            error = found.message
        is_first = self._communicator.rank == 0
        engine = f"{self._communicator.ranks[0]}.{next(_engines)}" if is_first else ""
        gathered = self._communicator.all_gather_object(
            (f"{time.time_ns():020d}-{token_hex(4)}", engine, client is not None, error)
        )
        self._attempt, self._engine = gathered[0][:2]
        without = [rank for rank, (_, _, has_keeper, _) in enumerate(gathered) if not has_keeper]
        why = next((why for *_, why in gathered if why), "start the job with `polyaccel run --restarts N`")
        problem = f"ranks {without[:8]} have no keeper: {why}" if without else ""
        if client is not None and not problem:
            try:
                self._keepers = HostKeepers.found(self._communicator, client)
            except CheckpointError as failed:
                problem = failed.message
        if self._keepers is None:
            if client is not None:
                client.close()
            if is_first:
                _log.warning('"checkpoint.in_memory" has no effect: %s', problem)
            return
        self._writer = ReplicaWriter(
            self._communicator,
            self._engine,
            self._attempt,
            self._about,
            self._policy.memory_nbytes,
            self._keepers.nodes,
        )

    def _newer_than(self, storage: Storage) -> tuple[RecoverableStep, str] | None:
        """The replica to continue from, and its tag; None to continue from `storage`. Collective. Logs the choice."""
        if self._keepers is None or not self._has_survivors:
            return None
        communicator, is_first = self._communicator, self._communicator.rank == 0
        try:
            survivor, last = find_survivor(self._keepers, self._engine, self._attempt)
            if survivor is None and not last:  # the first start
                return None

            def compare() -> tuple[bool, str]:
                saved = _newest_good(storage)
                is_newer = survivor is not None and _is_newer(survivor, saved)
                if not is_newer:
                    _log_saved(saved, survivor, last)
                return is_newer, f"; on disk there is step {saved[1]}" if saved else ""

            is_newer, on_disk = on_rank_0(communicator, "looking for a replica", compare)
            if survivor is None or not is_newer:
                return None
            tag = as_checkpoint(self._keepers, survivor, self._engine)
        except CheckpointError as error:
            if is_first:
                _log.warning("replicas in memory cannot be used: %s", error.message)
            return None
        if is_first:
            lost = _steps_are_lost(survivor.last_step - survivor.step)
            _log.info("continuing from the replica of step %d in memory: %s%s", survivor.step, lost, on_disk)
        return survivor, tag


def _newest_good(storage: Storage) -> tuple[TagStatus, int] | None:
    """The newest checkpoint to continue from, with its step; None where there is none."""
    for status in list_checkpoints(storage):
        if status.is_good:
            counters = open_checkpoint(storage, status.tag).scalars.get("counters")
            step = counters.get("global_steps") if isinstance(counters, Mapping) else None
            return status, step if isinstance(step, int) else 0
    return None


def _is_newer(survivor: RecoverableStep, saved: tuple[TagStatus, int] | None) -> bool:
    """By step or, where a run has gone back to an earlier one, by the clock."""
    if saved is None:
        return True
    status, step = saved
    return survivor.step > step or (survivor.step < step and survivor.saved_at_s > status.saved_at_s)


def _log_saved(saved: tuple[TagStatus, int] | None, survivor: RecoverableStep | None, last: int) -> None:
    what = "no replica in memory is whole" if survivor is None else f"the replica in memory is of step {survivor.step}"
    if saved is not None:
        status, step = saved
        _log.info("%s: continuing from %r on disk: %s", what, status.tag, _steps_are_lost(max(0, last - step)))


def _steps_are_lost(steps: int) -> str:
    return "no step is lost" if not steps else "1 step is lost" if steps == 1 else f"{steps} steps are lost"
