"""The state that an engine trains, in whatever memory: parameters, gradients, optimizer states, and their update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.zero.buckets.bucket_params import Replica
from polyaccel.zero.plan.layout import ShardLayout, Slot
from polyaccel.zero.update.consistency import Consistency
from polyaccel.zero.update.optimizer_step import StepResult
from polyaccel.zero.update.optimizers import Group, SliceOptimizer

T = TypeVar("T")


class TrainedParams(Protocol):
    """The parameters of a `TrainedState`."""

    def wait_all_gathers(self) -> None:
        """Wait until every parameter is up to date."""

    def all_gather_masters(self) -> None:
        """Make the parameters again from master weights that were written, on every rank. Collective."""

    def replicas(self, most_numel: int) -> tuple[Replica, ...]:
        """The copies that this rank has for itself of what others hold too, in pieces of at most so many elements."""

    def replica_bytes(self, piece: Replica) -> bytes:
        """The bits of one of `replicas`."""


class TrainedMemory(Protocol):
    """The memory of a `TrainedState` on this rank: bytes by purpose, the same words for both."""

    def estimated(self) -> Iterable[tuple[str, int]]:
        """What was estimated, as far as a plan of buffers knows it."""

    def measured(self) -> Iterable[tuple[str, int]]:
        """What is there now, and of what is there only inside a step the most that there was."""


class TrainedState(Protocol):
    """The part of a step that engines and checkpoints use. `ZeroEngine` has it, for the engine's own buffers."""

    @property
    def layout(self) -> ShardLayout: ...

    @property
    def optimizer(self) -> SliceOptimizer | None: ...

    @property
    def params(self) -> TrainedParams: ...

    @property
    def steps(self) -> dict[str, int]:
        """How many updates each trained parameter has had."""

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients that no update has used yet."""

    @property
    def memory(self) -> TrainedMemory: ...

    @property
    def consistency(self) -> Consistency:
        """Whether an update or a load failed in the middle."""

    def update(self, groups: Sequence[Group], loss_scale: float = 1.0) -> StepResult:
        """Use the gradients divided by `loss_scale`, the factor that they hold, and forget them. Collective."""

    def discard_gradients(self) -> None:
        """Forget all gradients."""

    def local_shards(self) -> Iterator[tuple[Slot, str, int, Buffer]]:
        """The pieces that this rank saves, in global coordinates: (slot, kind, start, buffer)."""

    def shards_to_load(self) -> Iterator[tuple[Slot, str, int, Buffer]]:
        """The pieces that this rank must read to continue, as buffers to overwrite."""

    def close(self) -> None:
        """Release everything."""


def over_stages(beyond: Communicator | None, own: Mapping[str, T]) -> dict[str, T]:
    """What the stages of a pipeline have under their own names, as one mapping. `beyond` are the ranks that hold the
    other parameters of the same model, None where there are none. Collective where there are some."""
    if beyond is None:
        return dict(own)
    return {name: value for of_rank in beyond.all_gather_object(dict(own)) for name, value in of_rank.items()}
