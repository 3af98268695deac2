"""Which parameters the config's Muon updates as matrices, and what that costs: the same for every frontend and for the
planner."""

from __future__ import annotations

MUON = "Muon"
"""What a config calls it."""
MUON_STATES = ("momentum_buffer",)
"""The states of its matrices. All else has AdamW's."""
ROW_AVERAGE = "row_average"
"""The state that matrices have too where their rows are scaled (`normuon_beta`): a row's number, in each element."""
_MOST_GRAM_STEPS = 6
"""Steps of an iteration on a Gram matrix, whose rounding errors grow with each."""
_HALF = 0.6
"""What a symmetric product takes of another one."""
_OF_ADAM = ("embed", "lm_head")
"""Parts of names of matrices that AdamW updates."""


def is_matrix(fqn: str, dimensions: int) -> bool:
    """Whether Muon updates a parameter, where the model does not state it. The rule is DeepSpeed's."""
    return dimensions >= 2 and not any(part in fqn.lower() for part in _OF_ADAM)


def matrix_states(normuon_beta: float | None) -> tuple[str, ...]:
    """Return the states of matrices by the config's `normuon_beta`."""
    return MUON_STATES if normuon_beta is None else (*MUON_STATES, ROW_AVERAGE)


def gains_by_gram(wide: float, steps: int) -> bool:
    """Whether an iteration on the Gram matrix takes fewer operations, of matrices `wide` times as long as high."""
    return steps <= _MOST_GRAM_STEPS and _gram_cost(wide, steps) < _standard_cost(wide, steps)


def _standard_cost(wide: float, steps: int) -> float:
    """Multiplications of one matrix, in cubes of the shorter side."""
    return steps * (wide * (1 + _HALF) + _HALF)


def _gram_cost(wide: float, steps: int) -> float:
    return wide * (1 + _HALF) + _HALF * (steps + 3 * (steps - 1))


def element_cost(rows: int, columns: int, steps: int) -> int:
    """Return the operations for each element of a matrix."""
    short, long = sorted((max(1, rows), max(1, columns)))
    wide = long / short
    cost = (_gram_cost if gains_by_gram(wide, steps) else _standard_cost)(wide, steps)
    return max(1, round(2 * cost * short / wide))
