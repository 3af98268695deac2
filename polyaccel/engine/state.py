"""What an engine trains, whatever it rests on: parameters, gradients and optimizer states, with their update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from polyaccel.buffer import Buffer
from polyaccel.zero.layout import ShardLayout, Slot
from polyaccel.zero.optimizers import Group, SliceOptimizer
from polyaccel.zero.update import StepResult


class TrainedParams(Protocol):
    """The parameters of a `TrainedState`."""

    def fence(self) -> None:
        """Return once every parameter is up to date."""

    def publish_masters(self) -> None:
        """Make parameters of master weights that were written, everywhere. Collective."""


class TrainedState(Protocol):
    """What engines and checkpoints ask of a step: `ZeroStep` is one, on the engine's own buffers."""

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

    def update(self, groups: Sequence[Group], loss_scale: float = 1.0) -> StepResult:
        """Use the gradients, which were multiplied with `loss_scale`, and forget them. Collective."""

    def discard_gradients(self) -> None:
        """Forget all gradients."""

    def require_whole(self) -> None:
        """Raise PolyaccelError after an update that failed in the middle."""

    def mend(self) -> None:
        """All parameters and states were loaded, and belong to one step again."""

    def owned_pieces(self) -> Iterator[tuple[Slot, str, int, Buffer]]:
        """What this rank answers for, in global coordinates: (slot, kind, start, buffer)."""

    def needed_pieces(self) -> Iterator[tuple[Slot, str, int, Buffer]]:
        """What this rank must read to go on, to be overwritten."""

    def close(self) -> None:
        """Let go of everything."""
