"""LoRA adapters fused into their base weights for a rollout, and the weights' bits restored after it. A layer with
adapters is PEFT's, or another one with the same methods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def fusable_layers(module: nn.Module) -> list[Any]:
    """Return the layers with active adapters that can be fused now. A quantised weight cannot take them: their layer
    stays as it is."""
    layers: list[Any] = [part for part in module.modules() if _is_tuner_layer(part)]
    return [one for one in layers if not one.merged and not one.disable_adapters and _has_plain_weights(one)]


def _has_plain_weights(layer: Any) -> bool:
    weights = [*layer.get_base_layer().parameters(recurse=False)]
    return all(one.is_floating_point() and isinstance(one, nn.Parameter) and _is_dense(one) for one in weights)


def _is_dense(parameter: nn.Parameter) -> bool:
    """Whether it is in memory as torch's own tensors are: torchao's classes only look as if they were."""
    return not hasattr(parameter, "__tensor_flatten__")


def _is_tuner_layer(part: nn.Module) -> bool:
    return all(hasattr(part, name) for name in ("merged_adapters", "get_base_layer", "merge", "disable_adapters"))


@contextmanager
def fused_adapters(module: nn.Module) -> Iterator[None]:
    """Fuse active adapters into base weights. Afterwards these are what they were, bit for bit: a subtraction would
    leave rounding."""
    kept: list[tuple[Any, list[tuple[Tensor, Tensor]]]] = []
    try:
        with torch.no_grad():
            for layer in fusable_layers(module):
                values = [_values(weight) for weight in layer.get_base_layer().parameters(recurse=False)]
                kept.append((layer, [(value, value.clone()) for value in values]))
                layer.merge()
        yield
    finally:
        with torch.no_grad():
            for layer, pairs in reversed(kept):
                if getattr(layer, "_caches", None):  # of DoRA, which unmerge empties
                    layer.unmerge()
                layer.merged_adapters.clear()  # unmerge computes all products again, for values that are replaced here
                for value, before in pairs:
                    value.copy_(before)


def _values(parameter: nn.Parameter) -> Tensor:
    """The memory of a parameter, which is not marked as handed out for that."""
    values: Tensor = Tensor.data.__get__(parameter)  # type: ignore[attr-defined]
    return values
