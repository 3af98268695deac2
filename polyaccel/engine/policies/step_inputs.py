"""Inputs of a model that follow from the step: the length of sequences, and the share of layers that stays.

Sequence length warmup is Li et al. 2022 (arXiv 2108.06084), with a root as in Platanios et al. 2019 (arXiv 1903.09848);
progressive layer dropping is Zhang and He 2020 (arXiv 2010.13369, section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from polyaccel.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """From `least` to `most` in `steps` optimizer steps, as the root of degree `root` of the part done, rounded down to
    a multiple of `multiple`."""

    least: int
    most: int
    steps: int
    root: int = 1
    multiple: int = 1

    def at(self, step: int) -> int:
        """The difficulty of optimizer step `step`, counted from 1."""
        if step >= self.steps:
            return self.most - self.most % self.multiple
        value = int(self.least + (self.most - self.least) * (step / self.steps) ** (1.0 / self.root))
        return min(self.most, value - value % self.multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stairs:
    """One of `values` after the other: value i to step `last_steps[i]`, the last one from there on."""

    values: tuple[int, ...]
    last_steps: tuple[int, ...]

    def at(self, step: int) -> int:
        """The difficulty of optimizer step `step`, counted from 1."""
        return self.values[sum(step > last for last in self.last_steps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDrop:
    """The share of layers that stays: from 1 to `theta`, by `gamma`."""

    theta: float
    gamma: float
    seed: int = 0

    def at(self, done: int) -> float:
        """The share after `done` optimizer steps."""
        return (1.0 - self.theta) * exp(-self.gamma * done) + self.theta


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputPolicy:
    """What follows from the step; None where nothing does."""

    length: Growth | Stairs | None = None
    layers: LayerDrop | None = None


def step_input_policy_of(config: Config) -> StepInputPolicy:
    """The inputs that `curriculum_learning` and `progressive_layer_drop` ask for."""
    curriculum, drop = config.curriculum_learning, config.progressive_layer_drop
    return StepInputPolicy(
        length=_length_of(config) if curriculum.enabled else None,
        layers=LayerDrop(theta=drop.theta, gamma=drop.gamma, seed=drop.seed) if drop.enabled else None,
    )


def _length_of(config: Config) -> Growth | Stairs:
    section = config.curriculum_learning
    numbers = section.schedule_config
    if section.schedule_type == "fixed_discrete":
        return Stairs(values=numbers.difficulty, last_steps=numbers.max_step)
    assert section.max_difficulty is not None  # the section checks both
    assert numbers.total_curriculum_step is not None
    return Growth(
        least=section.min_difficulty,
        most=section.max_difficulty,
        steps=numbers.total_curriculum_step,
        root=(numbers.root_degree or 1) if section.schedule_type == "fixed_root" else 1,
        multiple=numbers.difficulty_step,
    )
