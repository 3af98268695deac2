"""Layers dealt to parts of a model, as boundaries: part p has the layers from `parts[p]` up to `parts[p + 1]`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from polyaccel.pipeline.partition import split_layers


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """The sum of the weights up to each, with it."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Parts of equal numbers of layers, the first ones longer by one where they have to be. Late parts may be empty."""
    size, longer = divmod(num_items, num_parts)
    return [part * size + min(part, longer) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Parts of which the heaviest is as light as can be, as `PipelineModule` cuts a model. Late parts may be empty."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return [0, *(part.stop for part in split_layers(weights, num_parts))]
