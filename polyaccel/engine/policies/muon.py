"""Which parameters the config's Muon updates as matrices, and what that costs: the same for every frontend and for the
planner."""

from __future__ import annotations

MUON = "Muon"
"""What a config calls it."""
MUON_STATES = ("momentum_buffer",)
"""The states of its matrices. All else has AdamW's."""
RESTART_STEP = 2
"""Steps after which an iteration on a Gram matrix begins again."""
_OF_ADAM = ("embed", "lm_head")
"""Parts of names of matrices that AdamW updates."""


def is_matrix(fqn: str, dimensions: int) -> bool:
    """Whether Muon updates a parameter, where the model does not state it. The rule is DeepSpeed's."""
    return dimensions >= 2 and not any(part in fqn.lower() for part in _OF_ADAM)


def gains_by_gram(wide: float, steps: int) -> bool:
    """Whether a Gram iteration takes fewer operations for matrices that are `wide` times as long as high."""
    return steps > RESTART_STEP and _gram_cost(wide, steps) < _standard_cost(wide, steps)


def _standard_cost(wide: float, steps: int) -> float:
    """Multiplications of one iteration, in cubes of the shorter side."""
    return steps * (2 * wide + 1)


def _gram_cost(wide: float, steps: int) -> float:
    updates = steps - 2 if steps > RESTART_STEP else steps - 1  # of XX', not before a restart and not at the end
    return 4 * wide + steps + (steps - 2) + 2 * updates


def element_cost(rows: int, columns: int, steps: int) -> int:
    """Return the operations for each element of a matrix."""
    short, long = sorted((max(1, rows), max(1, columns)))
    wide = long / short
    least = min(_standard_cost(wide, steps), _gram_cost(wide, steps) if gains_by_gram(wide, steps) else float("inf"))
    return max(1, round(2 * least * short / wide))
