"""What a bucket's gradients have come to since the last update."""

from __future__ import annotations

from enum import Enum


class GradState(Enum):
    """What the update reads of a bucket's gradients, since the last update.

    EMPTY -> REDUCING at `launch`, REDUCING -> REDUCED at `finish`, and so again for each micro-batch of sharded
    gradients; -> EMPTY at `discard`. A reduction that failed stays REDUCING until then.
    """

    EMPTY = "nothing was reduced"
    REDUCING = "a reduction is under way"
    REDUCED = "the reduced gradient stands where the update reads"
