"""The sections about what changes with the step: `curriculum_learning` and `progressive_layer_drop`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from polyaccel.config.section import Fraction, Int, Listed, NonNegativeFloat, PositiveInt, Section


class CurriculumScheduleConfig(Section):
    """How the difficulty grows."""

    total_curriculum_step: PositiveInt | None = None
    """Optimizer steps until the largest difficulty, of "fixed_linear" and "fixed_root"."""
    difficulty_step: PositiveInt = 1
    """Difficulties are multiples of this, of "fixed_linear" and "fixed_root"."""
    root_degree: PositiveInt | None = None
    """Degree of the root, of "fixed_root"."""
    difficulty: Listed[tuple[PositiveInt, ...]] = ()
    """Difficulties one after the other, of "fixed_discrete"."""
    max_step: Listed[tuple[PositiveInt, ...]] = ()
    """The last step of each difficulty but the last, of "fixed_discrete"."""

    def require(self, schedule_type: str) -> None:
        """Raise ValueError where a number of this shape is missing."""
        if schedule_type == "fixed_discrete":
            if not self.difficulty or len(self.difficulty) != len(self.max_step) + 1:
                raise ValueError("schedule_config.difficulty needs one number more than max_step")
            if list(self.max_step) != sorted(set(self.max_step)):
                raise ValueError("schedule_config.max_step should rise")
        elif schedule_type != "custom" and self.total_curriculum_step is None:
            raise ValueError(f"{schedule_type} needs schedule_config.total_curriculum_step")
        if schedule_type == "fixed_root" and self.root_degree is None:
            raise ValueError("fixed_root needs schedule_config.root_degree")


class CurriculumLearningConfig(Section):
    """Sequences that grow while training. Torch only."""

    enabled: bool = False
    """Let them grow."""
    curriculum_type: Literal["seqlen"] = "seqlen"
    """What the difficulty is: tokens of a sequence."""
    min_difficulty: PositiveInt = 1
    """Tokens at the beginning."""
    max_difficulty: PositiveInt | None = None
    """Tokens at the end."""
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete"] = "fixed_linear"
    """Shape of the growth."""
    schedule_config: CurriculumScheduleConfig = CurriculumScheduleConfig()
    """Numbers of the growth."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enabled:
            self._check_numbers()
        return self

    def _check_numbers(self) -> None:
        numbers = self.schedule_config
        numbers.require(self.schedule_type)
        if self.schedule_type == "fixed_discrete":
            return
        if self.max_difficulty is None:
            raise ValueError(f"{self.schedule_type} needs max_difficulty")
        if self.min_difficulty > self.max_difficulty:
            raise ValueError("min_difficulty is more than max_difficulty")
        if self.min_difficulty < numbers.difficulty_step:
            raise ValueError("min_difficulty is less than schedule_config.difficulty_step")


class ProgressiveLayerDropConfig(Section):
    """Layers that are skipped more often while training continues. Torch only.

    A model whose forward takes `pld_theta` skips them itself; of any other one the engine skips blocks.
    """

    enabled: bool = False
    """Skip layers."""
    theta: Fraction = 1.0
    """Share of layers that stays in the end."""
    gamma: NonNegativeFloat = 0.001
    """How fast the share falls."""
    seed: Int = 1234
    """Seed of the draws, where the engine skips blocks."""
