"""Models that compute in tiles without their doing: the causal loss of transformers' models, and feed-forward layers
that are found by structure."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import ConfigError, Problem
from polyaccel.torch.settings import TileSettings
from polyaccel.torch.sharding.units import find_blocks
from polyaccel.torch.tensor_parallel.cross_entropy import VocabularyLoss
from polyaccel.torch.tensor_parallel.layers import ColumnLayer
from polyaccel.torch.tiled.functions import tiled_map
from polyaccel.torch.tiled.logits import LazyLogits, TiledHead, TiledLoss

_LEAST_TOKENS = 256
_LEAST_LINEARS = 2
_KEY = "tiled_compute"


class TiledModel:
    """`model`, computing in tiles by `settings` until `release`. Raises ConfigError for a model of which a part that is
    to be tiled is not found, or cannot be."""

    def __init__(self, model: nn.Module, settings: TileSettings) -> None:
        self._loss = _TiledModelLoss(model, settings) if settings.loss else None
        self._mlps: list[TiledForward] = []
        self.module_names: tuple[str, ...] = ()
        """Full names of the modules that compute in tiles: the model of the loss, and feed-forward layers."""
        if self._loss is not None:
            self.module_names = tuple(name for name, one in model.named_modules() if one is self._loss.model)
        if settings.mlp:
            found = find_mlps(model, settings.mlps)
            if not found:
                self.release()
                raise ConfigError([_no_mlps(settings)])
            self._mlps = [TiledForward(each, settings.mlp_tokens) for each in found.values()]
            self.module_names += tuple(found)

    def release(self) -> None:
        """Compute as before."""
        if self._loss is not None:
            self._loss.release()
        for each in self._mlps:
            each.release()
        self._mlps.clear()


class _TiledModelLoss:
    """The loss of a model of transformers. See [Note: Lazy logits]."""

    def __init__(self, model: nn.Module, settings: TileSettings) -> None:
        self.model = _with_causal_loss(model)
        self._in_evaluation = settings.in_evaluation
        self._signature = inspect.signature(self.model.forward)
        self._head = TiledHead(_head_of(self.model), settings.loss_tokens)
        self._before = self.model.__dict__.get("_loss_function")
        self.model.loss_function = TiledLoss(self.model.loss_function)
        self._handles = [
            self.model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.model.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._head.release()
        if self._before is None:
            self.model.__dict__.pop("_loss_function", None)
        else:
            self.model.__dict__["_loss_function"] = self._before

    def _begin(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if module is not self.model:  # a copy of the model, which took the hooks along
            return
        given = self._signature.bind_partial(*args, **named).arguments
        has_labels = given.get("labels") is not None
        self._head.is_deferring = has_labels and (module.training or self._in_evaluation)

    def _end(self, module: nn.Module, args: Any, named: Any, outputs: Any) -> Any:
        if module is not self.model or not self._head.is_deferring:
            return None
        self._head.is_deferring = False
        if isinstance(outputs, Mapping):
            left = {name: None if isinstance(one, LazyLogits) else one for name, one in outputs.items()}
            return type(outputs)(**left)
        if isinstance(outputs, tuple):
            return tuple(None if isinstance(one, LazyLogits) else one for one in outputs)
        return None


class TiledForward:
    """`forward` of a feed-forward layer in tiles. A copy of the layer gets the ordinary one, and so does an unpickled
    layer."""

    def __init__(self, layer: nn.Module, tile_tokens: int | None) -> None:
        self.layer = layer
        self._tile_tokens = tile_tokens
        self._own = layer.__dict__.get("forward")
        self._before = layer.forward
        layer.__dict__["forward"] = self

    def release(self) -> None:
        """Give the layer its own forward back."""
        if self.layer.__dict__.get("forward") is self:
            del self.layer.__dict__["forward"]
            if self._own is not None:
                self.layer.__dict__["forward"] = self._own

    def __call__(self, *args: Any, **named: Any) -> Any:
        given = (*args, *named.values())
        x = given[0] if len(given) == 1 else None
        if not isinstance(x, Tensor) or x.dim() < 2 or torch._C._are_functorch_transforms_active():
            return self._before(*args, **named)
        tokens = self._tile_tokens or max(_LEAST_TOKENS, x.shape[-1])
        if x.numel() <= tokens * x.shape[-1]:
            return self._before(*args, **named)
        return tiled_map(self._before, x, tile_tokens=tokens, parameters=self.layer.parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.layer))
        return self if copy is None else types.MethodType(type(self.layer).forward, copy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.layer, "forward")  # whose attributes are not there yet when this is called


def find_mlps(model: nn.Module, names: tuple[str, ...] = ()) -> dict[str, nn.Module]:
    """The feed-forward layers in the blocks of `model`, by full name; none lies inside another.

    They are modules of one argument, with at least two linear layers and otherwise nothing but activations, dropout and
    norms, so that tokens do not interact in them. `names` choose modules by class or full name instead.
    """
    if names:
        return find_blocks(model, names)
    found: dict[str, nn.Module] = {}
    for block_name, block in find_blocks(model).items():
        for name, module in block.named_modules(prefix=block_name):
            if module is not block and not any(name.startswith(f"{outer}.") for outer in found) and _is_mlp(module):
                found[name] = module
    return found


def _is_mlp(module: nn.Module) -> bool:
    parts = [part for part in module.modules() if not any(True for _ in part.children())]
    linears = [part for part in parts if _is_linear(part)]
    if len(linears) < _LEAST_LINEARS or not all(_is_linear(part) or _is_of_tokens(part) for part in parts):
        return False
    if any(True for part in module.modules() if part not in parts for _ in part.parameters(recurse=False)):
        return False
    kinds = inspect.Parameter
    arguments = inspect.signature(type(module).forward).parameters.values()
    return len([one for one in arguments if one.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]) == 1 + 1  # self


def _is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or (type(part).__name__.endswith("Conv1D") and not isinstance(part, nn.Conv1d))


def _is_of_tokens(part: nn.Module) -> bool:
    is_plain = not any(True for _ in part.parameters()) and not any(True for _ in part.buffers())
    return is_plain or type(part).__name__.endswith(("LayerNorm", "RMSNorm"))


def _with_causal_loss(model: nn.Module) -> Any:
    """The model of transformers in `model` that computes a causal loss by their table."""
    try:
        from transformers import PreTrainedModel
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ModuleNotFoundError:
        raise ConfigError([_no_loss(model, "transformers is not installed")]) from None
    found = next((one for one in model.modules() if isinstance(one, PreTrainedModel)), None)
    if found is None:
        raise ConfigError([_no_loss(model, "no model of transformers is in it")])
    forward = inspect.unwrap(type(found).forward)
    is_causal = found.loss_function is ForCausalLMLoss or isinstance(found.loss_function, VocabularyLoss)
    if "loss_function" not in forward.__code__.co_names or not is_causal:
        raise ConfigError([_no_loss(found, "its loss is not transformers' causal one, by its table of losses")])
    return found


def _head_of(model: Any) -> nn.Linear:
    head: Any = model.get_output_embeddings()
    kind = type(head)
    if kind is not nn.Linear and kind.__bases__ != (ColumnLayer, nn.Linear):
        raise ConfigError([_no_loss(model, f"its head is a {kind.__name__}, no plain linear layer")])
    if "forward" in head.__dict__:
        raise ConfigError([_no_loss(model, "its head has another forward already")])
    found: nn.Linear = head
    return found


def _no_loss(model: nn.Module, reason: str) -> Problem:
    expected = f"the loss of a {type(model).__name__} cannot be computed in tiles: {reason}"
    hint = f'set "{_KEY}": {{"loss": false}}, and call polyaccel.torch.tiled.tiled_cross_entropy for a loss of your own'
    return Problem(f"{_KEY}.loss", True, expected, hint)


def _no_mlps(settings: TileSettings) -> Problem:
    if settings.mlps:
        expected = "no module of the model has this class or name"
        return Problem(f"{_KEY}.mlps", list(settings.mlps), expected, "look at print(model)")
    expected = "no feed-forward layer of one argument is found in the model's blocks"
    hint = f"name modules by class or full name in {_KEY}.mlps, or set {_KEY}.mlp to false"
    return Problem(f"{_KEY}.mlp", True, expected, hint)
