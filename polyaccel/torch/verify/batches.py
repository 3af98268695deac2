"""Small batches of unlike lengths, made of the first micro-batches of a training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from polyaccel.errors import PolyaccelError
from polyaccel.torch.data import loss_of
from polyaccel.torch.verify.untouched import NotProvenError

_SAMPLES = 4
_TOKENS, _TOKENS_OF_LARGE = 32, 16
"""More of them cost time and show nothing else: thresholds are lowered (`shadow_config`)."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a script gave an engine for one forward pass."""

    inputs: tuple[Any, ...]
    named: dict[str, Any]

    @staticmethod
    def from_arguments(inputs: tuple[Any, ...], named: dict[str, Any]) -> MicroBatch:
        """Keep copies of the tensors, which the script may overwrite."""
        return MicroBatch(inputs, named)._map(lambda one: one.detach().clone())

    def in_float32(self) -> MicroBatch:
        """Return the batch with floating tensors in float32."""
        return self._map(lambda one: one.float() if one.is_floating_point() else one)

    def on_host(self) -> MicroBatch:
        """Return the batch with its tensors in host memory."""
        return self._map(lambda one: one.cpu())

    def call(self, engine: Callable[..., Any], device: torch.device) -> Any:
        """Run `engine` on copies of the tensors on its `device`."""
        own = self._map(lambda one: one.to(device, copy=True))
        return engine(*own.inputs, **own.named)

    def packed(self) -> list[list[Any]]:
        """Return the tensors as plain values: their types, shapes and bytes."""
        leaves = [
            leaf.detach().cpu().contiguous() for leaf in tree_leaves((self.inputs, self.named)) if _is_tensor(leaf)
        ]
        return [
            [str(leaf.dtype), list(leaf.shape), leaf.view(-1).view(torch.uint8).numpy().tobytes()] for leaf in leaves
        ]

    def with_packed(self, leaves: Sequence[Sequence[Any]]) -> MicroBatch:
        """Return this micro-batch with the tensors of another rank; itself where it has other ones."""
        own = [one for one in tree_leaves((self.inputs, self.named)) if _is_tensor(one)]
        if [str(one.dtype) for one in own] != [kind for kind, *_ in leaves]:
            return self
        found = iter(
            torch.frombuffer(bytearray(data), dtype=one.dtype).view(shape) if data else one.new_empty(shape)
            for one, (_, shape, data) in zip(own, leaves, strict=True)
        )
        return self._map(lambda one: next(found))

    def for_train_batch(self) -> Any:
        """Return a copy as `train_batch` takes a micro-batch. Raises NotProvenError where it takes none such."""
        if self.inputs and self.named:
            raise NotProvenError("inputs by place and by name cannot be given to train_batch")
        own = self._map(torch.clone)  # which layers may change in place
        return own.named or own.inputs

    def first(self, samples: int, tokens: int) -> MicroBatch:
        """Return at most the first `samples`, and `tokens` of each; all of either where tensors differ in them."""
        tensors = [one for one in tree_leaves((self.inputs, self.named)) if isinstance(one, Tensor)]
        counts = {one.shape[0] for one in tensors if one.dim()}
        lengths = {one.shape[1] for one in tensors if one.dim() > 1}
        are_tokens = any(one.dim() == 2 and one.dtype in (torch.int32, torch.int64) for one in tensors)
        fewer = len(counts) == 1 and min(counts) > samples
        shorter = are_tokens and len(counts) == len(lengths) == 1 and 0 < tokens < min(lengths)

        def cut(one: Tensor) -> Tensor:
            one = one[:samples] if fewer and one.dim() else one
            return (one[:, :tokens] if shorter and one.dim() > 1 else one).contiguous()  # as a script's would be

        return self._map(cut)

    def _map(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        mapped = tree_map(lambda one: change(one) if _is_tensor(one) else one, (self.inputs, self.named))
        return MicroBatch(*mapped)

    def _length(self) -> int:
        tensors = [one for one in tree_leaves((self.inputs, self.named)) if _is_tensor(one)]
        return min((one.shape[1] for one in tensors if one.dim() > 1), default=0)

    def small(self, multiple: int, *, is_large: bool) -> tuple[MicroBatch, MicroBatch]:
        """Return two small batches, the second of half the length of the first; lengths are multiples of `multiple`.

        A model that `is_large` gets fewer tokens.
        """
        most = max(_TOKENS_OF_LARGE if is_large else _TOKENS, 2 * multiple)
        tokens = min(most, self._length()) // (2 * multiple) * 2 * multiple
        return self.first(_SAMPLES, tokens), self.first(_SAMPLES, tokens // 2)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def scalar_of(outputs: Any, *, may_stand_in: bool) -> Tensor:
    """Return the loss among `outputs`; else, where it `may_stand_in`, a function of all of them.

    Raises NotProvenError where the script computes its loss of outputs, and these are parts of samples.
    """
    try:
        loss = loss_of(outputs)
        if loss.numel() == 1:
            return loss
    except PolyaccelError:
        pass
    tensors = [one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad]
    if not may_stand_in or not tensors:
        raise NotProvenError("the model returns no loss")
    parts = []
    for one in tensors:
        flat = one.float().reshape(-1)
        weights = torch.arange(flat.numel(), device=flat.device, dtype=torch.float32).mul_(0.7).cos_()
        parts.append((flat * weights).mean())
    return torch.stack(parts).sum()
