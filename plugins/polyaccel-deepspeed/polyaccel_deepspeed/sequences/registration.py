"""Attention of transformers' models whose batches the script has cut: each rank sees its own tokens alone, so lengths
and positions are sent to the other ranks, once a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from polyaccel.comm.base import Communicator
from polyaccel.torch.context_parallel.block_mask import AttentionRule
from polyaccel.torch.context_parallel.huggingface import CutForward, SequenceMask, core_attention
from polyaccel.torch.context_parallel.shares import TokenShares
from polyaccel_deepspeed.sequences.names import marks_of_parts, ulysses_settings

_ORIGINAL = "polyaccel_original_"


@dataclass
class _Asked:
    """The arguments with which a model asked for a mask, and the mask over ranks, once a layer has sent its lengths."""

    arguments: dict[str, Any]
    mask: SequenceMask | None = None


class Registration:
    """Attention over the ranks of `communicator`, with transformers' implementation `core` in between.

    `attention` is that implementation; None where each model has its own.
    """

    def __init__(
        self, attention: Callable[..., Any] | None, communicator: Communicator, core: str, disable_in_eval: bool
    ) -> None:
        self._attention = attention
        self._communicator = communicator
        self._core = core
        self._disable_in_eval = disable_in_eval

    @classmethod
    def of_name(cls, core: str, communicator: Communicator, disable_in_eval: bool) -> None:
        """Take the place of implementation `core` in transformers' tables, in this process."""
        original = _ORIGINAL + core
        if original not in ALL_MASK_ATTENTION_FUNCTIONS:
            ALL_MASK_ATTENTION_FUNCTIONS.register(original, ALL_MASK_ATTENTION_FUNCTIONS[core])
            kept = ALL_ATTENTION_FUNCTIONS.get(core, _eager)
            ALL_ATTENTION_FUNCTIONS.register(original, kept)
        made = cls(ALL_ATTENTION_FUNCTIONS[original], communicator, core, disable_in_eval)
        ALL_MASK_ATTENTION_FUNCTIONS.register(core, lambda **arguments: _Asked(arguments))
        ALL_ATTENTION_FUNCTIONS.register(core, made.attend)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        **named: Any,
    ) -> tuple[Tensor, Any]:
        """transformers' attention function."""
        asked = attention_mask if isinstance(attention_mask, _Asked) else _Asked({})
        if self._disable_in_eval and not module.training:
            mask = attention_mask
            if isinstance(attention_mask, _Asked):
                mask = ALL_MASK_ATTENTION_FUNCTIONS[_ORIGINAL + self._core](**asked.arguments)
            attention = self._attention or core_attention(self._core, module)
            found: tuple[Tensor, Any] = attention(module, query, key, value, mask, scaling=scaling, **named)
            return found
        if asked.mask is None:
            # The model's own mask depends on this rank's positions, so the layer is asked.
            is_causal = getattr(module, "is_causal", True)
            rule = AttentionRule(is_causal, named.get("sliding_window") if is_causal else None)
            asked.mask = self._mask(asked.arguments, rule, query, named.get("position_ids"))
        out = asked.mask.attend(module, query, key, value, scaling, named)
        return out.transpose(1, 2).contiguous(), None

    def _mask(
        self, arguments: dict[str, Any], rule: AttentionRule, query: Tensor, positions: Tensor | None
    ) -> SequenceMask:
        """The mask of the whole sequence. Collective."""
        rows, length = len(query), query.shape[2]
        lengths = self._communicator.all_gather_object(length)
        marks = marks_of_parts(self._communicator, None if positions is None else positions.view(-1, length), lengths)
        shares = TokenShares.of_lengths(lengths)
        settings = ulysses_settings(self._core)
        cut = CutForward(self._communicator, settings, _ORIGINAL + self._core, shares, marks, rows)
        rest = {**arguments}
        for name in ("mask_function", "batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "attention_mask"):
            rest.pop(name, None)
        rest.setdefault("device", query.device)
        function = causal_mask_function if rule.causal else bidirectional_mask_function
        if rule.window is not None:
            function = sliding_window_causal_mask_function(rule.window)
        return SequenceMask(cut, function, rule, rest)


def _eager(module: nn.Module, *args: Any, **named: Any) -> Any:
    return core_attention("eager", module)(module, *args, **named)
