"""Whether tokens of a model interact other than by attention, found by comparison: `find_mixer`.

[Note: Tokens that interact]
A rank of a sequence computes some of the tokens, so only attention may join tokens: it computes over ranks. Classes and
names of modules do not decide it, for a few operations in a forward join neighbours as well as a convolution does. So
attention is replaced in a copy of the model by a function of each token alone. The copy computes a short sequence, then
some of its tokens. Where the two differ at a token, that token depends on others, or on its place among them. The first
module that differs is named: in whose inputs nothing differs, and whose outputs do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from polyaccel.torch.random_copy import random_copy, unchanged_generators
from polyaccel.torch.shrunk_config import shrunk

_ALONE = "polyaccel_alone"
"""The name of attention of each token to itself."""
_LENGTH = 23
_LARGEST = 1 << 27
"""Elements of a model that a copy of it computes within a second; of a larger one a small model is made."""
_CLOSE = 1e-3
"""Tokens that interact differ by about 1 of their size; rounding by 1e-6."""
_log = getLogger(__name__)


def find_mixer(model: nn.Module) -> str | None:
    """Return the first module of `model` that joins tokens outside of attention, by its full name; '' for its own
    forward, as one that gives a class for each sequence.

    None where there is none, or where no copy can be computed, which is logged.
    """
    reasons = []
    with unchanged_generators(), torch.no_grad(), torch.device("cpu"):
        for make in (_whole_copy, _small_copy):
            try:
                return _mixer_of(*make(model))
            except Exception as error:  # of a model that cannot be copied, or be called with words alone
                reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
    kind = type(model).__name__
    _log.info("not proven: that tokens of %s interact in attention alone: %s", kind, "; ".join(reasons))
    return None


class _TooLargeError(Exception):
    """A model is not copied."""


def _whole_copy(model: nn.Module) -> tuple[nn.Module, str]:
    is_cut = any(getattr(one, "parallel_cuts", None) for one in model.modules())
    if is_cut or sum(one.numel() for one in model.parameters()) > _LARGEST:
        raise _TooLargeError("a copy would be too large, or is cut")
    own = random_copy(model)
    for theirs, copied in zip(model.modules(), own.modules(), strict=True):
        if isinstance(copied, nn.modules.batchnorm._BatchNorm):
            copied.training = theirs.training  # its statistics are of all tokens
    return own, ""


def _small_copy(model: nn.Module) -> tuple[nn.Module, str]:
    prefix, theirs = next((name, one) for name, one in model.named_modules() if isinstance(one, PreTrainedModel))
    small, _ = shrunk(theirs.config)
    return random_copy(type(theirs)(small)), f"{prefix}." if prefix else ""


def _mixer_of(own: nn.Module, prefix: str) -> str | None:
    """The first module of a copy whose tokens interact."""
    transformer = next(module for module in own.modules() if isinstance(module, PreTrainedModel))
    if _ALONE not in ALL_ATTENTION_FUNCTIONS:
        ALL_MASK_ATTENTION_FUNCTIONS.register(_ALONE, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
        ALL_ATTENTION_FUNCTIONS.register(_ALONE, _attend_alone)
    transformer.set_attn_implementation(_ALONE)
    whole = transformer.config
    theirs = whole.get_text_config()
    length = min(_LENGTH, getattr(theirs, "max_position_embeddings", None) or _LENGTH)
    words = _words_of(whole.to_dict(), theirs.vocab_size, length)
    places = torch.tensor([*range(2, 7), *range(length - 6, length - 2)])
    assert len(places) < length

    def run(chosen: Tensor) -> Any:
        ids = words[chosen].unsqueeze(0)
        named = {"position_ids": chosen.unsqueeze(0), "attention_mask": torch.ones_like(ids)}
        return own(input_ids=ids, **named, use_cache=False)

    comparison = _Comparison(own, length, places)
    with comparison.recording():
        of_whole = run(torch.arange(length))
    try:
        with comparison.comparing():
            of_part = run(places)
    except _Mixed as found:
        return prefix + found.name
    return "" if _are_of_sequences(of_whole, of_part) else None


def _are_of_sequences(whole: Any, part: Any) -> bool:
    """Whether outputs without a place for each token follow from more tokens than one."""
    pairs = zip(tree_leaves(whole), tree_leaves(part), strict=True)
    return any(
        isinstance(one, Tensor) and one.is_floating_point() and one.dim() > 1 and one.shape == other.shape
        and not bool(((one - other).abs() <= _CLOSE * one.abs().max()).all())
        for one, other in pairs
    )  # fmt: skip


def _words_of(fields: dict[str, Any], vocabulary: int, length: int) -> Tensor:
    """Words of which none is special to the model."""
    special = {one for one in tree_leaves(fields) if type(one) is int}
    words = [one for one in range(vocabulary) if one not in special] or [0]
    generator = torch.Generator().manual_seed(1)
    return torch.tensor(words)[torch.randint(0, len(words), (length,), generator=generator)]


def _attend_alone(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **named: Any
) -> tuple[Tensor, None]:
    """A function of each token's own query, key and value, in the place of attention."""
    heads = query.shape[1]
    key, value = (one.repeat_interleave(heads // one.shape[1], 1) for one in (key, value))
    score = (query * key).sum(-1, keepdim=True) * query.shape[-1] ** -0.5
    return (value * (1.5 + torch.tanh(score))).transpose(1, 2).contiguous(), None


class _Mixed(Exception):
    """A pass has found what it looks for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Comparison:
    """Values that pass in and out of the modules of `model`, of a whole sequence and then of the tokens `places`."""

    def __init__(self, model: nn.Module, length: int, places: Tensor) -> None:
        self._model, self._length, self._places = model, length, places
        self._values: dict[tuple[str, str, int], list[Tensor]] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._running: list[str] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the values of a pass."""

        def keep(key: tuple[str, str, int], found: list[Tensor]) -> None:
            self._values[key] = [one.clone() for one in found]  # before a module changes them in place

        with self._hooked(keep):
            yield

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Compare a pass of `places` with the pass before, and raise _Mixed at the first difference."""

        def compare(key: tuple[str, str, int], found: list[Tensor]) -> None:
            whole = self._values.get(key, [])
            if len(whole) == len(found) and any(map(self._differ, whole, found)):
                raise _Mixed(self._running[-1] if self._running else key[0])

        with self._hooked(compare):
            yield

    def _differ(self, whole: Tensor, part: Tensor) -> bool:
        """Whether values of tokens are others in a part of the sequence."""
        if whole.dim() != part.dim() or not whole.is_floating_point():
            return False
        dims = [dim for dim, size in enumerate(whole.shape) if size != part.shape[dim]]
        if len(dims) != 1 or (whole.shape[dims[0]], part.shape[dims[0]]) != (self._length, len(self._places)):
            return False
        largest = float(whole.abs().max()) if whole.numel() else 0.0
        difference = (whole.index_select(dims[0], self._places) - part).abs()
        return largest < torch.inf and not bool((difference <= _CLOSE * largest).all())

    @contextmanager
    def _hooked(self, visit: Callable[[tuple[str, str, int], list[Tensor]], None]) -> Iterator[None]:
        self._counts.clear()
        self._running.clear()

        def see(name: str, phase: str, values: Any) -> None:
            count = self._counts[name, phase] = self._counts.get((name, phase), 0) + 1
            visit((name, phase, count), [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)])

        def begin(name: str, args: Any, named: Any) -> None:
            see(name, "in", (args, named))  # what a module receives was joined by the one that calls it
            self._running.append(name)

        def end(name: str, outputs: Any) -> None:
            see(name, "out", outputs)
            self._running.pop()

        handles = []
        for name, module in self._model.named_modules():
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, named, name=name: begin(name, args, named), with_kwargs=True
                )
            )
            handles.append(module.register_forward_hook(lambda _, args, outputs, name=name: end(name, outputs)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
