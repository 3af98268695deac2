"""Alarms of what the ranks run on: one that all others wait for, a loader that starves them, memory that creeps up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from polyaccel.observability.alerts.robust import MonotonicGrowth
from polyaccel.observability.alerts.settings import AlarmSettings, RankFigures
from polyaccel.observability.metrics import Alarm
from polyaccel.utils.sizes import size

_IN_A_ROW = 3
"""Looks in a row that must find the same, so that one pause of a machine is not an alarm."""
_LEAST_GROWTH_NBYTES = 16 << 20


class MachineAlarms:
    """Looks at what all ranks have sent about the last steps. The first look counts for nothing: libraries warm up."""

    def __init__(self, settings: AlarmSettings) -> None:
        self._settings = settings
        self._looks = 0
        self._slow: dict[int, int] = {}
        self._starved: dict[int, int] = {}
        self._creeps: defaultdict[int, MonotonicGrowth] = defaultdict(MonotonicGrowth)

    def look(self, step: int, figures: Sequence[RankFigures]) -> Iterator[Alarm]:
        """The alarms of the steps that end with `step`."""
        self._looks += 1
        if self._looks == 1:
            return
        if self._settings.straggler:
            yield from self._stragglers(step, figures)
        if self._settings.data:
            yield from self._starving(step, figures)
        if self._settings.memory_growth:
            yield from self._creeping(step, figures)

    def _stragglers(self, step: int, figures: Sequence[RankFigures]) -> Iterator[Alarm]:
        """The slowest rank of each stage, where the others of the stage need much less."""
        stages: defaultdict[int, list[RankFigures]] = defaultdict(list)
        for one in figures:
            if one.own_s is not None and one.steps:
                stages[one.place].append(one)
        slow: dict[int, int] = {}
        for stage in stages.values():
            if len(stage) < 2:
                continue
            own_s = {one.rank: sum((one.own_s or {}).values()) / one.steps for one in stage}
            worst = max(stage, key=lambda one: own_s[one.rank])
            others = [one for one in stage if one is not worst]
            usual_s = median(own_s[one.rank] for one in others)
            step_s = max(one.seconds / one.steps for one in stage)
            lost = (own_s[worst.rank] - usual_s) / step_s if step_s else 0.0
            if lost <= self._settings.straggler:
                continue
            rank = worst.rank
            slow[rank] = self._slow.get(rank, 0) + 1
            if slow[rank] >= _IN_A_ROW:
                phase = _most_behind(worst, others)
                what = (
                    f"all wait for rank {rank}, {100 * lost:.0f} % of each step up to {step:,}: its own work takes "
                    f"{1e3 * own_s[rank]:.0f} ms, that of the others {1e3 * usual_s:.0f} ms, most of it in {phase}"
                )
                hint = "look for other processes, throttling or a slower device on its host, or for longer batches"
                yield Alarm(kind="straggler", step=step, value=lost, ranks=(rank,), sentence=f"{what}: {hint}")
        self._slow = slow

    def _starving(self, step: int, figures: Sequence[RankFigures]) -> Iterator[Alarm]:
        shares = {
            figure.rank: figure.own_s["data"] / figure.seconds
            for figure in figures
            if figure.own_s is not None
            and figure.seconds
            and figure.own_s.get("data", 0.0) > self._settings.data * figure.seconds
        }
        self._starved = {rank: self._starved.get(rank, 0) + 1 for rank in shares}
        worst = max(shares, key=lambda rank: shares[rank], default=None)
        if worst is not None and self._starved[worst] >= _IN_A_ROW:
            what = f"rank {worst} waits for its data {100 * shares[worst]:.0f} % of each step up to {step:,}"
            hint = "give the loader workers (num_workers), prepare samples ahead, or read them from a faster place"
            yield Alarm(kind="data", step=step, value=shares[worst], ranks=(worst,), sentence=f"{what}: {hint}")

    def _creeping(self, step: int, figures: Sequence[RankFigures]) -> Iterator[Alarm]:
        for figure in figures:
            if figure.memory_nbytes is None:
                continue
            found = self._creeps[figure.rank].add(float(figure.memory_nbytes))
            if found is None:
                continue
            first, last, looks = found
            growth = last - first
            if growth < max(_LEAST_GROWTH_NBYTES, self._settings.memory_growth * first):
                continue
            steps = looks * figure.steps
            what = (
                f"the memory of rank {figure.rank} creeps up: {size(growth)} more in {steps:,} steps, {size(last)} now"
            )
            left = figure.total_nbytes - last
            if left > 0:
                what += f", and none is left in {steps * left / growth:,.0f}"
            hint = "look for what keeps tensors over steps: losses without .item(), outputs in a list, a cache"
            yield Alarm(kind="memory", step=step, value=growth, ranks=(figure.rank,), sentence=f"{what}: {hint}")


def _most_behind(worst: RankFigures, others: Sequence[RankFigures]) -> str:
    """The phase in which a rank needs most more than the others do."""

    def behind(phase: str) -> float:
        usual = median((one.own_s or {}).get(phase, 0.0) / one.steps for one in others)
        return (worst.own_s or {})[phase] / worst.steps - usual

    return max(worst.own_s or {"other": 0.0}, key=behind)
