"""Learning-rate curves: pure functions of the iteration, without an optimizer.

`iteration` counts finished optimizer steps from zero; -1 is the time before the first one, so the value at `n` governs
optimizer step `n + 2` (the first step runs at -1). Sources: the 1-cycle policy and the range test are Smith 2018,
"A disciplined approach to neural network hyper-parameters: Part 1" (arXiv 1803.09820), after Smith 2017, "Cyclical
learning rates for training neural networks" (arXiv 1506.01186); the parameters are those of DeepSpeed's schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import cos, floor, log, pi, sqrt
from typing import Literal

WarmupType = Literal["log", "linear"]
PhaseShape = Literal["constant", "linear", "cosine", "sqrt", "exponential", "inverse_sqrt"]


def warmup_ramp(iteration: int, *, num_steps: int, kind: WarmupType) -> float:
    """Rise from 0 to 1 at `num_steps` and stay: `log` is ln(t + 1) / ln(W), `linear` t / W, W at least 2."""
    width = max(2, num_steps)
    if iteration >= width:
        return 1.0
    done = max(0, iteration)
    return log(done + 1) / log(width) if kind == "log" else done / width


def linear_decay(iteration: int, *, begin: int, end: int) -> float:
    """Falls from 1 at iteration `begin` to 0 at `end`, and stays there."""
    return max(0.0, (end - iteration) / max(1, end - begin))


def cosine_decay(iteration: int, *, begin: int, end: int, floor_ratio: float) -> float:
    """Fall along a half cosine to `floor_ratio` at `end - 1`; `begin` is one step down, as in DeepSpeed."""
    progress = min(1.0, (iteration - begin + 1) / max(1, end - begin))
    return floor_ratio + (1.0 - floor_ratio) * (1.0 + cos(pi * progress)) / 2.0


def range_test_factor(iteration: int, *, step_size: int, step_rate: float, staircase: bool) -> float:
    """1 before the first step, then `step_rate` more for every `step_size` steps, smoothly or in stairs."""
    interval = (iteration + 1) / step_size
    return 1.0 + step_rate * (floor(interval) if staircase else interval)


@dataclass(frozen=True, slots=True)
class CycleShape:
    """One cycle: `first_steps` up, `second_steps` down, then a decay that never ends.

    A stair count of n moves in n equal stairs instead of at every step; 0 moves at every step. `decay_steps` is the
    unit of the decay, 0 for no decay.
    """

    first_steps: int
    second_steps: int
    first_stairs: int = 0
    second_stairs: int = 0
    decay_steps: int = 0

    @property
    def total_steps(self) -> int:
        return self.first_steps + self.second_steps

    def height(self, iteration: int) -> float:
        """How far up the cycle is, from 0 (its foot) to 1 (its top). Only before the cycle has ended."""
        position = (iteration + 1) % self.total_steps
        if position <= self.first_steps:
            steps, of, stairs = position, self.first_steps, self.first_stairs
        else:
            steps, of, stairs = self.total_steps - position, self.second_steps, self.second_stairs
        # Whole numbers first: a float a hair below a stair would fall a whole stair.
        return (steps * stairs // of) / stairs if stairs else steps / of

    def has_ended(self, iteration: int) -> bool:
        return iteration >= self.total_steps

    def decay_intervals(self, iteration: int) -> float:
        """How many times `decay_steps` have passed since the cycle ended; 0 without a decay."""
        return (iteration - self.total_steps + 1) / self.decay_steps if self.decay_steps else 0.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a schedule: `steps` optimizer steps from the ratio `start` to the ratio `end`, in one of these shapes.

    `inverse_sqrt` falls from `start` as the root of `steps / (steps + n)` at its step n, to `end` at least, and has no
    end (Vaswani et al. 2017, arXiv 1706.03762, section 5.3). `cosine` is a half cosine (Loshchilov and Hutter 2016,
    arXiv 1608.03983, equation 5). `sqrt` goes as the root of the part done ("1-sqrt", Hägele et al. 2024, arXiv
    2405.18392), `exponential` by equal factors (Hu et al. 2024, arXiv 2404.06395).
    """

    steps: int
    shape: PhaseShape
    start: float
    end: float

    @property
    def is_endless(self) -> bool:
        return self.shape == "inverse_sqrt"

    def ratio_at(self, step: int) -> float:
        """The ratio at step `step` of this phase, counted from zero."""
        if self.shape == "inverse_sqrt":
            return max(self.end, self.start * sqrt(self.steps / (self.steps + step)))
        done = step / self.steps
        if self.shape == "exponential":
            return float(self.start * (self.end / self.start) ** done)
        way = {"constant": 0.0, "linear": done, "cosine": (1.0 - cos(pi * done)) / 2.0, "sqrt": sqrt(done)}[self.shape]
        return self.start + (self.end - self.start) * way


def phases_ratio(phases: Iterable[Phase], step: int) -> float:
    """The ratio of `phases`, one after the other, at `step`, counted from zero; after the last one it stays."""
    ratio = 1.0
    for phase in phases:
        if phase.is_endless or step < phase.steps:
            return phase.ratio_at(step)
        step, ratio = step - phase.steps, phase.start if phase.shape == "constant" else phase.end
    return ratio


def restarts(*, first: int, growth: float, top_factor: float, floor_ratio: float) -> Iterator[Phase]:
    """Half cosines without end, each `growth` times as long as the one before, and from `top_factor` times its top."""
    length, top = float(first), 1.0
    while True:
        yield Phase(max(1, round(length)), "cosine", max(top, floor_ratio), floor_ratio)
        length, top = length * growth, top * top_factor
