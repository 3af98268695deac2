"""What a pipeline has under way: each micro-batch in each chunk of this stage, and what came out in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyaccel.errors import PolyaccelError
from polyaccel.torch.data import loss_of
from polyaccel.torch.pipeline.values import StageValue
from polyaccel.torch.sharding.backward import LaterProduct

NOTHING = StageValue(b"", [])
"""What stands where no value has come, or where it has been used."""


@dataclass
class MicroBatchState:
    """A micro-batch in a chunk: what came in, what went out, what came back, and the gradients that are left for later,
    as roots of a backward pass with their gradients, and as products of linear layers."""

    inputs: StageValue = NOTHING
    outputs: StageValue = NOTHING
    gradients: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None
    left: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    products: list[LaterProduct] = field(default_factory=list)


@dataclass
class Results:
    """What the last layers gave: losses, and outputs where they are wanted, by micro-batch."""

    wants_losses: bool = True
    wants_outputs: bool = False
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    more: list[Mapping[str, Tensor]] = field(default_factory=list)
    """Of each micro-batch the losses that the model reports in addition to the one that it trains on."""

    def add_loss(self, loss: Any) -> Tensor:
        """Keep the loss of a micro-batch, which is returned. Raises PolyaccelError where it is not a single number."""
        found = loss_of(loss)
        if found.numel() != 1:
            raise PolyaccelError(
                f"the loss of a micro-batch has the shape {list(found.shape)}",
                hint="let loss_fn(output, labels), or without one the last layer, give one number, such as its mean; "
                "engine.eval_batch(..., compute_loss=False) gives outputs",
                value=tuple(found.shape),
            )
        found = found.reshape(())
        self.losses.append(found.detach())
        return found

    def stacked(self) -> Tensor | None:
        """The losses in float32, None where there are none."""
        return torch.stack(self.losses).float() if self.losses else None

    def mean_of_more(self) -> dict[str, float]:
        """The means over micro-batches of what the model reports."""
        if not self.more:
            return {}
        return {name: sum(float(each[name]) for each in self.more) / len(self.more) for name in self.more[0]}


def mean_of(outputs: Sequence[Any]) -> Any:
    """The mean of equal outputs of micro-batches, tensor by tensor. Raises PolyaccelError where they are not tensors,
    or of other shapes."""
    first = outputs[0]
    if isinstance(first, Tensor):
        if any(output.shape != first.shape for output in outputs):
            raise PolyaccelError("the outputs of micro-batches have other shapes", hint=_NO_MEAN)
        return torch.stack(list(outputs)).mean(0, dtype=first.dtype if first.is_floating_point() else torch.float32)
    if isinstance(first, (tuple, list)):
        return type(first)(mean_of(each) for each in zip(*outputs, strict=True))
    if first is None:
        return None
    raise PolyaccelError(f"cannot take the mean of a {type(first).__name__}", hint=_NO_MEAN, value=first)


_NO_MEAN = "use reduce_output=None, which gives them one by one"
