"""Which layers each chunk of a model has: contiguous runs, balanced by a weight of each layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from polyaccel.pipeline.table import PipelineError


def split_layers(weights: Sequence[float], parts: int) -> tuple[range, ...]:
    """The layers of each of `parts`, in order, so that the heaviest part is as light as can be; among these splits the
    most even one, and of these the one whose first part is as long as it may be, then the second, and so on. Every part
    has a layer. Raises PipelineError where there are fewer layers than parts.
    """
    count = len(weights)
    if count < parts:
        raise PipelineError(
            f"{count} layers for {parts} parts of a pipeline",
            hint="use fewer stages, or write the model as more layers",
            value=count,
        )
    sums = [0.0, *accumulate(weights)]
    bound = _lightest(sums, parts)
    costs, best = _squares(sums, parts, bound), []
    begin = 0
    for left in reversed(range(parts)):  # parts behind this one
        behind, found = costs[left], dict[int, float]()
        for end in range(begin + 1, count - left + 1):
            if (weight := sums[end] - sums[begin]) > bound:
                break
            found[end] = weight**2 + behind[end]
        least = min(found.values())
        end = max(end for end, cost in found.items() if cost <= least * _EQUAL)
        best.append(range(begin, end))
        begin = end
    return tuple(best)


_EQUAL = 1 + 1e-9
"""Sums of squares with a smaller ratio differ by rounding."""


def _squares(sums: Sequence[float], parts: int, bound: float) -> list[list[float]]:
    """Return least sums of squares of n parts below `bound`, by n and first layer; infinite if none."""
    count = len(sums) - 1
    rows = [[inf] * count + [0.0]]
    for _ in range(1, parts):
        behind, row = rows[-1], [inf] * (count + 1)
        for begin in range(count):
            for end in range(begin + 1, count + 1):
                if (weight := sums[end] - sums[begin]) > bound:
                    break
                row[begin] = min(row[begin], weight**2 + behind[end])
        rows.append(row)
    return rows


def _lightest(sums: Sequence[float], parts: int) -> float:
    """Return the best split's heaviest weight by dynamic programming: `best[n]` for n layers."""
    count = len(sums) - 1
    best = [0.0, *sums[1:]]
    for part in range(2, parts + 1):
        after = [0.0] * (count + 1)
        first = part - 1
        for end in range(part, count + 1):
            # The earlier parts become heavier with each layer, the last one lighter: the best cut moves only forward.
            while first < end - 1 and best[first] < sums[end] - sums[first]:
                first += 1
            here = max(best[first], sums[end] - sums[first])
            before = max(best[first - 1], sums[end] - sums[first - 1]) if first > part - 1 else here
            after[end] = min(here, before)
        best = after
    return best[count]


def layer_weights(method: str, names: Sequence[str], numels: Sequence[int]) -> list[float]:
    """Return layer weights by `partition_method`: uniform, parameters (`numels`), or `type:REGEX`."""
    kind, _, pattern = method.partition(":")
    if method.lower() == "uniform":
        return [1.0] * len(names)
    if method.lower() == "parameters":
        return [float(numel) for numel in numels]
    if kind.lower() != "type" or not pattern:
        raise PipelineError(
            f"no partition_method is named {method!r} here",
            hint="use parameters, uniform, type:REGEX, or measured where there is something to try",
            value=method,
        )
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PipelineError(
            f"partition_method {method!r}: {error}", hint="write a regular expression", value=method
        ) from None
    weights = [float(bool(expression.search(name))) for name in names]
    if not any(weights):
        classes = ", ".join(dict.fromkeys(names))
        raise PipelineError(
            f"partition_method {method!r} matches the class of no layer", hint=f"they are: {classes}", value=method
        )
    return weights
