"""What an engine does for compressed layers in a step: masks that begin, and ranges that all ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from polyaccel.comm.base import Communicator
from polyaccel.torch.api.gathered import GatheredParameters
from polyaccel.torch.compression.layers import CompressedLayer, Mask
from polyaccel.torch.compression.snip import BlockRemoval

_MOMENTUM = 0.95
"""What a range keeps of its past in each step (Jacob et al. 2018, section 3.1, smooth with a constant near 1)."""


class CompressedStep:
    """The compressed layers of a model in an engine. `steps` gives the optimizer steps that are done, and `ranks()`
    those with their own batches."""

    def __init__(self, model: nn.Module, steps: Callable[[], int], ranks: Callable[[], Communicator]) -> None:
        self._layers = [part for part in model.modules() if isinstance(part, CompressedLayer)]
        self._clock = self._layers[0].compression.clock
        self._clock.follow(steps)
        self._masks: list[Mask] = [mask for layer in self._layers for mask in layer.compression.masks]
        self._ranged = [layer for layer in self._layers if "input_range" in layer._buffers]
        self._blocks = BlockRemoval([mask for mask in self._masks if mask.rule.removal is not None])
        self._ranks = ranks() if self._ranged else None

    def before_forward(self) -> None:
        """Make the masks whose step has come, of magnitudes. Collective then."""
        step = self._clock.step
        for mask in self._masks:
            if mask.is_due(step) and mask.layer._parameters.get("weight") is not None:
                with GatheredParameters(mask.layer.parameters(recurse=False)):
                    mask.make()

    def before_update(self) -> None:
        """Let scores of blocks follow the gradients. Collective where there are any."""
        self._blocks.follow_gradients()

    @torch.no_grad()
    def after_step(self, loss: float | None) -> None:
        """Remove blocks, and let static ranges follow the inputs of all ranks since the last step. Collective."""
        self._blocks.remove(self._clock.step)
        if self._ranks is None:
            return
        seen = [layer.compression.seen for layer in self._ranged]
        mine = [None if one is None else _finite(float(one[0]), float(one[1])) for one in seen]
        for layer in self._ranged:
            layer.compression.seen = None
        every = self._ranks.all_gather_object(mine)
        for index, layer in enumerate(self._ranged):
            found = [rank[index] for rank in every if rank[index] is not None]
            if found:
                _follow(layer, min(low for low, _ in found), max(high for _, high in found))

    def release(self) -> None:
        """Let the layers keep the step that they are at."""
        self._clock.follow(None)


def _finite(low: float, high: float) -> tuple[float, float] | None:
    """A range that an overflow has not spoilt: the moving mean would never leave infinity."""
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _follow(layer: CompressedLayer, low: float, high: float) -> None:
    known = layer._buffers["input_range"]
    assert known is not None  # registered with the rule
    latest = torch.tensor([low, high], dtype=known.dtype, device=known.device)
    is_known = bool(known[0] <= known[1])
    known.copy_(known * _MOMENTUM + latest * (1.0 - _MOMENTUM) if is_known else latest)
