"""A comparison of what a rollout computed for its tokens with what training computes for the same sequences.

[Note: Compared rollouts]
The first rollout of an engine is compared. A later one is where it may compute otherwise: where its arguments are of
another kind, or its sequences are longer than all before. Kinds are the names and plain values of arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import PolyaccelError

_OF_A_BATCH = {"dynamic", "longrope"}
"""Kinds of rotary positions that depend on the longest sequence of a batch."""
_RETURNED = ("return_dict_in_generate", "output_logits")
_COUNTS = {"input_ids", "inputs", "max_new_tokens", "max_length"}
_NEW_TOKENS = 20
"""What transformers generates where nothing is stated."""


def require_fixed_positions(module: nn.Module) -> None:
    """Raise PolyaccelError if a part has rotary positions that depend on the longest sequence of a batch."""
    for name, part in module.named_modules():
        given = getattr(part, "rope_type", None)
        kinds = set(given.values()) if isinstance(given, dict) else {given}
        if found := sorted(_OF_A_BATCH.intersection(kinds)):
            kind = found[0]
            raise PolyaccelError(
                f"rotary positions of the kind {kind!r} in {name} depend on the longest sequence of a batch",
                hint='leave "generation": {"exact": true} out, or use another kind of positions',
                value=kind,
            )


class ComparedRollouts:
    """The rollouts that were compared. See [Note: Compared rollouts]."""

    def __init__(self) -> None:
        self._longest: dict[str, int] = {}

    def includes(self, rollout: ComparedRollout) -> bool:
        """Whether one of this kind and length was compared."""
        return rollout.most <= self._longest.get(rollout.kind, -1)

    def add(self, rollout: ComparedRollout) -> None:
        """Keep one that was equal."""
        self._longest[rollout.kind] = rollout.most


class ComparedRollout:
    """A call of transformers' `generate` whose logits can be compared with a forward pass of the whole sequences."""

    def __init__(self, module: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        self._module = module
        self._named = dict(named)
        self._given = {name: named.get(name) for name in _RETURNED}
        ids = named.get("input_ids", named.get("inputs", inputs[0] if inputs else None))
        self._ids: Tensor | None = ids if isinstance(ids, Tensor) and ids.dim() == 2 else None

    @property
    def is_possible(self) -> bool:
        """Whether sequences are continued one token at a time, by a decoder alone."""
        config = getattr(self._module, "generation_config", None)
        own = self._named.get("generation_config") or config
        beams = self._named.get("num_beams") or getattr(own, "num_beams", None) or 1
        is_decoder = not getattr(getattr(self._module, "config", None), "is_encoder_decoder", False)
        return config is not None and self._ids is not None and beams == 1 and is_decoder

    @property
    def arguments(self) -> dict[str, Any]:
        """Named arguments of the call, which also asks for logits."""
        return {**self._named, **dict.fromkeys(_RETURNED, True)}

    def as_asked(self, output: Any) -> Any:
        """Return of `output` what the caller asked for."""
        if not self._given["return_dict_in_generate"]:
            return output.sequences
        if not self._given["output_logits"]:
            output.logits = None
        return output

    @property
    def kind(self) -> str:
        """What the call asks for, except its prompts and its number of tokens."""
        plain = {
            name: value if isinstance(value, (bool, int, float, str, tuple, list, type(None))) else type(value).__name__
            for name, value in self._named.items()
            if name not in _COUNTS
        }
        stated: Any = self._named.get("generation_config") or self._module.generation_config
        return repr((sorted(plain.items()), sorted((key, repr(value)) for key, value in stated.to_dict().items())))

    @property
    def most(self) -> int:
        """The length that sequences may have."""
        assert self._ids is not None
        config = self._named.get("generation_config") or self._module.generation_config
        new, whole = (self._named.get(name) or getattr(config, name, None) for name in ("max_new_tokens", "max_length"))
        start = self._ids.shape[1]
        return int(start + new if new else max(whole or 0, start + _NEW_TOKENS))

    def require_equal(self, output: Any) -> None:
        """Raise PolyaccelError unless a forward pass of the sequences has the logits of the rollout, bit by bit."""
        assert self._ids is not None
        sequences: Tensor = output.sequences
        start, new = self._ids.shape[1], len(output.logits)
        mask = self._mask(sequences, start)
        inputs: dict[str, Any] = {"input_ids": sequences[:, : start + new - 1]}
        inputs["attention_mask"] = mask[:, : start + new - 1]
        if "position_ids" in inspect.signature(self._forward).parameters:
            positions = inputs["attention_mask"].cumsum(-1) - 1
            inputs["position_ids"] = positions.masked_fill(inputs["attention_mask"] == 0, 1)
        trained: Tensor = self._module(**inputs).logits[:, start - 1 :]
        sampled = torch.stack(output.logits, 1)
        differs = (trained.to(sampled.dtype) != sampled) & ~(trained.isnan() & sampled.isnan())
        if not bool(differs.any()):
            return
        row, token, entry = (int(index) for index in differs.nonzero()[0])
        pair = float(sampled[row, token, entry]), float(trained[row, token, entry])
        raise PolyaccelError(
            f"sampled token {token} of sequence {row} has another logit in training: {pair[0]!r} and {pair[1]!r}",
            hint='report the model, and leave "generation": {"exact": true} out',
            value=pair,
        )

    @property
    def _forward(self) -> Any:
        base = getattr(self._module, "get_base_model", lambda: self._module)()
        return base.forward

    def _mask(self, sequences: Tensor, start: int) -> Tensor:
        """Return which tokens count: those of the prompt that the caller or its padding says, and all new ones."""
        assert self._ids is not None
        given = self._named.get("attention_mask")
        if given is None:
            config = self._named.get("generation_config") or self._module.generation_config
            pad, ends = (
                self._named.get(f"{name}_token_id", getattr(config, f"{name}_token_id", None))
                for name in ("pad", "eos")
            )
            ends = ends if isinstance(ends, (list, tuple)) else [ends]
            is_padded = pad is not None and pad not in ends and bool((self._ids == pad).any())
            given = (self._ids != pad) if is_padded else torch.ones_like(self._ids)
        mask: Tensor = torch.as_tensor(given).long()
        mask = mask.repeat_interleave(len(sequences) // len(mask), 0)
        return torch.cat([mask, mask.new_ones(len(sequences), sequences.shape[1] - start)], 1)
