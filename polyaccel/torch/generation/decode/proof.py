"""The proof of a structure: its logits are those of the untouched module. Else another choice is tried."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from polyaccel.ops.base import KernelTable
from polyaccel.torch.generation.decode.errors import Unsupported
from polyaccel.torch.generation.decode.model import Decoder
from polyaccel.torch.generation.decode.structure import Choice, Structure

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float64: 1e-8}
"""The largest difference of logits, as a share of the largest logit: that of sums in another order."""

_LENGTHS = (5, 3)

_PROVED: WeakKeyDictionary[nn.Module, tuple[Any, Choice | str]] = WeakKeyDictionary()
"""The choice of each model, or why it has none, with what was compared."""


def proved(model: nn.Module, structure: Structure, kernels: KernelTable) -> Structure:
    """Return the structure with the choice whose logits are the model's, on two prompts and a step of decoding.

    It is compared once, and again when classes, shapes, types or adapters of the model have changed. Raises Unsupported
    if none has the model's logits.
    """
    signature = _signature(model)
    known = _PROVED.get(model)
    if known is None or known[0] != signature:
        known = signature, _compared(model, structure, kernels)
        _PROVED[model] = known
    choice = known[1]
    if isinstance(choice, str):
        raise Unsupported(choice)
    return next(one for one in structure.choices() if one.choice == choice)


def _compared(model: nn.Module, structure: Structure, kernels: KernelTable) -> Choice | str:
    prompts, wanted = _of_model(model, structure)
    bound = BOUNDS[wanted[0].dtype] * max(float(one.float().abs().max()) for one in wanted)
    best = float("inf")
    for one in structure.choices():
        try:
            found = _of_decoder(one, kernels, prompts)
        except RuntimeError:
            continue  # shapes of another choice
        if any(x.shape != y.shape for x, y in zip(found, wanted, strict=True)):
            continue
        difference = max(float((x.float() - y.float()).abs().max()) for x, y in zip(found, wanted, strict=True))
        if difference <= bound:
            return one.choice
        best = min(best, difference)
    return f"logits of {type(model).__name__} differ by {best:.2g}, more than {bound:.2g}"


def _of_model(model: nn.Module, structure: Structure) -> tuple[list[Tensor], list[Tensor]]:
    """Prompts with a token more, and the untouched module's logits of their last two tokens."""
    device = next(structure.embedding.parameters()).device
    prompts = [
        (torch.arange(length + 1, device=device) * 7919 + 13 * length) % structure.vocabulary for length in _LENGTHS
    ]
    both = [model(input_ids=prompt[None], use_cache=False).logits[0, -2:] for prompt in prompts]
    return prompts, [torch.stack([one[0] for one in both]), torch.stack([one[1] for one in both])]


def _of_decoder(structure: Structure, kernels: KernelTable, prompts: list[Tensor]) -> list[Tensor]:
    decoder = Decoder(structure, kernels, len(prompts), max(_LENGTHS) + 1)
    first = decoder.prefill([prompt[:-1] for prompt in prompts], range(len(prompts)))
    slots = torch.arange(len(prompts), device=first.device)
    positions = torch.tensor(_LENGTHS, device=first.device)
    return [first, decoder.step(torch.stack([prompt[-1] for prompt in prompts]), slots, positions)]


def _signature(model: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (
            name,
            type(part),
            getattr(part, "merged", None),
            str(getattr(part, "active_adapters", "")),
            getattr(part, "disable_adapters", None),
            tuple((key, tuple(one.shape), one.dtype) for key, one in part.named_parameters(recurse=False)),
        )
        for name, part in model.named_modules()
    )
