"""The weights of a rollout: whole where memory allows, the same on all ranks, and unchanged when it ends.

[Note: Weights of a rollout]
Sharded parameters are gathered once if every rank has room for all of them next to the cache of keys and values, else
unit by unit ([Note: Rollouts unit by unit]). Ranks allocate before they gather, and gather only if all could: a rank
without memory would leave the others in a collective. Checksums are taken of every whole parameter before and after.
Ranks compare them before a rollout, where it is collective. Afterwards each compares with its own: a fused adapter that
was not undone is an error that names the parameter, and no update continues from it silently. A rank whose generation
fails takes part in the end of the rollout, so that the others raise too, with its number.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from logging import getLogger
from time import perf_counter
from typing import TypeVar

import torch

from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.engine.policies.generation import GenerationPolicy
from polyaccel.errors import CommError, PolyaccelError, ShardingError
from polyaccel.torch.generation.digests import changed_names, checksums
from polyaccel.torch.sharding.module_adapter import TorchAdapter
from polyaccel.torch.sharding.ownership import note_version
from polyaccel.zero.buckets.reservation import missing_nbytes, reserve
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.plan.whole_model import FreeMemory, fits_whole

log = getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RolloutTimes:
    """How long a rollout took on one rank.

    Attributes:
        hand_over_s: Gathers before it, checksums, waits for other ranks, and what was released after it.
        generate_s: The module's `generate`, gathers unit by unit included.
    """

    hand_over_s: float
    generate_s: float


class Rollout:
    """The weights of `zero`, whose parameters `adapter` shows, while their module generates. See
    [Note: Weights of a rollout]."""

    def __init__(
        self, zero: ZeroEngine, adapter: TorchAdapter, policy: GenerationPolicy, cache_nbytes: int = 0
    ) -> None:
        self._zero = zero
        self._adapter = adapter
        self._policy = policy
        self._cache_nbytes = cache_nbytes
        self._generate_s = self._whole_s = 0.0
        self._gathered = zero.params.gathered
        self._sharded = [param.bucket.index for param in zero.params if param.is_sharded]
        self.is_whole = False
        """Sharded parameters were gathered once for all tokens."""

    def run(self, generate: Callable[[bool], T]) -> T:
        """Return what `generate` returns, whose argument is whether all parameters are whole. Collective if parameters
        are sharded.

        Raises ShardingError if ranks have other weights, or generation has changed some; PolyaccelError if it failed on
        another rank.
        """
        began = perf_counter()
        try:
            self._zero.params.wait_all_gathers()
            if not self._sharded:
                return self._verified(generate)
            with self._weights():
                return self._verified_together(generate)
        finally:
            self._whole_s = perf_counter() - began

    @property
    def times(self) -> RolloutTimes:
        """How long `run` took."""
        return RolloutTimes(self._whole_s - self._generate_s, self._generate_s)

    def _timed(self, generate: Callable[[bool], T], is_whole: bool) -> T:
        began = perf_counter()
        try:
            return generate(is_whole)
        finally:
            self._generate_s = perf_counter() - began

    # One rank alone.

    def _verified(self, generate: Callable[[bool], T]) -> T:
        before, written = checksums(self._adapter.whole_values()), self._adapter.written()
        result = self._timed(generate, True)
        if changed := self._changed(before, written):
            raise _changed_by_generation(changed)
        return result

    def _changed(self, before: dict[str, int], written: set[str]) -> list[str]:
        """Return whole parameters whose bits have changed; forget writes to others, except those `written` before."""
        changed = list(changed_names(before, checksums(self._adapter.whole_values())))
        self._adapter.on_adopted(self._adapter.written() - written - {*changed})
        return changed

    # All ranks.

    def _verified_together(self, generate: Callable[[bool], T]) -> T:
        adapter = self._adapter
        before, written, lost = checksums(adapter.whole_values()), adapter.written(), len(adapter.lost_writes)
        self._zero.user_writes.require_same(before)
        failure: Exception | None = None
        with nullcontext() if self.is_whole else adapter.sharding.one_pass():
            try:
                result = self._timed(generate, self.is_whole)
            except Exception as error:
                if isinstance(error, CommError) or self._zero.unsharder.is_voting:
                    raise  # the other ranks are inside of a collective: nothing can be exchanged any more
                failure = error
        changed = [*adapter.lost_writes[lost:], *self._changed(before, written)]
        del adapter.lost_writes[lost:]
        for fqn in changed:
            if adapter.is_sharded(fqn):
                note_version(adapter.parameter(fqn))  # it is reported here, and its values go
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        reports = self._zero.communicator.all_gather_object((text, changed))
        if failure is not None:
            raise failure
        for rank, (problem, _) in enumerate(reports):
            if problem:
                hint = "let it not raise there, or on every rank"
                raise PolyaccelError(f"generation failed on rank {rank}: {problem}", hint=hint, value=rank)
        for _, names in reports:
            if names:
                raise _changed_by_generation(names)
        return result

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """Hold all sharded parameters if there is room. Collective."""
        self.is_whole = self._has_room() and self._has_reserved()
        held: list[int] = []
        try:
            for index in self._sharded if self.is_whole else ():
                self._zero.params.unshard(index)
                held.append(index)
            yield
        finally:
            for index in reversed(held):
                self._zero.params.reshard(index)
            if held:
                self._gathered.trim()  # else the pool would keep a whole model for the next rollout

    def _has_room(self) -> bool:
        """Whether every rank can hold all parameters next to its cache, by its free memory. Collective."""
        numel = sum(self._gathered[index].bucket.numel for index in self._sharded)
        needed = missing_nbytes(self._gathered, self._sharded)
        accelerator = self._zero.accelerator
        stats = accelerator.memory_stats()
        host, rank = socket.gethostname(), self._zero.communicator.rank
        place = host if torch_device_of(accelerator).type == "cpu" else f"{host} {rank}"
        mine = place, sum(needed.values()), stats.free_nbytes or stats.total_nbytes, self._cache_nbytes
        most = self._policy.most_numel
        wants = self._policy.gathers_once and (most is None or numel <= most)
        gathered = self._zero.communicator.all_gather_object((wants or not needed, mine))
        return all(wants for wants, _ in gathered) and fits_whole([FreeMemory(*memory) for _, memory in gathered])

    def _has_reserved(self) -> bool:
        """Whether every rank has allocated memory for all parameters. Collective."""
        has_memory = True
        try:
            reserve(self._gathered, self._sharded)
        except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
            has_memory = False
            log.warning("generation gathers parameters unit by unit: %s", error)
        if all(self._zero.communicator.all_gather_object(has_memory)):
            return True
        self._gathered.trim()
        return False


def _changed_by_generation(names: list[str]) -> ShardingError:
    return ShardingError(
        f"parameter {names[0]!r} was changed by generation",
        hint="undo what was fused into it, bit for bit, before generate returns; change weights between rollouts",
        value=names,
    )
