"""Learning-rate schedules as data: a list of phases, of which three published schedules are instances.

The first optimizer step runs at the first ratio, as under torch's and transformers' schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from polyaccel.engine.lr_curves import Phase, phases_ratio, restarts
from polyaccel.engine.lr_schedule_base import HasParamGroups, Schedule, check_arguments


class PhasedLR(Schedule):
    """Each group's own rate times the ratio of `phases`, one after the other; after the last one it stays.

    A phase has `steps`, `shape`, `start` and `end`, see `lr_curves.Phase`. Raises ConfigError naming every parameter
    that is wrong.
    """

    def __init__(
        self, optimizer: HasParamGroups, phases: Sequence[Mapping[str, Any]], last_batch_iteration: int = -1
    ) -> None:
        given = tuple(Phase(**phase) for phase in check_arguments(self, locals())["phases"])
        self._begin(optimizer, lambda: given, last_batch_iteration)

    def _begin(
        self, optimizer: HasParamGroups, phases: Callable[[], Iterable[Phase]], last_batch_iteration: int
    ) -> None:
        """Construct the base; `phases` gives them from the first one, perhaps without end."""
        self._phases = phases
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def lrs_at(self, iteration: int) -> list[float]:
        ratio = phases_ratio(self._phases(), iteration + 1)
        return [lr * ratio for lr in self._base_lrs]


class WarmupStableDecayLR(PhasedLR):
    """Rise linearly, stay, and fall to `min_ratio` in the last `decay_num_steps` of `total_num_steps` (WSD: Hu et al.
    2024, arXiv 2404.06395). Raises ConfigError naming every parameter that is wrong.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        decay_num_steps: int,
        warmup_num_steps: int = 0,
        warmup_min_ratio: float = 0.0,
        min_ratio: float = 0.0,
        decay_type: Literal["linear", "cosine", "sqrt", "exponential"] = "sqrt",
        last_batch_iteration: int = -1,
    ) -> None:
        given = check_arguments(self, locals())
        warmup, decay = given["warmup_num_steps"], given["decay_num_steps"]
        phases = (
            Phase(warmup, "linear", given["warmup_min_ratio"], 1.0),
            Phase(given["total_num_steps"] - warmup - decay, "constant", 1.0, 1.0),
            Phase(decay, given["decay_type"], 1.0, given["min_ratio"]),
        )
        self._begin(optimizer, lambda: phases, last_batch_iteration)


class WarmupCosineRestartsLR(PhasedLR):
    """Rise linearly, then fall along half cosines that begin again, each `cycle_growth` times as long and from
    `top_factor` times the ratio (SGDR: Loshchilov and Hutter 2016, arXiv 1608.03983).

    Raises ConfigError naming every parameter that is wrong.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        cycle_num_steps: int,
        cycle_growth: float = 1.0,
        warmup_num_steps: int = 0,
        warmup_min_ratio: float = 0.0,
        min_ratio: float = 0.0,
        top_factor: float = 1.0,
        last_batch_iteration: int = -1,
    ) -> None:
        given = check_arguments(self, locals())
        warmup = Phase(given["warmup_num_steps"], "linear", given["warmup_min_ratio"], 1.0)

        def phases() -> Iterable[Phase]:
            cycles = restarts(
                first=given["cycle_num_steps"],
                growth=given["cycle_growth"],
                top_factor=given["top_factor"],
                floor_ratio=given["min_ratio"],
            )
            return chain((warmup,), cycles)

        self._begin(optimizer, phases, last_batch_iteration)


class WarmupInverseSqrtLR(PhasedLR):
    """Rise linearly, then fall as the root of `timescale / (timescale + n)` n steps later (Vaswani et al. 2017, arXiv
    1706.03762). A `timescale` of None is the steps of the warm-up, as there.

    Raises ConfigError naming every parameter that is wrong.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        warmup_num_steps: int,
        timescale: int | None = None,
        warmup_min_ratio: float = 0.0,
        min_ratio: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        given = check_arguments(self, locals())
        warmup = given["warmup_num_steps"]
        phases = (
            Phase(warmup, "linear", given["warmup_min_ratio"], 1.0),
            Phase(given["timescale"] or warmup, "inverse_sqrt", 1.0, given["min_ratio"]),
        )
        self._begin(optimizer, lambda: phases, last_batch_iteration)
