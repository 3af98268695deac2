"""Schedules that a script makes itself, with what DeepSpeed does at their first step and for wrong types."""

from __future__ import annotations

import logging
from typing import Any

from polyaccel.engine import lr_schedules

_LOG = logging.getLogger(__name__)
_TYPES = ("log", "linear")


def _known_type(given: str) -> Any:
    """The type of a warmup, or DeepSpeed's own for an unknown one."""
    if given not in _TYPES:
        _LOG.warning("warmup_type %r is unknown: it is read as 'log', as DeepSpeed does", given)
    return given if given in _TYPES else "log"


class WarmupLR(lr_schedules.WarmupLR):
    """A rise to the rates of the groups, then constant ones."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        kind = _known_type(warmup_type)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, kind, last_batch_iteration)


class WarmupDecayLR(lr_schedules.WarmupDecayLR):
    """A rise, then a linear fall."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        rates, kind = (warmup_min_lr, warmup_max_lr), _known_type(warmup_type)
        super().__init__(optimizer, total_num_steps, *rates, warmup_num_steps, kind, last_batch_iteration)


class WarmupCosineLR(lr_schedules.WarmupCosineLR):
    """A rise, then half a cosine."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        ratios, kind = (warmup_min_ratio, warmup_num_steps, cos_min_ratio), _known_type(warmup_type)
        super().__init__(optimizer, total_num_steps, *ratios, kind, last_batch_iteration)


class OneCycle(lr_schedules.OneCycle):
    """One rise and fall. The optimizer's first step has the lowest momentum, as in DeepSpeed."""

    def _apply(self) -> None:
        super()._apply()
        if self.last_batch_iteration == -1 and self.momenta_at(-1) is not None:
            self._set_momenta(self.min_moms)


VALID_LR_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""DeepSpeed's schedules, each a class of `deepspeed.runtime.lr_schedules`; a config can name polyaccel's own too."""
_OWN: dict[type, type] = {
    lr_schedules.OneCycle: OneCycle,
    lr_schedules.WarmupCosineLR: WarmupCosineLR,
    lr_schedules.WarmupDecayLR: WarmupDecayLR,
    lr_schedules.WarmupLR: WarmupLR,
}


def adopt(schedule: Any) -> None:
    """Make the schedule that a config names one of the classes above, which scripts ask for.

    Args:
        schedule: What the engine made; others are left alone.
    """
    own = _OWN.get(type(schedule))
    if own is not None:
        schedule.__class__ = own
        if own is OneCycle and schedule.last_batch_iteration == -1:
            schedule._apply()
