"""Updates that the device plays from a recording, which launches nothing piece by piece.

[Note: Recorded updates]
An update launches a few kernels a bucket, whose addresses and lengths are those of the step before. So they are
recorded once (`Accelerator.record_work`) and played. What changes from step to step (learning rate, corrections by the
number of the update, loss scale and clip factor) is written to device memory before, and the kernels read it there.
A recording holds for the buffers and stretches that it was made of; where a step has others (a parameter without a
gradient, states that came back to other memory), it runs unrecorded once, by which kernels are compiled, and is
recorded the next time. Constants that are 0 or 1 may decide what is computed at all, so they are part of a recording.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.ops.base import Rule
from polyaccel.ops.optimizers import Optimizer
from polyaccel.ops.recorded import RECORDED_UPDATE
from polyaccel.zero.update.optimizers import ElementwiseOptimizer, Group, Run, Shard

log = getLogger(__name__)

MOST_RECORDINGS = 8
"""That are kept; the one that was played least recently is dropped for another."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One kernel call: a rule on buffers of equal length."""

    rule: Rule
    master: Buffer
    grad: Buffer
    states: tuple[Buffer, ...]
    out: Buffer | None
    kernel: Callable[..., None]

    @classmethod
    def of_run(cls, shard: Shard, run: Run, rule: Rule) -> _Call:
        master, grad, out, states = shard.cut(run)
        used = tuple(states[name] for name, _ in rule.formula.states)
        return cls(rule, master, grad, used, out, shard.kernels[RECORDED_UPDATE])

    @property
    def fixed(self) -> tuple[float | None, ...]:
        """The constants that are part of a recording."""
        return tuple(value if value in (0.0, 1.0) else None for value in self.rule.constants)

    @property
    def key(self) -> tuple[Any, ...]:
        buffers = (self.master, self.grad, *self.states, *(() if self.out is None else (self.out,)))
        return self.rule.formula.name, self.master.numel, self.fixed, *(buffer.data_ptr() for buffer in buffers)

    def run(self, numbers: Buffer) -> None:
        self.kernel(self.rule.formula, self.fixed, numbers, self.master, self.grad, self.states, self.out)

    def bump_version(self) -> None:
        self.rule.bump_version(self.master, self.states, self.out)


class RecordedOptimizer(ElementwiseOptimizer):
    """An elementwise optimizer whose update of all shards is one recording of `accelerator`, where all of them rest.

    See [Note: Recorded updates].
    """

    def __init__(self, row: Optimizer, accelerator: Accelerator) -> None:
        super().__init__(row)
        self._accelerator = accelerator
        self._numbers: Buffer | None = None
        self._known: dict[tuple[Any, ...], Callable[[], None] | None] = {}
        """What plays each recording, the last one played last; None where the calls have run and are not recorded."""
        self.recorded = self.played = 0
        """How many recordings there were, and how many updates were played."""

    def update(
        self, shards: Iterable[Shard], groups: Sequence[Group], grad_scale: float, communicator: Communicator
    ) -> Iterator[Shard]:
        held = list(shards)
        calls = [
            _Call.of_run(shard, run, self.row.rule(groups[shard.bucket.kind.group], run.step))
            for shard in held
            for run in shard.runs
            if run.numel
        ]
        if calls:
            self._update(calls, grad_scale)
        yield from held

    def _update(self, calls: Sequence[_Call], grad_scale: float) -> None:
        rows = [(*call.rule.constants, grad_scale) for call in calls]
        numbers = self._write([value for row in rows for value in row])
        ends = [sum(map(len, rows[: index + 1])) for index in range(len(rows))]
        places = [numbers.view(end - len(row), len(row)) for end, row in zip(ends, rows, strict=True)]

        def launch() -> None:
            for call, place in zip(calls, places, strict=True):
                call.run(place)

        key = numbers.data_ptr(), *(call.key for call in calls)
        if key not in self._known:
            self._keep(key, None)
            launch()
            return
        play = self._known.pop(key)
        if play is None:
            play = self._accelerator.record_work(launch)
            self.recorded += 1
        self._keep(key, play)
        play()
        self.played += 1
        for call in calls:
            call.bump_version()

    def _keep(self, key: tuple[Any, ...], play: Callable[[], None] | None) -> None:
        self._known[key] = play
        if len(self._known) > MOST_RECORDINGS:
            del self._known[next(iter(self._known))]
            if self.recorded == MOST_RECORDINGS:
                log.warning("updates were recorded %d times: their buffers change from step to step", self.recorded)

    def _write(self, values: Sequence[float]) -> Buffer:
        """Write what changes from step to step to device memory, in the order of the current stream."""
        if self._numbers is None or self._numbers.numel < len(values):
            self._known.clear()
            self._numbers = self._accelerator.allocate(len(values), DType.FLOAT64)
        numbers = self._numbers.view(0, len(values))
        numbers.from_bytes(array("d", values).tobytes())
        return numbers
