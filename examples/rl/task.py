"""A task whose answers are checked by a program: write the digits of the prompt in ascending order."""

from __future__ import annotations

import torch
from torch import Tensor

DIGITS, LENGTH = 6, 4
EQUALS, START = DIGITS, DIGITS + 1
VOCABULARY = DIGITS + 2


def draw_prompts(count: int, generator: torch.Generator) -> Tensor:
    """Return `count` prompts: a start token, `LENGTH` digits and an equals sign, shape (count, LENGTH + 2)."""
    digits = torch.randint(DIGITS, (count, LENGTH), generator=generator)
    return torch.cat([torch.full((count, 1), START), digits, torch.full((count, 1), EQUALS)], 1)


def rewards(prompts: Tensor, answers: Tensor) -> Tensor:
    """Return which part of each answer is right, from 0 to 1."""
    right = prompts[:, 1 : LENGTH + 1].sort(1).values
    return (answers == right).float().mean(1)
