"""Integers for the weights of a row in groups that share a scale: the one place that cuts, scales and rounds them.

[Note: Integers in groups]
A row is cut into groups of `size` inputs; its last group may be shorter. The step of a group is its largest magnitude
over 127 (7 with 4 bits), in float32. An integer is a weight over its step, to the nearest, so that it is off by half a
step at most. How integers are laid out in bytes is their owner's matter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MOST = {8: 127, 4: 7}
"""The largest integer by bits."""


def in_groups(rows: Tensor, size: int) -> Tensor:
    """Return rows (outputs, inputs) as (outputs, groups, size); what the last group lacks is zero."""
    return functional.pad(rows, (0, -rows.shape[1] % size)).view(len(rows), -1, size)


def magnitudes(groups: Tensor) -> Tensor:
    """Return the largest magnitude of each group (outputs, groups)."""
    return groups.abs().amax(-1)


def steps_of(largest: Tensor, bits: int) -> Tensor:
    """Return the steps of groups with these magnitudes."""
    return largest / MOST[bits]


def integers(groups: Tensor, largest: Tensor, bits: int) -> Tensor:
    """Return int8 of the shape of `groups`, whose magnitudes are `largest` or nearly so."""
    steps = steps_of(largest, bits).unsqueeze(-1)
    found = groups / torch.where(steps == 0, 1.0, steps)
    return found.round_().clamp_(-MOST[bits], MOST[bits]).to(torch.int8)
