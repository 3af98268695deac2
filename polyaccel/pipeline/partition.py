"""Which layers each chunk of a model has: contiguous runs, balanced by a weight of each layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from polyaccel.pipeline.table import PipelineError


def split_layers(weights: Sequence[float], parts: int) -> tuple[range, ...]:
    """The layers of each of `parts`, in order, so that the heaviest part is as light as can be; among such splits the
    one whose first part is as long as it may be, then the second, and so on. Every part has a layer. Raises
    PipelineError where there are fewer layers than parts.
    """
    if len(weights) < parts:
        raise PipelineError(
            f"{len(weights)} layers for {parts} parts of a pipeline",
            cure="use fewer stages, or write the model as more layers",
            value=len(weights),
        )
    sums = [0.0, *accumulate(weights)]
    bound = _lightest(sums, parts)
    ends, begin = [], 0
    for part in range(parts):
        end = begin + 1  # a part has a layer, and leaves one for each part behind it
        while end < len(weights) - (parts - part - 1) and (part == parts - 1 or sums[end + 1] - sums[begin] <= bound):
            end += 1
        ends.append(end)
        begin = end
    return tuple(range(begin, end) for begin, end in zip([0, *ends], ends, strict=False))


def _lightest(sums: Sequence[float], parts: int) -> float:
    """The weight of the heaviest part in the best split, by dynamic programming over the number of parts: `best[n]` is
    that of the first n layers."""
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
    """The weight of each layer by `partition_method`: `uniform` counts layers, `parameters` their trainable elements
    (`numels`), `type:REGEX` those layers whose class has a name that matches, whatever the case. Raises PipelineError
    for another method, and for an expression that matches no class."""
    kind, _, pattern = method.partition(":")
    if method.lower() == "uniform":
        return [1.0] * len(names)
    if method.lower() == "parameters":
        return [float(numel) for numel in numels]
    if kind.lower() != "type" or not pattern:
        raise PipelineError(
            f"no partition_method is named {method!r} here",
            cure="use parameters, uniform or type:REGEX, or measured for a list of layers",
            value=method,
        )
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PipelineError(f"partition_method {method!r}: {error}", cure="write a regular expression") from None
    weights = [float(bool(expression.search(name))) for name in names]
    if not any(weights):
        told = ", ".join(dict.fromkeys(names))
        raise PipelineError(
            f"partition_method {method!r} matches the class of no layer", cure=f"they are: {told}", value=method
        )
    return weights
