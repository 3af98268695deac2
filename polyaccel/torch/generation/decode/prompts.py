"""Lists of prompts as a batch that is padded on the left, and what a batch becomes for its caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import PolyaccelError


def is_list(prompts: Any) -> bool:
    """Whether prompts are a list of sequences of tokens, not one tensor."""
    return isinstance(prompts, (list, tuple))


def padded(prompts: Sequence[Any], module: nn.Module, named: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return tokens (prompts, length) and their attention mask. Raises PolyaccelError for an empty list or prompt."""
    device = next(module.parameters()).device
    rows = [torch.as_tensor(one, dtype=torch.long, device=device).flatten() for one in prompts]
    if not rows or not all(len(row) for row in rows):
        raise PolyaccelError("no tokens in a prompt", hint="give each prompt at least one token", value=len(rows))
    longest = max(len(row) for row in rows)
    ids = rows[0].new_full((len(rows), longest), _stated("pad_token_id", module, named) or 0)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = row
        mask[index, longest - len(row) :] = 1
    return ids, mask


def separated(output: Any, mask: Tensor, module: nn.Module, named: Mapping[str, Any]) -> Any:
    """Return the sequences of `output` without padding, each up to its end token or stop string. Other outputs are as
    they are."""
    if not isinstance(output, Tensor) or len(output) % len(mask):
        return output
    mask = mask.repeat_interleave(len(output) // len(mask), dim=0)  # several sequences of each prompt
    stated = None if named.get("eos_token_id", ()) is None else _stated("eos_token_id", module, named)
    ends = torch.as_tensor([] if stated is None else stated, dtype=torch.long, device=output.device).flatten()
    stops, pad = _stop_strings(module, named), _stated("pad_token_id", module, named)
    sequences = []
    for row, present in zip(output, mask, strict=True):
        new = row[len(present) :]
        if stops is not None:
            new = _stopped(row, len(present), pad if len(ends) else None, stops)
        found = torch.isin(new, ends).nonzero()
        last = int(found[0]) + 1 if len(found) else len(new)
        sequences.append(torch.cat((row[: len(present)][present.bool()], new[:last])))
    return sequences


def _stop_strings(module: nn.Module, named: Mapping[str, Any]) -> Any:
    """transformers' criterion of the call's stop strings; None without."""
    strings, tokenizer = _stated("stop_strings", module, named), named.get("tokenizer")
    if strings is None or tokenizer is None:
        return None
    kind: Any = import_module("transformers.generation").StopStringCriteria
    return kind(tokenizer, strings)


def _stopped(row: Tensor, length: int, pad: int | None, stops: Any) -> Tensor:
    """The new tokens of a row up to its stop string. Padding follows that, which may be the end token too; without end
    tokens (`pad` is None) transformers continues the row instead."""
    others = row.new_empty(0) if pad is None else (row[length:] != pad).nonzero()
    first = length + (int(others[-1]) + 1 if len(others) else 0)
    for end in range(max(first, length + 1), len(row)):
        if bool(stops(row[None, :end], None)):
            return row[length:end]
    return row[length:]


def _stated(name: str, module: nn.Module, named: Mapping[str, Any]) -> Any:
    config = named.get("generation_config") or getattr(module, "generation_config", None)
    return named[name] if named.get(name) is not None else getattr(config, name, None)
