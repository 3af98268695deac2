"""`shrunk_model`: a small model with the structure of a large one of transformers, for proofs on one rank."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.torch.random_copy import HOOKS, unchanged_generators
from polyaccel.torch.shrunk_config import TOKENS, shrunk
from polyaccel.torch.verify.batches import MicroBatch
from polyaccel.torch.verify.untouched import NotProvenError

_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_MOST = 64_000_000
"""Parameters of a small model."""
_WORDS = ("input_ids", "labels", "decoder_input_ids")


class ShrunkModel:
    """A small model in place of a large one, with drawn weights. See [Note: Sound small models]."""

    def __init__(self, model: nn.Module) -> None:
        """Build it. `model` does not change. Raises NotProvenError where there is no small model of its structure."""
        if not any(one.__name__ == "PreTrainedModel" for one in type(model).__mro__):
            raise NotProvenError("and only models of transformers are made small")
        if any(getattr(one, name) for one in model.modules() for name in HOOKS) or _has_own_forward(model):
            raise NotProvenError("and its hooks would not be those of a small model")
        config: Any = model.config
        try:
            small, self._vocabulary = shrunk(config)
            small._attn_implementation = getattr(config, "_attn_implementation", None)
            with unchanged_generators(), torch.device("meta"):
                numel = sum(one.numel() for one in type(model)(small).parameters())
            if numel > _MOST:
                raise NotProvenError(f"and a small model still has {numel:,}")
            with unchanged_generators(), torch.device("cpu"):
                self.module: nn.Module = type(model)(small).float()
        except NotProvenError:
            raise
        except Exception as error:  # of a config that was not made for these numbers
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise NotProvenError(f"and no small model can be made of its config ({reason})") from None
        if (found := _structure(self.module)) != (wanted := _structure(model)):
            first = min(found ^ wanted)
            raise NotProvenError(f"and a small model of its config has another structure at {first[0] or 'its root'}")
        trained = {name: one.requires_grad for name, one in model.named_parameters()}
        modes = {name: one.training for name, one in model.named_modules()}
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(trained[name])
        for name, module in self.module.named_modules():
            module.training = modes[name]

    def values(self, device: torch.device) -> dict[str, Tensor]:
        """Return drawn weights by name: none is 0 or 1, at which gradients vanish and factors do not show."""
        draw = torch.Generator().manual_seed(1)
        return {
            name: (one.detach() + 0.05 * torch.randn(one.shape, generator=draw)).to(device)
            for name, one in self.module.named_parameters()
        }

    def batch(self, batch: MicroBatch) -> MicroBatch:
        """Return `batch` with its words moved inside of the small vocabulary."""

        def move(name: str, value: Any) -> Any:
            if name not in _WORDS or not isinstance(value, Tensor) or value.is_floating_point():
                return value
            return value.cpu().clone().apply_(self._vocabulary.place).to(value.device)

        inputs = (move("input_ids", batch.inputs[0]), *batch.inputs[1:]) if batch.inputs else ()
        return MicroBatch(inputs, {name: move(name, one) for name, one in batch.named.items()}).first(4, TOKENS)


def _has_own_forward(model: nn.Module) -> bool:
    return any("forward" in vars(module) for module in model.modules())


def _structure(model: nn.Module) -> set[tuple[str, str]]:
    """The classes of modules and the dimensions of parameters, by names without the numbers of layers."""
    modules = {(_NUMBER.sub(".N", name), type(one).__qualname__) for name, one in model.named_modules()}
    return modules | {(_NUMBER.sub(".N", name), f"{one.dim()} dimensions") for name, one in model.named_parameters()}
