"""Backward passes of an engine: when one begins and ends, what its gradients are scaled by, and whether it reduces
them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from polyaccel.errors import InvariantError, PolyaccelError
from polyaccel.torch.batch import at_least_float32
from polyaccel.zero.policy import Placement

if TYPE_CHECKING:
    from polyaccel.torch.engine import TorchEngine


class BackwardPasses:
    """The passes of `engine`, its own and those that a user's `loss.backward()` starts. See [Note: Passes] in the
    adapter."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._scaled_by_user = False
        self.reduce = True
        """Whether passes reduce their gradients; False inside `no_sync`."""

    def run(self, loss: Tensor, *, retain_graph: bool) -> None:
        """Compute the gradients of `loss`, a scalar that accumulation has scaled already, and start reducing them."""
        engine = self._engine
        with engine.timer("backward"):
            self._begin(1.0)
            try:
                root = self._scaled(loss) if self._scales else loss
                root.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            except BaseException:
                engine.zero.abandon_pass()  # reducing half a pass could leave the other ranks waiting
                engine.adapter.end_pass()
                raise
            self.end()

    def scale_by_hand(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale; the next pass is begun by its user."""
        self._scaled_by_user = True
        return self._scaled(loss)

    def begin_foreign(self) -> None:
        """A `loss.backward()` that is not ours began."""
        if self._scales and not self._scaled_by_user:
            raise PolyaccelError(
                "loss.backward() was called on an fp16 loss that is not scaled: small gradients would vanish",
                cure="call engine.backward(loss), or engine.scale(loss).backward()",
            )
        self._begin(1.0 / self._engine.gradient_accumulation_steps())

    def end(self) -> None:
        """The pass is over, and its gradients are there."""
        with self._engine.timer("reduce"):
            self._engine.adapter.end_pass()
            self._engine.zero.end_pass()
        self._scaled_by_user = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `TorchEngine.no_sync`."""
        if not self.reduce:
            raise InvariantError("no_sync is nested in no_sync", cure="use one at a time")
        self.reduce = False
        try:
            yield
        finally:
            self.reduce = True

    @property
    def _scales(self) -> bool:
        return self._engine.loss_scaler.loss_scale != 1.0

    def _scaled(self, loss: Tensor) -> Tensor:
        return at_least_float32(loss) * self._engine.loss_scaler.loss_scale

    def _begin(self, gradient_factor: float) -> None:
        engine = self._engine
        engine.adapter.gradient_factor = gradient_factor
        each_pass = engine.runtime.policy.grads is Placement.SHARDED
        engine.zero.begin_pass(reduce=self.reduce and (each_pass or engine.counters.is_boundary))
