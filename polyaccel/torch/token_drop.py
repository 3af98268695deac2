"""Random layerwise token dropping (random-LTD): chosen layers see a random part of each sequence's tokens.

Yao et al. 2022 (arXiv 2211.11586). Each chosen layer draws its own part for each sequence, and computes on these tokens
in their order. The others pass by it unchanged.

[Note: Draws of dropped tokens]
A draw follows from the seed, the number of the micro-batch, the rank's place among data ranks and the layer. So tensor
ranks of one place draw the same, a region that is computed again sees the tokens of its first time, and a checkpoint
continues with the draws that would have come.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polyaccel.engine.policies.data_sampling import TokenDropPolicy
from polyaccel.errors import ConfigError, PolyaccelError, Problem

_KEY = "data_efficiency.data_routing.random_ltd"
_PRIME = 1_000_003
_HIDDEN = "hidden_states"
_CACHES = ("cache", "past_key_value", "past_key_values", "layer_past", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
"""Named inputs of layers that describe all tokens in ways that do not allow some to be left out."""
_ENCODER = "encoder_"
"""How names of inputs begin that belong to other tokens, those of an encoder."""
_BIASES = ("bias", "alibi")
"""Parts of names of inputs that are added to scores: a layer takes their last part, whatever their length."""


class TokenDrop:
    """The chosen layers of `model`; `place` is the rank's among data ranks, and `done` gives the finished steps and
    micro-batches."""

    def __init__(
        self, model: nn.Module, policy: TokenDropPolicy, place: int, done: Callable[[], tuple[int, int]]
    ) -> None:
        self._policy, self._place, self._done = policy, place, done
        self.total = policy.total
        self._chosen: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._names: dict[int, Callable[[tuple[Any, ...]], dict[str, Any]]] = {}
        self._hooks: list[Any] = []
        layers = find_layers(model, policy.total)
        self._flash = {number for number in policy.layers if _attends_by_flash(layers[number])}
        for number in policy.layers:
            self._chosen[number] = []
            self._names[number] = partial(_by_name, signature(layers[number].forward))
            before, after = _Before(self, number), _After(self, number)
            self._hooks.append(layers[number].register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.append(layers[number].register_forward_hook(after, prepend=True))

    @property
    def tokens(self) -> int:
        """Tokens that chosen layers see in the step under way, where sequences are longer."""
        return self._policy.tokens(self._done()[0])

    def release(self) -> None:
        """Let all layers see all tokens again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def take(self, number: int, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        """Return a layer's inputs for its tokens, and keep what the others are."""
        hidden = inputs[0] if inputs else named.get(_HIDDEN)
        if not isinstance(hidden, Tensor) or hidden.dim() < 2:
            kind = type(hidden).__name__
            hint = "let the layer take its hidden states first, or as hidden_states"
            raise PolyaccelError(f"tokens cannot be dropped from a layer's {kind}", hint=hint, value=kind)
        length, batch = hidden.shape[self._policy.sequence_dim], hidden.shape[1 - self._policy.sequence_dim]
        if self.tokens >= length:
            return inputs, named
        every = self._names[number](inputs) | named
        given = [name for name in _CACHES if every.get(name) is not None]
        if given and not torch.is_grad_enabled():
            return inputs, named  # generation
        if given:
            hint = (
                "pass use_cache=False" if given[0] == "cache" or "past" in given[0] else "leave packing for kernels out"
            )
            raise PolyaccelError(f"tokens cannot be dropped with {given[0]}", hint=hint, value=given[0])
        if batch == 1 and every.get("position_ids") is not None and number in self._flash:
            hint = "choose sdpa, or more sequences in a micro-batch"
            message = (
                "flash attention of transformers takes positions with gaps as borders of documents, in a batch of 1"
            )
            raise PolyaccelError(message, hint=hint, value=batch)
        kept = self._draw(number, batch, length).to(hidden.device)
        self._chosen[number].append((hidden, kept))
        cut = _Cut(kept, length, self._policy.sequence_dim)
        positional = self._names[number](inputs)
        named = {name: hidden if name == _HIDDEN else self._left(cut, name, one) for name, one in named.items()}
        if inputs:
            rest = [self._left(cut, name, one) for name, one in list(positional.items())[1:]]
            return (cut.hidden(hidden), *rest), named
        return inputs, named | {_HIDDEN: cut.hidden(hidden)}

    def _left(self, cut: _Cut, name: str, value: Any) -> Any:
        """What is left of an input for the kept tokens."""
        if name == self._policy.mask_name and value is not None:
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                hint = "choose an attention whose mask is a tensor, such as sdpa"
                raise PolyaccelError(f"tokens cannot be dropped from a mask of type {kind}", hint=hint, value=kind)
            return cut.mask(value)
        if name.startswith(_ENCODER):
            return tree_map_only(Tensor, cut.of_encoder, value)
        if isinstance(value, Tensor) and cut.by_pairs(name, value):
            raise cut.refusal(value)
        return tree_map_only(Tensor, cut.cut_companion, value)

    def give_back(self, number: int, output: Any) -> Any:
        """Return a layer's output with the tokens that passed by."""
        if not self._chosen[number]:
            return output
        hidden, kept = self._chosen[number].pop()
        changed = output[0] if isinstance(output, (tuple, list)) else output
        if not isinstance(changed, Tensor):
            kind = type(changed).__name__
            hint = "let the layer return its hidden states, alone or first"
            raise PolyaccelError(f"tokens cannot be put back into a layer's {kind}", hint=hint, value=kind)
        place = _Cut(kept, 0, self._policy.sequence_dim).place(hidden)
        whole = hidden.scatter(self._policy.sequence_dim, place, changed.to(hidden.dtype))
        if isinstance(output, (tuple, list)):
            return type(output)((whole, *output[1:]))
        return whole

    def forget(self, number: int) -> None:
        """Forget a pass that raised before the layer returned."""
        self._chosen[number].clear()

    def _draw(self, number: int, batch: int, length: int) -> Tensor:
        """The tokens of each sequence that a layer sees, rising, (batch, tokens)."""
        seed = 0
        for part in (self._policy.seed, self._done()[1], self._place, number):
            seed = seed * _PRIME + part
        generator = torch.Generator().manual_seed(seed % 2**63)
        drawn = torch.rand(batch, length, generator=generator).argsort(1)[:, : self.tokens]
        return drawn.sort(1).values


class _Before:
    def __init__(self, drop: TokenDrop, number: int) -> None:
        self._drop, self._number = drop, number

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Cut a layer's inputs in training."""
        self._drop.forget(self._number)
        if layer.training:  # without gradients too: a reentrant region computes its gradients in a second pass
            return self._drop.take(self._number, inputs, named)
        return inputs, named


class _After:
    def __init__(self, drop: TokenDrop, number: int) -> None:
        self._drop, self._number = drop, number

    def __call__(self, layer: nn.Module, inputs: Any, output: Any) -> Any:
        """Put the other tokens back."""
        return self._drop.give_back(self._number, output)


class _Cut:
    """What is left of tensors for the tokens `kept` of `length`, (batch, tokens)."""

    def __init__(self, kept: Tensor, length: int, sequence_dim: int) -> None:
        self._kept, self._length, self._dim = kept, length, sequence_dim

    def place(self, tensor: Tensor) -> Tensor:
        """Return the index of kept tokens, as wide as `tensor`."""
        index = self._kept if self._dim == 1 else self._kept.T
        return index.reshape(*index.shape, *[1] * (tensor.dim() - 2)).expand(*index.shape, *tensor.shape[2:])

    def hidden(self, tensor: Tensor) -> Tensor:
        """Cut hidden states."""
        return tensor.gather(self._dim, self.place(tensor))

    def mask(self, tensor: Tensor) -> Tensor:
        """Cut an attention mask: (batch, length), or (batch, heads, 1 or length, length), where batch may be 1."""
        if tensor.dim() == 2:
            return self.cut_companion(tensor)
        if tensor.dim() != 4 or tensor.shape[2] not in (1, self._length) or tensor.shape[3] != self._length:
            raise self.refusal(tensor)
        whole = tensor.expand(len(self._kept), -1, -1, -1)
        whole = whole if whole.shape[2] == 1 else self._rows(whole)
        columns = self._kept[:, None, None, :].expand(-1, *whole.shape[1:3], -1)
        return whole.gather(3, columns)

    def _rows(self, mask: Tensor) -> Tensor:
        index = self._kept[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
        return mask.gather(2, index)

    def by_pairs(self, name: str, tensor: Tensor) -> bool:
        """Return whether an input says something about pairs of tokens: a bias, or a mask by another name."""
        is_bias = any(word in name for word in _BIASES)
        return tensor.dim() > 2 and (is_bias or ("mask" in name and self._length in tensor.shape))

    def refusal(self, tensor: Tensor) -> PolyaccelError:
        """Return the error about an input that cannot be cut."""
        shape = tuple(tensor.shape)
        hint = f'name the mask in "model_mask_name", as (batch, heads, length, length), or leave {_KEY} out'
        return PolyaccelError(f"tokens cannot be dropped from an input of shape {shape}", hint=hint, value=shape)

    def of_encoder(self, tensor: Tensor) -> Tensor:
        """Return what belongs to other tokens. Of a mask (batch, heads, length, others) the rows are cut."""
        if tensor.dim() != 4 or tensor.shape[2] in (1, len(self._kept[0])):
            return tensor
        return self._rows(tensor.expand(len(self._kept), -1, -1, -1))

    def cut_companion(self, tensor: Tensor) -> Tensor:
        """Cut what accompanies tokens, such as positions: (batch, length, ...), where batch may be 1."""
        if self._length not in tensor.shape:
            return tensor
        if tensor.dim() < 2 or tensor.shape[1] != self._length or tensor.shape[0] not in (1, len(self._kept)):
            raise self.refusal(tensor)
        whole = tensor.expand(len(self._kept), *tensor.shape[1:])
        index = self._kept.reshape(*self._kept.shape, *[1] * (tensor.dim() - 2))
        return whole.gather(1, index.expand(*self._kept.shape, *tensor.shape[2:]))


def _attends_by_flash(layer: nn.Module) -> bool:
    configs = [getattr(part, "config", None) for part in layer.modules()]
    return any("flash" in str(getattr(one, "_attn_implementation", None)) for one in configs)


def _by_name(known: Signature, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Positional inputs under the names of their parameters, or else under numbers."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, one in known.parameters.items() if one.kind in kinds]
    return {names[at] if at < len(names) else str(at): one for at, one in enumerate(inputs)}


def find_layers(model: nn.Module, total: int) -> nn.ModuleList:
    """Return the model's list of `total` layers. Raise ConfigError where there is none, or several."""
    lists = {name: one for name, one in model.named_modules() if isinstance(one, nn.ModuleList)}
    found = [name for name, one in lists.items() if len(one) == total]
    if len(found) != 1:
        lengths = {name: len(one) for name, one in lists.items()}
        expected = f"the model has {len(found)} lists of so many layers: {lengths}"
        raise ConfigError(
            [Problem(f"{_KEY}.total_layer_num", total, expected, "give the length of its list of layers")]
        )
    return lists[found[0]]
