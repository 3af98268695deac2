"""`generate` by the decoder of this package where it knows the model and the call, else by the module's own.

transformers prepares a call (config, processors, stopping, masks) and gives it to a decoding function of the caller's:
everything that it says about arguments stays true.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import PolyaccelError
from polyaccel.ops.base import KernelTable
from polyaccel.torch.generation.decode.errors import Unsupported
from polyaccel.torch.generation.decode.loop import Draws, Outcome, Request, decode_batch, decode_continuously
from polyaccel.torch.generation.decode.model import Decoder
from polyaccel.torch.generation.decode.proof import proved
from polyaccel.torch.generation.decode.structure import structure_of
from polyaccel.torch.sharding.sharded import EngineHook

log = getLogger(__name__)
_LOGGED: set[str] = set()
_UNREAD = ("inputs_embeds", "position_ids", "token_type_ids", "past_key_values")
"""Arguments that the decoder does not read."""
_OF_A_BATCH = (
    *("PrefixConstrainedLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    *("EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor"),
    "SynthIDTextWatermarkLogitsProcessor",
)
"""Processors of transformers that know a sequence by its place in the batch."""
_CRITERIA = ("MaxLengthCriteria", "MaxTimeCriteria", "EosTokenCriteria", "StopStringCriteria")
"""Stopping criteria of transformers that look at each sequence alone."""


def generate(
    module: nn.Module,
    kernels: KernelTable,
    inputs: Sequence[Any],
    named: dict[str, Any],
    *,
    seed: int | None = None,
    batch_size: int | None = None,
) -> Any:
    """Run `module.generate(*inputs, **named)`, by the decoder where that is possible. What is not is logged once.

    Args:
        module: A model, in evaluation mode and with whole parameters.
        kernels: Kernels of `DECODE_OPS`.
        inputs: Arguments of `generate`.
        named: Named arguments of `generate`.
        seed: Seed of the draws of each sequence; None draws from torch's generator.
        batch_size: Sequences that are decoded at a time; None for all.

    Returns:
        What the module's `generate` returns.
    """
    if batch_size is not None and batch_size < 1:
        raise PolyaccelError(f"generation with batch_size {batch_size}", hint="use at least 1", value=batch_size)
    try:
        _require_known(module, named)

        def decode(model: Any, input_ids: Tensor, **prepared: Any) -> Any:
            return _decoded(model, kernels, input_ids, seed, batch_size, **prepared)

        return module.generate(*inputs, **_with_stops(module, named), custom_generate=decode)  # type: ignore[operator]
    except Unsupported as reason:
        if str(reason) not in _LOGGED:
            _LOGGED.add(str(reason))
            log.info("generation is the module's own: %s", reason)
    return module.generate(*inputs, **named)  # type: ignore[operator]


def _with_stops(module: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """The arguments with stop strings as a criterion: with `custom_generate` transformers loses the tokenizer."""
    strings, tokenizer = named.get("stop_strings"), named.get("tokenizer")
    config: Any = named.get("generation_config") or getattr(module, "generation_config", None)
    if strings is None and getattr(config, "stop_strings", None) is not None:
        raise Unsupported("stop strings of a generation config")
    if strings is None or tokenizer is None:
        return named
    kinds: Any = import_module("transformers.generation")
    stops = kinds.StopStringCriteria(tokenizer, strings)
    others = {name: value for name, value in named.items() if name not in ("stop_strings", "tokenizer")}
    given = named.get("stopping_criteria") or ()
    return {**others, "stopping_criteria": kinds.StoppingCriteriaList([*given, stops])}


def _require_known(module: nn.Module, named: dict[str, Any]) -> None:
    if named.get("custom_generate") is not None:
        raise Unsupported("the call has a custom_generate")
    if given := [name for name in _UNREAD if named.get(name) is not None]:
        raise Unsupported(f"the argument {given[0]}")
    if not hasattr(module, "generation_config"):
        raise Unsupported(f"{type(module).__name__} is not a model of transformers")
    if any(torch.is_autocast_enabled(kind) for kind in {one.device.type for one in module.parameters()}):
        raise Unsupported("autocast is on")
    if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
        raise Unsupported("adapters that learn prompts")
    for name, part in module.named_modules():
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        if any(not isinstance(hook, EngineHook) for hook in hooks):
            raise Unsupported(f"{name or 'the model'} has hooks")


def _decoded(
    model: Any,
    kernels: KernelTable,
    ids: Tensor,
    seed: int | None,
    batch_size: int | None,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Any:
    mode = generation_config.get_generation_mode(others.get("assistant_model"))
    if mode not in ("greedy_search", "sample"):
        raise Unsupported(f"generation by {getattr(mode, 'value', mode)}")
    if streamer is not None or generation_config.output_attentions or generation_config.output_hidden_states:
        raise Unsupported("a streamer, attentions or hidden states")
    if stopping_criteria.max_length is None:
        raise Unsupported("no bound of the length")
    structure = structure_of(model)
    most = stopping_criteria.max_length
    if structure.window is not None and most > structure.window:
        raise Unsupported(f"{most} tokens in a window of {structure.window}")
    lengths = _lengths(ids, attention_mask)
    returns = generation_config.return_dict_in_generate
    call = Request(
        ids,
        lengths,
        logits_processor,
        stopping_criteria,
        generation_config._pad_token_tensor,
        Draws(bool(generation_config.do_sample), seed if generation_config.do_sample else None),
        bool(returns and generation_config.output_scores),
        bool(returns and generation_config.output_logits),
    )
    capacity = most - ids.shape[1] + max(lengths)
    structure = proved(model, structure, kernels, capacity)
    slots = len(ids) if batch_size is None else min(batch_size, len(ids))
    decoder = Decoder(structure, kernels, slots, capacity)
    if slots < len(ids):
        if call.keeps_scores or call.keeps_logits:
            raise Unsupported("scores of sequences that are replaced")
        _require_alone(call)
        outcome = decode_continuously(decoder, call, slots)
    else:
        outcome = decode_batch(decoder, call)
    return _returned(call, outcome) if returns else outcome.tokens


def _require_alone(call: Request) -> None:
    """Raise Unsupported if a processor or a criterion may depend on the whole batch."""
    for one in (*call.processors, *call.stopping):
        name, is_theirs = type(one).__name__, type(one).__module__.startswith("transformers.")
        is_criterion = any(one is criterion for criterion in call.stopping)
        if not is_theirs or name in _OF_A_BATCH or (is_criterion and name not in _CRITERIA):
            raise Unsupported(f"{name} of sequences that are replaced")


def _returned(call: Request, outcome: Outcome) -> Any:
    kind: Any = import_module("transformers.generation").GenerateDecoderOnlyOutput
    return kind(
        sequences=outcome.tokens,
        scores=outcome.scores if call.keeps_scores else None,
        logits=outcome.logits if call.keeps_logits else None,
    )


def _lengths(ids: Tensor, mask: Tensor | None) -> list[int]:
    """The tokens of each prompt that count, which are the last ones. Raises Unsupported for other masks."""
    if mask is None:
        return [ids.shape[1]] * len(ids)
    if mask.shape != ids.shape:
        raise Unsupported(f"an attention mask of shape {tuple(mask.shape)}")
    counts = mask.long().sum(dim=1)
    places = torch.arange(ids.shape[1], device=ids.device)
    expected = places[None] >= ids.shape[1] - counts[:, None]
    if not torch.equal(expected, mask.bool()) or bool((counts == 0).any()):
        raise Unsupported("prompts that are not padded on the left")
    return [int(count) for count in counts]
