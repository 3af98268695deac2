"""Gradient accumulation that the caller counts: the config has `"managed_gradient_accumulation": false`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel_deepspeed.engine.errors import WrongCall


class CallerAccumulates(TorchEngine):
    """An engine whose `step` always updates, if its user counts micro-batches. Each backward pass only accumulates;
    losses are divided by `gradient_accumulation_steps` as ever."""

    _is_unmanaged = False
    _backward_calls = 0
    """Calls of `backward` since the last step."""

    def leave_accumulation_to_caller(self) -> None:
        """Let `step` alone end an accumulation from now on."""
        self._is_unmanaged = True
        self.counters.boundary_by_hand = False

    def managed_gradient_accumulation(self) -> bool:
        """Return whether micro-batches are counted here."""
        return not self._is_unmanaged

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """As `TorchEngine.backward`."""
        shared = super().backward(loss, retain_graph, scale_wrt_gas)
        self._backward_calls += 1
        return shared

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """As `TorchEngine.step`; an update at each call where the caller accumulates."""
        self.require_synced("step was called inside no_sync")
        samples, calls, self._backward_calls = self.global_samples, self._backward_calls, 0
        if not self._is_unmanaged:
            super().step(lr_kwargs)
            return
        self.counters.boundary_by_hand = True
        try:
            super().step(lr_kwargs)
        finally:
            self.counters.boundary_by_hand = False
        micro = self.train_batch_size() // self.gradient_accumulation_steps()
        self.counters.global_samples = samples + micro * calls

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """As `Engine.set_gradient_accumulation_boundary`. Raises PolyaccelError where the caller accumulates."""
        self.require_managed("set_gradient_accumulation_boundary")
        super().set_gradient_accumulation_boundary(is_boundary)

    def require_managed(self, name: str) -> None:
        """Raise PolyaccelError where the caller accumulates, whose boundary is `step`."""
        if self._is_unmanaged:
            raise WrongCall(
                f"{name} was called, and managed_gradient_accumulation is false",
                hint="call engine.step() where an accumulation ends",
                value=name,
            )

    def scale(self, loss: Tensor) -> Tensor:
        """As `TorchEngine.scale`. Raises PolyaccelError for other than one value."""
        if loss.numel() != 1:
            shape = tuple(loss.shape)
            raise WrongCall(f"scale takes a scalar tensor: shape {shape}", hint="pass the loss", value=shape)
        return super().scale(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """As `TorchEngine.no_sync`."""
        self.require_synced("no_sync is nested in no_sync")
        return super().no_sync()

    def require_synced(self, what: str) -> None:
        """Raise PolyaccelError inside `no_sync`, where `what` may not be."""
        if not self._passes.reduce:
            raise WrongCall(what, hint="leave the no_sync block first")
