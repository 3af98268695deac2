"""Inputs that an engine changes by the step: shorter sequences, and the share of layers that stays.

A model whose forward has an argument `curriculum_seqlen` gets the length, as DeepSpeed gives it, and cuts itself. Of
any other model the engine cuts every tensor of integers or truth values with two dimensions: tokens, labels and masks.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polyaccel.engine.policies.step_inputs import StepInputPolicy

_LENGTH = "curriculum_seqlen"
_MATRIX = 2


class StepInputs:
    """The inputs of `model` by `policy`; `steps` gives the optimizer steps that are done."""

    def __init__(self, model: nn.Module, policy: StepInputPolicy, steps: Callable[[], int]) -> None:
        self._policy, self._steps = policy, steps
        self._takes_length = _LENGTH in signature(model.forward).parameters

    @property
    def length(self) -> int | None:
        """Tokens of a sequence in the step under way; None where they do not follow from it."""
        return None if self._policy.length is None else self._policy.length.at(self._steps() + 1)

    def __call__(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of a forward pass of training."""
        length = self.length
        if length is not None and self._takes_length:
            named = {**named, _LENGTH: length}
        elif length is not None:
            inputs, named = tree_map_only(Tensor, lambda one: _shortened(one, length), (inputs, named))
        if self._policy.layers is not None:
            named = {**named, "progressive_layer_drop": True, "pld_theta": self._policy.layers.at(self._steps())}
        return inputs, named


def _shortened(tensor: Tensor, length: int) -> Tensor:
    is_tokens = tensor.dim() == _MATRIX and not tensor.is_floating_point() and not tensor.is_complex()
    if not is_tokens or tensor.shape[1] <= length:
        return tensor
    return tensor[:, :length].contiguous()
