"""The list of blocks along which a model that was not written for a pipeline is cut, and a small micro-batch to try it
on.

A model names the list itself (Hugging Face's plan of a pipeline, `config.base_model_pp_plan`), or it is the first of
its lists along which it can be cut. Lists of one class come before others: they are what is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.pipeline.table import PipelineError

_LISTS = (nn.ModuleList, nn.Sequential)
_NamedList = tuple[str, nn.ModuleList | nn.Sequential]
_LEAST_BLOCKS = 2
_SMALL_SHARE = 0.1
"""A second list with less than this share of the first one's elements is never cut."""
_TOKENS = 8


@dataclass(frozen=True)
class BlockList:
    """The blocks of a model, which it calls in order, each once a forward pass."""

    name: str
    """That of the list, in full."""
    modules: nn.ModuleList | nn.Sequential

    @property
    def names(self) -> tuple[str, ...]:
        """The full names of the blocks."""
        return tuple(f"{self.name}.{key}" if self.name else key for key, _ in self.modules.named_children())


def find_block_lists(model: nn.Module) -> tuple[BlockList, ...]:
    """The lists along which `model` may be cut, the best first: of an encoder and a decoder the encoder's, because all
    blocks of the decoder take what the encoder gives, and otherwise the largest. Raises PipelineError where there is
    none."""
    kind = type(model).__name__
    found = _planned(model)
    for same_class in (True, False):
        found = found or sorted(_candidates(model, same_class=same_class), key=lambda each: -_numel(each[1]))
    if not found:
        raise PipelineError(
            f"{kind} cannot be cut into stages: it has no list of blocks (a torch.nn.ModuleList or Sequential with at "
            "least two modules that have parameters)",
            hint="give a torch.nn.Sequential, or a polyaccel.torch.pipeline.PipelineModule of layers",
            value=kind,
        )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        found.sort(key=lambda each: "encoder" not in each[0].split("."))
    found = [each for each in found if _numel(each[1]) > _SMALL_SHARE * _numel(found[0][1])]
    for name, modules in found:
        if len({id(block) for block in modules}) < len(modules):
            raise PipelineError(
                f"{kind} cannot be cut into stages: the same block stands several times in {name}",
                hint="write it as a polyaccel.torch.pipeline.PipelineModule, with a TiedLayerSpec for that block",
                value=name,
            )
    return tuple(BlockList(name, modules) for name, modules in found)


def small_inputs(model: nn.Module) -> Any:
    """A micro-batch with which `model` may be tried: of a few tokens, or of one picture. Raises PipelineError where the
    model does not define what it takes."""
    described, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if described is not None and main == "input_ids":
        text = described.get_text_config() if hasattr(described, "get_text_config") else described
        most = getattr(text, "max_position_embeddings", None) or _TOKENS
        length = min(_TOKENS, most) if most > 0 else _TOKENS  # -1 stands for no limit: XLNet
        found: Any = {"input_ids": torch.ones(1, length, dtype=torch.long)}
        if getattr(described, "is_encoder_decoder", False):
            found["decoder_input_ids"] = torch.ones(1, length, dtype=torch.long)
    elif described is not None and main == "pixel_values" and hasattr(described, "image_size"):
        size = described.image_size
        height, width = (size, size) if isinstance(size, int) else size
        found = {"pixel_values": torch.zeros(1, getattr(described, "num_channels", 3), height, width)}
    else:
        found = getattr(model, "dummy_inputs", None)
    if not isinstance(found, (Mapping, Tensor, tuple, list)):
        kind = type(model).__name__
        raise PipelineError(
            f"{kind} cannot be cut into stages without its inputs: it has no dummy_inputs",
            hint='set them: model.dummy_inputs = {"tokens": torch.zeros(1, 8, dtype=torch.long)}, or the like, is a '
            "small micro-batch",
            value=kind,
        )
    return found


def _planned(model: nn.Module) -> list[_NamedList]:
    """The list that the model's own plan of a pipeline names."""
    base = getattr(model, "base_model", model)
    plan = getattr(getattr(base, "config", None), "base_model_pp_plan", None) or {}
    names = {module: name for name, module in model.named_modules()}
    parts = [base._modules.get(key) for key in plan] if isinstance(base, nn.Module) else []
    return [(names[part], part) for part in parts if isinstance(part, _LISTS) and len(part) >= _LEAST_BLOCKS]


def _candidates(model: nn.Module, *, same_class: bool) -> Iterator[_NamedList]:
    """The lists with at least two modules that have parameters, those inside another left out. `same_class`: and no
    modules but of one class with parameters."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, _LISTS) or any(not outer or name.startswith(f"{outer}.") for outer in inside):
            continue
        count = sum(_numel(child) > 0 for child in module)
        is_uniform = len({type(child) for child in module}) == 1 and count == len(module)
        if count >= _LEAST_BLOCKS and (is_uniform or not same_class):
            inside.append(name)
            yield name, module


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
