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
from polyaccel.torch.activation_checkpointing.state import RepeatableRun
from polyaccel.torch.pipeline.values import copy_of, tensors_in

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


class ChunkPlaces(NamedTuple):
    """A chunk's first layer and its last, and the layer whose output the first one gets: None in the model's first
    chunk."""

    first: LayerPlace
    last: LayerPlace
    before: LayerPlace | None = None


class Chunk:
    """`chunk(inputs)` is the output of its last layer. With `spreads` a tuple is given to a layer as its arguments.

    Raises PipelineError, with the layers' places, where the first layer cannot take what it gets.
    """

    def __init__(
        self, layers: Sequence[Layer], recomputing: Recomputing, places: ChunkPlaces, *, spreads: bool = True
    ) -> None:
        self.layers = list(layers)
        self.recomputing = recomputing
        self.places = places
        self._spreads = spreads
        self._are_kept: set[int] = set()
        """The groups of layers that were found to leave their input as it is, by their first layer."""

    def __call__(self, inputs: Any) -> Any:
        interval, function, classes = self.recomputing
        if not interval or not torch.is_grad_enabled():
            return self._run(self.layers, inputs, is_first=True)
        for begin in range(0, len(self.layers), interval):
            layers = self.layers[begin : begin + interval]
            run = partial(self._run, layers, is_first=not begin)
            if classes is not None and not all(class_name(layer) in classes for layer in layers):
                inputs = run(inputs)
                continue
            run = partial(self._run_on_copy, begin, RepeatableRun(run))
            if function is checkpoint:
                inputs = checkpoint(run, inputs, use_reentrant=False)
            elif isinstance(inputs, tuple):
                inputs = function(lambda *given, run=run: run(given), *inputs)  # where it sees which have gradients
            else:
                inputs = function(run, inputs)
        return inputs

    def _run_on_copy(self, begin: int, run: Layer, inputs: Any) -> Any:
        """Run layers that are run again on the same input: on a copy of it, unless they leave it as it is."""
        is_kept = begin in self._are_kept
        given = copy_of(inputs, clones=not is_kept)
        before = [tensor._version for tensor in tensors_in(given)]
        outputs = run(given)
        changes = before != [tensor._version for tensor in tensors_in(given)]
        if not changes:
            self._are_kept.add(begin)
        elif is_kept or given is inputs:
            place = self.places.first
            raise PipelineError(
                f"layer {place.at + begin} ({class_name(self.layers[begin])}) of stage {place.stage} changes its input "
                "in place in some forward passes alone, and it is run again in backward",
                hint="give it inplace=False, or set activation_checkpoint_interval to 0",
                value=place.at + begin,
            )
        return outputs

    def _run(self, layers: Sequence[Layer], inputs: Any, *, is_first: bool) -> Any:
        for position, layer in enumerate(layers):
            given = inputs
            try:
                inputs = call_layer(layer, given, spreads=self._spreads)
            except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
                if position or not is_first or self.places.before is None or isinstance(error, _NOT_OF_SHAPES):
                    raise
                raise self._misfit(given, error) from error
        return inputs

    def _misfit(self, given: Any, error: Exception) -> PipelineError:
        first, _, before = self.places
        said = str(error).strip().partition("\n")[0]
        given_as = "a tuple is given as several arguments" if self._spreads else "a tuple is given as one argument"
        return PipelineError(
            f"{first} fails on what {before} gives it, {_described(given)}: {type(error).__name__}: {said}",
            hint=f"let the second take what the first gives; {given_as}",
            value=first.at,
        )


def call_layer(layer: Layer, given: Any, *, spreads: bool) -> Any:
    """What a layer makes of what the layer before gave. With `spreads` a tuple is several arguments."""
    return layer(*given) if spreads and isinstance(given, tuple) else layer(given)


_NOT_OF_SHAPES = (torch.OutOfMemoryError, PolyaccelError, NotImplementedError)


def class_name(layer: Any) -> str:
    """What a layer's class is called; of a function its own name."""
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def _described(given: Any) -> str:
    if isinstance(given, (tuple, list)):
        shown = ", ".join(map(_described, given))
        return f"({shown})" if isinstance(given, tuple) else f"[{shown}]"
    if isinstance(given, dict):
        return "{" + ", ".join(f"{key!r}: {_described(one)}" for key, one in given.items()) + "}"
    if isinstance(given, Tensor):
        kind = str(given.dtype).removeprefix("torch.")
        return f"{kind} of {' x '.join(map(str, given.shape)) or 'no dimensions'}"
    return type(given).__name__
