"""What a pipeline has under way: each micro-batch in each chunk of this stage, and what came out in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyaccel.errors import PolyaccelError
from polyaccel.torch.passes import LaterProduct


@dataclass
class Passing:
    """A micro-batch in a chunk: what came in, what went out, what came back, and the gradients that are left for later,
    as roots of a backward pass with their gradients, and as products of linear layers."""

    inputs: list[Tensor | None] = field(default_factory=list)
    outputs: list[Tensor | None] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None
    left: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    products: list[LaterProduct] = field(default_factory=list)


@dataclass
class Results:
    """What the last layers gave: losses, and outputs where somebody wants them, by micro-batch."""

    wants_losses: bool = True
    wants_outputs: bool = False
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


def mean_of(outputs: Sequence[Any]) -> Any:
    """The mean of equal outputs of micro-batches, tensor by tensor. Raises PolyaccelError where they are no tensors,
    or of other shapes."""
    first = outputs[0]
    if isinstance(first, Tensor):
        if any(one.shape != first.shape for one in outputs):
            raise PolyaccelError("the outputs of micro-batches have other shapes", cure=_NO_MEAN)
        return torch.stack(list(outputs)).mean(0, dtype=first.dtype if first.is_floating_point() else torch.float32)
    if isinstance(first, (tuple, list)):
        return type(first)(mean_of(each) for each in zip(*outputs, strict=True))
    if first is None:
        return None
    raise PolyaccelError(f"there is no mean of a {type(first).__name__}", cure=_NO_MEAN, value=first)


_NO_MEAN = "use reduce_output=None, which gives them one by one"


def pair_of(batch: Any) -> tuple[Any, Any]:
    """The inputs and the labels of a micro-batch. Raises PolyaccelError where it is no pair."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise PolyaccelError(f"a micro-batch of a pipeline is a {kind}", cure="give pairs (inputs, labels)", value=kind)
    return batch[0], batch[1]
