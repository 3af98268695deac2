"""Attention over ranks under transformers' names: in its tables of attention functions and of masks.

A model asks the first table for its attention by `config._attn_implementation`, and the second for the mask that goes
with it. Under our names the mask is a value that defines how attention is computed over ranks, so a layer that is
computed again in a backward pass has all it needs. A forward pass that is not cut gets the masks and the attention that
the model had before.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from polyaccel.comm.base import Communicator
from polyaccel.errors import PolyaccelError
from polyaccel.torch.context_parallel.block_mask import AttentionRule, DocumentMask
from polyaccel.torch.context_parallel.kernels import kernel_for
from polyaccel.torch.context_parallel.local import Plan, local_attention
from polyaccel.torch.context_parallel.ring import ring_attention, ring_plans
from polyaccel.torch.context_parallel.settings import OTHER_METHOD, SequenceSettings
from polyaccel.torch.context_parallel.shares import HeadShares, TokenShares
from polyaccel.torch.context_parallel.ulysses import exchanged_attention

PREFIX = "polyaccel_"
MaskFunction = Callable[..., Any]
"""Of transformers': (row, head, query, key), all integers, to whether the query sees the key."""
current: ContextVar[CutForward | None] = ContextVar("polyaccel_sequence", default=None)
"""The forward pass under way in this thread, if it is cut over ranks."""


def registered(core: str) -> str:
    """The name under which transformers finds our attention, with `core` where a forward pass is not cut."""
    name = PREFIX + core
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, partial(_make_mask, core))
        ALL_ATTENTION_FUNCTIONS.register(name, partial(_attend, core))
    return name


@dataclass
class CutForward:
    """One forward pass, cut over the ranks of `communicator`: what each has, and which masks its layers asked for."""

    communicator: Communicator
    settings: SequenceSettings
    core: str
    shares: TokenShares
    marks: DocumentMask
    rows: int
    model: str = "model"
    """Its class."""
    calls: int = 0
    """Attentions over ranks so far."""
    masks: dict[Any, SequenceMask] = field(default_factory=dict)


class MaskReadError(PolyaccelError, AttributeError):
    """A model reads its mask. `hasattr` of a mask is false for what only a tensor has."""


@dataclass
class SequenceMask:
    """A mask of transformers', for the whole sequence, which no rank has in memory.

    Models pass it to their attention. One that reads it as a tensor is refused.
    """

    cut: CutForward
    function: MaskFunction
    rule: AttentionRule | None
    """The rule of the function; None for what is neither causal, a window nor all."""
    arguments: dict[str, Any]
    """Those of transformers for the mask of the core attention."""
    _plans: tuple[Plan, ...] | None = None
    _whole: Any = None

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, named: dict[str, Any]
    ) -> Tensor:
        """Attention of this rank's tokens, (rows, heads, tokens, width)."""
        cut = self.cut
        cut.calls += 1
        unlike = _unsupported_features(self.rule, named)
        if cut.settings.method == "ring":
            if unlike is not None:
                raise PolyaccelError(
                    f"ring attention cannot compute {type(module).__name__}: {unlike}",
                    hint='use the method "ulysses", which has any attention in between',
                    value=unlike,
                )
            return self._ring(q, k, v, scaling)
        is_ours = unlike is None and cut.settings.core_attention == "blockwise"
        count = q.shape[1]
        own = slice(
            *HeadShares.from_counts(count, k.shape[1], cut.communicator.world_size).query[cut.communicator.rank]
        )
        if named.get("s_aux") is not None:
            named = {**named, "s_aux": named["s_aux"][own]}

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if is_ours:
                assert self.rule is not None
                return local_attention(q, k, v, rule=self.rule, marks=cut.marks, scale=scaling)
            heads = _WithHeads(module, count, own, q.shape[1] // k.shape[1])
            core = core_attention(cut.core, module)
            _require_no_pairs(module, core, named)
            out, _ = core(heads, q, k, v, self._core_mask(), scaling=scaling, **named)
            found: Tensor = out.transpose(1, 2)
            return found

        return exchanged_attention(q, k, v, cut.communicator, cut.shares.lengths, compute)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), named: Any = None) -> Any:
        mask = next(leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, cls))
        raise mask._refusal(getattr(function, "__name__", str(function)))

    def _refusal(self, read: str) -> PolyaccelError:
        return MaskReadError(
            f"the sequences of a {self.cut.model} cannot be cut over ranks: it reads its attention mask ({read}), "
            "which no rank has",
            hint=OTHER_METHOD,
            value=self.cut.model,
        )

    def _ring(self, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
        cut, rule = self.cut, self.rule
        assert rule is not None
        if self._plans is None:
            self._plans = ring_plans(cut.marks, rule, cut.shares, cut.communicator.rank, kernel_for(q))
        return ring_attention(
            q, k, v, cut.communicator, rule=rule, marks=cut.marks, shares=cut.shares, scale=scaling, plans=self._plans
        )

    def _core_mask(self) -> Any:
        """The mask of the whole sequence, as the core attention has it."""
        if self._whole is None:
            cut, function = self.cut, self.function
            segments = torch.stack([row.segments for row in cut.marks.rows]).expand(cut.rows, -1)
            is_packed = bool((segments != 0).any())
            device = self.arguments["device"]
            if is_packed:
                function = and_masks(function, packed_sequence_mask_function(segments.to(device)))
            is_key = torch.stack([row.is_key for row in cut.marks.rows]).expand(cut.rows, -1).to(device)
            arguments = {**self.arguments}
            arguments["allow_is_causal_skip"] = arguments.get("allow_is_causal_skip", True) and not is_packed
            make = ALL_MASK_ATTENTION_FUNCTIONS[cut.core]
            length = cut.marks.length
            arguments.update(batch_size=cut.rows, q_length=length, kv_length=length, q_offset=0, kv_offset=0)
            try:
                self._whole = (make(mask_function=function, attention_mask=is_key, **arguments),)
            except IndexError:
                raise PolyaccelError(
                    f"the sequences of a {cut.model} cannot be cut over ranks: its mask reads a tensor of this rank's "
                    "tokens alone",
                    hint=OTHER_METHOD,
                    value=cut.model,
                ) from None
        return self._whole[0]


def _refuse_operators() -> None:
    def refusing(operator: str) -> Callable[..., Any]:
        return lambda mask, *_: mask.__getattr__(operator)

    for name in ("getitem", "add", "radd", "sub", "rsub", "mul", "rmul", "and", "rand", "or", "ror", "invert", "neg"):
        setattr(SequenceMask, f"__{name}__", refusing(name))


_refuse_operators()


class _WithHeads:
    """A layer, as a core attention sees it: with this rank's query heads, `own` of `count`, `group` to a key head."""

    def __init__(self, module: nn.Module, count: int, own: slice, group: int) -> None:
        self._module, self._count, self._own = module, count, own
        self.num_key_value_groups = group

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._module)  # whose file has the model's own attention

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        has_head_each = isinstance(found, Tensor) and tuple(found.shape) == (self._count,)
        return found[self._own] if has_head_each else found  # attention sinks


def _require_no_pairs(module: nn.Module, core: Callable[..., Any], named: dict[str, Any]) -> None:
    """Raise PolyaccelError for a tensor that a core attention takes by name and that is of this rank's tokens."""
    for name in inspect.signature(core).parameters:
        if name != "s_aux" and isinstance(named.get(name), Tensor):
            raise PolyaccelError(
                f"the attention of {type(module).__name__} cannot be computed over ranks: it has {name}, of this "
                "rank's tokens",
                hint=OTHER_METHOD,
                value=name,
            )


def core_attention(core: str, module: nn.Module) -> Callable[..., Any]:
    """transformers' attention of that name; "eager" is the model's own, which stands in the file of its layers."""
    if core != "eager":
        found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[core]
        return found
    own = getattr(sys.modules[module.__class__.__module__], "eager_attention_forward", None)
    if own is None:
        raise PolyaccelError(
            f"{type(module).__name__} has no eager attention that can be called by itself",
            hint='use core_attention "blockwise" or "sdpa"',
            value="eager",
        )
    return own  # type: ignore[no-any-return]


def _attend(
    core: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **named: Any,
) -> tuple[Tensor, Any]:
    """transformers' attention function: (rows, heads, tokens, width) to (rows, tokens, heads, width)."""
    if isinstance(attention_mask, SequenceMask):
        out = attention_mask.attend(module, query, key, value, scaling, named)
        return out.transpose(1, 2).contiguous(), None
    cut = current.get()
    if cut is not None and query.shape[2] == cut.shares.lengths[cut.communicator.rank]:
        raise PolyaccelError(
            f"{type(module).__name__} attends to this rank's tokens alone: its model did not ask for a mask",
            hint=OTHER_METHOD,
            value=type(module).__name__,
        )
    found: tuple[Tensor, Any] = core_attention(core, module)(
        module, query, key, value, attention_mask, scaling=scaling, **named
    )
    return found


def _make_mask(core: str, **arguments: Any) -> Any:
    """transformers' mask function: the mask of a forward pass that is cut, or what the core attention has."""
    cut = current.get()
    if cut is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[core](**arguments)
    function = arguments.pop("mask_function", causal_mask_function)
    for name in ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "attention_mask"):
        arguments.pop(name, None)
    rule = _rule_of(function, cut.marks.length, cut.rows)
    key = rule or function
    if key not in cut.masks:
        cut.masks[key] = SequenceMask(cut, function, rule, arguments)
    return cut.masks[key]


def _rule_of(function: MaskFunction, length: int, rows: int) -> AttentionRule | None:
    """The rule of `function` on `rows` of `length` tokens, found by calling it; None where that is not one of ours."""
    if function is causal_mask_function:
        return AttentionRule()
    if function is bidirectional_mask_function:
        return AttentionRule(causal=False)
    every, zero = torch.arange(length), torch.zeros((), dtype=torch.int64)

    def seen_by(query: int, row: int = 0) -> Tensor:
        found: Tensor = function(torch.tensor(row), zero, torch.tensor(query), every)
        return found.expand(length)

    try:
        window = int(seen_by(length - 1).sum())
        for query in {0, length // 3, length // 2, window - 1, window, window + 1, length - 1}:
            if 0 <= query < length:
                expected = (every <= query) & (every > query - window)
                if not all(torch.equal(seen_by(query, row), expected) for row in {0, rows - 1}):
                    return None
    except (IndexError, RuntimeError, TypeError):  # it depends on more than places
        return None
    return AttentionRule() if window == length else AttentionRule(window=window)


def _unsupported_features(rule: AttentionRule | None, named: dict[str, Any]) -> str | None:
    """What our own attention does not compute of what a layer asks for, in words; None if it computes all."""
    if rule is None:
        return "its mask is neither causal, a window nor all"
    if named.get("dropout"):
        return f"its attention has a dropout of {named['dropout']:g}"
    for name in ("softcap", "s_aux", "position_bias"):
        if named.get(name) is not None:
            return f"its attention has {name}"
    return None
