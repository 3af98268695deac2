"""What a stage computes for one chunk of the model: a run of layers, some of them computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyaccel.errors import PolyaccelError
from polyaccel.pipeline.table import PipelineError
from polyaccel.torch.recompute.state import RepeatableRun

Layer = Callable[..., Any]


class Recomputing(NamedTuple):
    """Every `interval` layers are computed again in backward by `function`, if all of them are of the `classes` (None:
    of any); 0 keeps everything."""

    interval: int = 0
    function: Callable[..., Any] = checkpoint
    classes: Collection[str] | None = None


class LayerPlace(NamedTuple):
    """A layer in words: its place in the whole model, its class, and its stage."""

    at: int
    name: str
    stage: int

    def __str__(self) -> str:
        return f"layer {self.at} ({self.name}) of stage {self.stage}"


class Chunk:
    """`chunk(inputs)` is the output of its last layer. A tuple is given to a layer as its arguments.

    `first` is the first layer in words and `before` the one whose output it gets, None in the model's first chunk.
    Raises PipelineError, with both, where the first layer cannot take what it gets.
    """

    def __init__(
        self, layers: Sequence[Layer], recomputing: Recomputing, first: LayerPlace, before: LayerPlace | None
    ) -> None:
        self.layers = tuple(layers)
        self._recomputing = recomputing
        self._first, self._before = first, before

    def __call__(self, inputs: Any) -> Any:
        interval, function, classes = self._recomputing
        if not interval or not torch.is_grad_enabled():
            return self._run(self.layers, inputs, is_first=True)
        for begin in range(0, len(self.layers), interval):
            layers = self.layers[begin : begin + interval]
            run = partial(self._run, layers, is_first=not begin)
            if classes is not None and not all(class_name(layer) in classes for layer in layers):
                inputs = run(inputs)
            elif function is checkpoint:
                inputs = checkpoint(RepeatableRun(run), inputs, use_reentrant=False)
            else:
                inputs = function(RepeatableRun(run), inputs)
        return inputs

    def _run(self, layers: Sequence[Layer], inputs: Any, *, is_first: bool) -> Any:
        for position, layer in enumerate(layers):
            given = inputs
            try:
                inputs = layer(*given) if isinstance(given, tuple) else layer(given)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                if position or not is_first or self._before is None or isinstance(error, _NOT_OF_SHAPES):
                    raise
                raise self._misfit(given, error) from error
        return inputs

    def _misfit(self, given: Any, error: Exception) -> PipelineError:
        said = str(error).strip().partition("\n")[0]
        return PipelineError(
            f"{self._first} fails on what {self._before} gives it, {_described(given)}: {type(error).__name__}: {said}",
            cure="let the second take what the first gives; a tuple is given as several arguments",
            value=self._first.at,
        )


_NOT_OF_SHAPES = (torch.OutOfMemoryError, PolyaccelError, NotImplementedError)


def class_name(layer: Any) -> str:
    """What a layer's class is called; of a function its own name."""
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def _described(given: Any) -> str:
    if isinstance(given, tuple):
        return f"({', '.join(map(_described, given))})"
    if isinstance(given, Tensor):
        kind = str(given.dtype).removeprefix("torch.")
        return f"{kind} of {' x '.join(map(str, given.shape)) or 'no dimensions'}"
    return type(given).__name__
