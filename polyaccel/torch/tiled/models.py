"""Models that compute in tiles without their doing: the causal loss of transformers' models, and feed-forward layers
that are found by structure."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping
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
from polyaccel.torch.tiled.tokens_alone import chooses_modules, treats_tokens_alone

_LEAST_TOKENS = 256
_LEAST_LINEARS = 2
_KEY = "tiled_compute"
_CHUNKS = ("feed_forward_chunk", "ff_chunk")
_CROSS_ENTROPIES = ("CrossEntropyLoss", "cross_entropy")


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
            chunks = {} if settings.mlps else find_chunks(model)
            if not found and not chunks:
                self.release()
                raise ConfigError([_no_mlps(settings)])
            self._mlps = [TiledForward(each, settings.mlp_tokens) for each in found.values()]
            self._mlps += [TiledForward(one, settings.mlp_tokens, method) for one, method in chunks.values()]
            self.module_names += (*found, *chunks)

    def release(self) -> None:
        """Compute as before."""
        if self._loss is not None:
            self._loss.release()
        for mlp in self._mlps:
            mlp.release()
        self._mlps.clear()


class _TiledModelLoss:
    """The loss of a model of transformers. See [Note: Lazy logits]."""

    def __init__(self, model: nn.Module, settings: TileSettings) -> None:
        self.model = _with_loss(model)
        self._in_evaluation = settings.in_evaluation
        self._signature = inspect.signature(self.model.forward)
        self._head = TiledHead(_head_of(self.model), settings.loss_tokens)
        self._before = self.model.__dict__.get("_loss_function")
        if _has_causal_loss(self.model):
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
    """`forward` of a feed-forward layer, or another `method` of a block, in tiles. A copy of the layer gets the
    ordinary one, and so does an unpickled layer."""

    def __init__(self, layer: nn.Module, tile_tokens: int | None, method: str = "forward") -> None:
        self.layer = layer
        self._tile_tokens = tile_tokens
        self._method = method
        self._own = layer.__dict__.get(method)
        self.before = getattr(layer, method)
        layer.__dict__[method] = self

    @property
    def __signature__(self) -> inspect.Signature:  # transformers' apply_chunking_to_forward counts its arguments
        return inspect.signature(self.before)

    def release(self) -> None:
        """Give the layer its own forward back."""
        if self.layer.__dict__.get(self._method) is self:
            del self.layer.__dict__[self._method]
            if self._own is not None:
                self.layer.__dict__[self._method] = self._own

    def __call__(self, *args: Any, **named: Any) -> Any:
        given = (*args, *named.values())
        x = given[0] if len(given) == 1 else None
        if not isinstance(x, Tensor) or x.dim() < 2 or torch._C._are_functorch_transforms_active():
            return self.before(*args, **named)
        tokens = self._tile_tokens or max(_LEAST_TOKENS, x.shape[-1])
        if x.numel() <= tokens * x.shape[-1]:
            return self.before(*args, **named)
        return tiled_map(self.before, x, tile_tokens=tokens, parameters=self._parameters())

    def _parameters(self) -> Iterator[nn.Parameter]:
        parts = [self.layer] if self._method == "forward" else parts_of_chunk(self.layer, self._method).values()
        return (parameter for part in parts for parameter in part.parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.layer))
        return self if copy is None else types.MethodType(getattr(type(self.layer), self._method), copy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.layer, self._method)  # whose attributes are not there yet when this is called


def find_mlps(model: nn.Module, names: tuple[str, ...] = (), *, one_way: bool = False) -> dict[str, nn.Module]:
    """The feed-forward layers in the blocks of `model`, by full name; none lies inside another.

    They are modules of one argument, with at least two linear layers and otherwise nothing but activations, dropout and
    norms, and their tokens do not interact. With `one_way` all tokens pass the same modules in them, so experts are
    found one by one. `names` choose modules by class or full name instead.

    Raises ConfigError for a chosen module whose tokens interact.
    """
    are_alone = _Alone(one_way=one_way)
    if names:
        chosen = find_blocks(model, names)
        if joined := [name for name, one in chosen.items() if not are_alone(one, "forward")]:
            expected = f"tokens interact in {joined[0]}, so it cannot be computed in tiles"
            raise ConfigError([Problem(f"{_KEY}.mlps", list(names), expected, "leave it out")])
        return chosen
    found: dict[str, nn.Module] = {}
    for block_name, block in find_blocks(model).items():
        for name, module in block.named_modules(prefix=block_name):
            is_inside = module is block or any(name.startswith(f"{outer}.") for outer in found)
            if not is_inside and _is_mlp(module) and are_alone(module, "forward"):
                found[name] = module
    return found


def find_chunks(model: nn.Module, *, one_way: bool = False) -> dict[str, tuple[nn.Module, str]]:
    """The blocks of `model` whose feed-forward layer is a method, for transformers' `apply_chunking_to_forward`, by
    full name with that method. What it calls has linear layers, and otherwise nothing but activations, dropout and
    norms. A method that calls one of `find_mlps` is left out: its tokens would be cut twice."""
    found: dict[str, tuple[nn.Module, str]] = {}
    are_alone = _Alone(one_way=one_way)
    mlps = set(find_mlps(model, one_way=one_way).values())
    for block_name, block in find_blocks(model).items():
        for name, module in block.named_modules(prefix=block_name):
            for method in _CHUNKS:
                parts = parts_of_chunk(module, method)
                if not parts or _is_mlp(module):
                    continue
                called = [each for part in parts.values() for each in part.modules()]
                if mlps.isdisjoint(called) and _has_only_token_layers(called) and are_alone(module, method):
                    found[name] = module, method
    return found


def parts_of_chunk(module: nn.Module, method: str) -> dict[str, nn.Module]:
    """The children of `module` that its `method`, of one argument, calls; none where it has no such method."""
    found = getattr(type(module), method, None)
    if found is None or len(inspect.signature(found).parameters) != 1 + 1:  # self
        return {}
    function: Any = inspect.unwrap(found)
    return {name: child for name, child in module.named_children() if name in function.__code__.co_names}


class _Alone:
    """Whether layers treat each token by itself, found once for all layers of one description."""

    def __init__(self, *, one_way: bool) -> None:
        self._one_way = one_way
        self._found: dict[tuple[str, str], bool] = {}

    def __call__(self, layer: nn.Module, method: str) -> bool:
        key = f"{type(layer).__module__} {layer}", method
        if key not in self._found:
            is_routed = self._one_way and chooses_modules(layer, method)
            self._found[key] = not is_routed and treats_tokens_alone(layer, method)
        return self._found[key]


def _is_mlp(module: nn.Module) -> bool:
    if not _has_only_token_layers(list(module.modules())):
        return False
    kinds = inspect.Parameter
    arguments = inspect.signature(type(module).forward).parameters.values()
    return (
        len([argument for argument in arguments if argument.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)])
        == 1 + 1
    )  # self


def _has_only_token_layers(modules: list[nn.Module]) -> bool:
    """Whether modules, with those inside, are linear layers, two at least, and otherwise treat each token alone."""
    leaves = [one for one in modules if next(one.children(), None) is None]
    if sum(map(is_linear, leaves)) < _LEAST_LINEARS or not all(is_linear(one) or _is_of_tokens(one) for one in leaves):
        return False
    return not any(True for one in modules if one not in leaves for _ in one.parameters(recurse=False))


def is_linear(part: nn.Module) -> bool:
    """Whether a module is a linear layer, torch's or GPT-2's."""
    return isinstance(part, nn.Linear) or (type(part).__name__.endswith("Conv1D") and not isinstance(part, nn.Conv1d))


def _is_of_tokens(part: nn.Module) -> bool:
    is_plain = not any(True for _ in part.parameters()) and not any(True for _ in part.buffers())
    return is_plain or type(part).__name__.endswith(("LayerNorm", "RMSNorm"))


def _with_loss(model: nn.Module) -> Any:
    """The model of transformers in `model`, which computes a loss of the words of its head."""
    try:
        from transformers import PreTrainedModel
    except ModuleNotFoundError:
        raise ConfigError([_no_loss(model, "transformers is not installed")]) from None
    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None:
        raise ConfigError([_no_loss(model, "no model of transformers is in it")])
    names = inspect.unwrap(type(found).forward).__code__.co_names
    if not _has_causal_loss(found) and not {"loss_function", *_CROSS_ENTROPIES} & set(names):
        raise ConfigError([_no_loss(found, "its forward has neither transformers' loss function nor cross entropy")])
    return found


def _has_causal_loss(model: Any) -> bool:
    """Whether a model of transformers computes the causal loss by their table."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    is_causal = model.loss_function is ForCausalLMLoss or isinstance(model.loss_function, VocabularyLoss)
    return is_causal and "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names


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
