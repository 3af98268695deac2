"""`deepspeed.runtime.fp16.loss_scaler`: loss scales over `polyaccel.engine.loss_scale`, for loops of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyaccel.engine.loss_scale import LossScalePolicy
from polyaccel.engine.loss_scale import LossScaler as Scaler
from polyaccel.errors import LossScaleError, PolyaccelError

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"


class LossScalerBase:
    """A loss scale."""

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale
        self.dtype: torch.dtype | None = None

    @property
    def loss_scale(self) -> float:
        """The factor that losses are multiplied with."""
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """Return gradients times the scale."""
        return tuple(self.loss_scale * one for one in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """Take note of a step."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, in float32."""
        return loss.float() * self.loss_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Compute the gradients of the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class LossScaler(LossScalerBase):
    """A scale that never moves."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False: nothing is looked at."""
        return False


class DynamicLossScaler(LossScalerBase):
    """A scale that halves after overflows, and doubles after a window of steps without one."""

    dynamic = True

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        policy = LossScalePolicy(
            initial_scale=float(init_scale),
            dynamic=True,
            window=scale_window,
            hysteresis=delayed_shift,
            consecutive_hysteresis=consecutive_hysteresis,
            min_scale=float(min_scale),
        )
        self._scaler = Scaler(policy)
        super().__init__(init_scale)
        self.scale_factor, self.scale_window, self.min_scale = 2.0, scale_window, min_scale
        self.delayed_shift, self.consecutive_hysteresis = delayed_shift, consecutive_hysteresis
        self.raise_error_at_min_scale, self.dtype = raise_error_at_min_scale, dtype
        self.cur_iter, self.last_overflow_iter = 0, -1

    @property
    def cur_scale(self) -> float:
        """The factor that losses are multiplied with."""
        return self._scaler.loss_scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        state = self._scaler.state_dict()
        self._scaler.load_state_dict({**state, "loss_scale": float(scale)})

    @property
    def cur_hysteresis(self) -> int:
        """How many overflows may come before the scale halves, with the one that does it."""
        return int(self._scaler.state_dict()["tolerance"])

    def has_overflow_serial(self, params: Iterable[Any]) -> bool:
        """Return whether a gradient of `params` is not finite."""
        return any(one.grad is not None and not bool(torch.isfinite(one.grad).all()) for one in params)

    def update_scale(self, overflow: bool) -> None:
        """Take note of a step. Raises LossScaleError for an overflow at the smallest scale, if that is asked for."""
        try:
            self._scaler.update(overflow)
        except LossScaleError:
            if self.raise_error_at_min_scale:
                raise
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1


def CreateLossScaler(  # noqa: N802 - DeepSpeed's name
    dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: Mapping[str, Any] | None
) -> LossScalerBase:
    """Return the loss scaler of fp16 by DeepSpeed's arguments; one that is 1 for other types."""
    if dtype == torch.half and dynamic_scaling:
        if dynamic_loss_args is None:
            raise PolyaccelError("a dynamic loss scale was given no numbers", hint="pass dynamic_loss_args")
        return DynamicLossScaler(dtype=dtype, **{**_DYNAMIC, **dynamic_loss_args})
    scaler = LossScaler(scale=static_loss_scale if dtype == torch.half else 1.0)
    scaler.dtype = dtype
    return scaler


_DYNAMIC: dict[str, Any] = {
    INITIAL_LOSS_SCALE: 2**32,
    SCALE_WINDOW: 1000,
    MIN_LOSS_SCALE: 1,
    DELAYED_SHIFT: 1,
    CONSECUTIVE_HYSTERESIS: False,
}


def to_python_float(t: Any) -> float:
    """Return a tensor of one element as a number."""
    return float(t.item() if hasattr(t, "item") else t[0])
