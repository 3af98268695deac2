"""Which blocks of a model keep their activations for backward, and which compute them again, within a limit of bytes.

A forward pass is a row of calls of blocks. What stands before a call is kept whatever is chosen: the call's inputs, and
what the model keeps between the blocks. A call adds what it keeps itself: everything, results of chosen operations, or
nothing. While its backward runs, all of it is there, kept or computed again; what later calls kept is gone by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from polyaccel.errors import ConfigError, Problem

BYTES_COST = 32
"""Floating-point operations in whose time a byte of memory is moved: between those of CPUs (about 10) and of GPUs
(about 200). Costs are compared with each other, so that nothing else depends on it, and every rank finds the same."""
_CELLS = 4096
LIMIT_KEY = "activation_checkpointing.memory_limit"


class Level(Enum):
    """What is kept of the activations of a block's call. The value is its name in logs and tables."""

    EVERYTHING = "kept"
    OPERATIONS = "kept in part"
    NOTHING = "recomputed"


@dataclass(frozen=True, slots=True)
class CallCosts:
    """One call of the block `name`. Bytes are of distinct memory.

    `before_nbytes`: kept before the call, its inputs included. `nbytes`: kept by the call if nothing is recomputed.
    `cost`: of computing it again, in floating-point operations. `operations_nbytes`: of the results that the level
    OPERATIONS keeps, `extra_nbytes` of those that the call would not keep by itself, `operations_cost` the cost that
    they spare.
    """

    name: str
    before_nbytes: int
    nbytes: int
    cost: float
    operations_nbytes: int = 0
    extra_nbytes: int = 0
    operations_cost: float = 0.0

    def kept_nbytes(self, level: Level) -> int:
        """Kept until backward under `level`."""
        return {Level.EVERYTHING: self.nbytes, Level.OPERATIONS: self.operations_nbytes, Level.NOTHING: 0}[level]

    def recomputed_cost(self, level: Level) -> float:
        """The cost of what `level` computes again."""
        spared = {Level.EVERYTHING: self.cost, Level.OPERATIONS: self.operations_cost, Level.NOTHING: 0.0}
        return self.cost - spared[level]

    def whole_nbytes(self, level: Level) -> int:
        """There while the call's backward runs."""
        return self.nbytes + (self.extra_nbytes if level is Level.OPERATIONS else 0)


@dataclass(frozen=True, slots=True)
class PassCosts:
    """The calls of one forward pass, in order. `after_nbytes` are kept after the last of them."""

    calls: tuple[CallCosts, ...]
    after_nbytes: int = 0

    def kept_nbytes(self, levels: Sequence[Level]) -> int:
        """Kept at the end of the forward pass."""
        kept = sum(call.kept_nbytes(level) for call, level in zip(self.calls, levels, strict=True))
        return kept + sum(call.before_nbytes for call in self.calls) + self.after_nbytes

    def peak_nbytes(self, levels: Sequence[Level]) -> int:
        """The most that is there at a time, from the beginning of the forward to the end of the backward pass."""
        kept, peak = 0, self.kept_nbytes(levels)
        for call, level in zip(self.calls, levels, strict=True):
            kept += call.before_nbytes
            peak = max(peak, kept + call.whole_nbytes(level))
            kept += call.kept_nbytes(level)
        return peak

    def cost(self, levels: Sequence[Level]) -> float:
        """The cost of what is computed again."""
        return sum(call.recomputed_cost(level) for call, level in zip(self.calls, levels, strict=True))

    def all_at(self, level: Level) -> tuple[Level, ...]:
        return (level,) * len(self.calls)


def choose_levels(costs: PassCosts, limit: int, allowed: Iterable[Level] = Level) -> tuple[Level, ...]:
    """Return the cheapest `allowed` level of each call with its peak within `limit` bytes."""
    options = [level for level in reversed(Level) if level in set(allowed)]  # of equal ones the simplest
    most = sum(call.nbytes + call.extra_nbytes for call in costs.calls)
    cell = max(1, most // _CELLS)  # of the model alone, so that a larger limit has the same choices and more
    nothing = costs.all_at(Level.NOTHING)
    least = costs.peak_nbytes(nothing)
    if least > limit:
        raise ConfigError(
            [
                Problem(
                    LIMIT_KEY,
                    limit,
                    f"is below the {least} bytes that are there when every block is recomputed",
                    "use a smaller micro-batch or shorter sequences, cpu_checkpointing, or a higher limit",
                )
            ]
        )
    everything = costs.all_at(Level.EVERYTHING)
    if Level.EVERYTHING in options and costs.peak_nbytes(everything) <= limit:  # however sizes are rounded below
        return everything
    states: list[_State] = [_State(0, 0.0, None, Level.NOTHING)]
    fixed = 0
    for call in costs.calls:
        fixed += call.before_nbytes
        found: list[_State] = []
        for state in states:
            for level in options:
                if fixed + state.kept + call.whole_nbytes(level) <= limit:
                    kept = state.kept + _rounded(call.kept_nbytes(level), cell)
                    found.append(_State(kept, state.cost + call.recomputed_cost(level), state, level))
        states = _pareto_front(found)
    states = [state for state in states if fixed + state.kept + costs.after_nbytes <= limit]
    if not states:  # rounding alone is in the way
        return nothing
    return min(states, key=lambda state: (state.cost, state.kept)).levels()


@dataclass(frozen=True, slots=True)
class _State:
    """A choice for the calls so far: the last one at `level`, the others as in `previous`."""

    kept: int
    cost: float
    previous: _State | None
    level: Level

    def levels(self) -> tuple[Level, ...]:
        found: list[Level] = []
        state = self
        while state.previous is not None:
            found.append(state.level)
            state = state.previous
        return tuple(reversed(found))


def _pareto_front(states: list[_State]) -> list[_State]:
    """Return the Pareto-optimal states by memory and recomputation cost."""
    best: list[_State] = []
    for state in sorted(states, key=lambda state: (state.kept, state.cost)):
        if not best or state.cost < best[-1].cost:
            best.append(state)
    return best


def _rounded(nbytes: int, cell: int) -> int:
    return -(-nbytes // cell) * cell


def describe(costs: PassCosts, levels: Sequence[Level], size: Callable[[int], str]) -> str:
    """One sentence for a log; `size` writes bytes."""
    counts = {level: sum(one is level for one in levels) for level in Level}
    named = ", ".join(f"{count} {level.value}" for level, count in counts.items() if count)
    whole = costs.cost(costs.all_at(Level.NOTHING))
    share = costs.cost(levels) / whole if whole else 0.0
    return (
        f"{len(levels)} calls of blocks: {named}; activations take {size(costs.peak_nbytes(levels))} of "
        f"{size(costs.peak_nbytes(costs.all_at(Level.EVERYTHING)))}, and {share:.0%} of the blocks' work is done again"
    )
