"""The engine of `polyaccel.init_inference`: a `TorchEngine` that trains nothing."""

from __future__ import annotations

from typing import Any

import torch

from polyaccel.errors import PolyaccelError
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.rewrites import RewriteContext
from polyaccel.torch.weight_groups import WeightGroups


class InferenceEngine(TorchEngine):
    """A torch module in evaluation mode, built by `polyaccel.init_inference`.

    `engine(*inputs)` runs the module without gradients, and `engine.generate` its `generate`. Attributes that the
    engine lacks are the module's.

    Args:
        rewrites: The model, and the rewrites that `polyaccel.init_inference` has applied to it so far.
    """

    group_size: int | None = None
    """Weights of a group that share a scale, of a class whose linear layers are held as integers."""
    weight_bits: int = 8
    """Bits of those integers, 8 or 4."""

    def __init__(self, rewrites: RewriteContext) -> None:
        if self.group_size is not None:
            rewrites.apply([WeightGroups(self.group_size, self.weight_bits)])
        super().__init__(rewrites)
        self.eval()

    @torch.no_grad()
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the module without gradients. Tensor ranks call it together, with the same inputs.

        Args:
            *inputs: Inputs of the module. Under fp16 floating tensors are cast to float16.
            **named: Named inputs, treated the same way.

        Returns:
            The module's output.
        """
        return super().forward(*inputs, **named)

    def train(self, mode: bool = True) -> InferenceEngine:
        """Set the mode, which stays that of evaluation.

        Args:
            mode: False.

        Returns:
            The engine.

        Raises:
            PolyaccelError: `mode` is True.
        """
        if mode:
            raise self._refusal("train")
        super().train(mode)
        return self

    def _require_optimizer(self) -> None:
        raise self._refusal("backward and step")

    @staticmethod
    def _refusal(what: str) -> PolyaccelError:
        hint = "train with polyaccel.initialize, whose engines generate too"
        return PolyaccelError(f"an engine of init_inference has no {what}", hint=hint, value=what)
