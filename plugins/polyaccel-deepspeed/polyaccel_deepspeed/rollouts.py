"""`deepspeed.runtime.rollout`: what a trainer of generated sequences asks of its engine, and gets from it.

Sequences come from `engine.generate`, so that the weights are those of this step at every stage. Ranks may end at other
tokens, and need no equal numbers of passes, as DeepSpeed's do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyaccel.errors import PolyaccelError


class RolloutError(PolyaccelError, ValueError):
    """A rollout cannot be as it is described. DeepSpeed raises a ValueError."""


@dataclass
class RolloutConfig:
    """Which engine generates. `use_graph_capture` has no effect."""

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False


@dataclass
class HybridEngineRolloutConfig:
    """Settings of `HybridEngineRollout`, which have no effect: they are about DeepSpeed's caches and graphs."""

    use_graph_capture: bool = False
    enable_profiling: bool = False
    use_shared_prefill: bool = False
    align_decode_fronts: bool = False
    enable_cache_trimming: bool = False
    continuous_cache_capacity: int | None = None


@dataclass
class SamplingConfig:
    """How tokens are drawn: greedily at temperature 0, from all where `top_k` is not above 0. Of the sequences
    `continuous_batch_size` are decoded at a time, None all."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None


@dataclass
class RolloutRequest:
    """Prompts (prompts, length), padded on the left, and a mask of the same shape that is 1 at their tokens."""

    prompt_ids: Tensor
    prompt_attention_mask: Tensor

    def __post_init__(self) -> None:
        """Raises RolloutError for other shapes."""
        _require_matrix("prompt_ids", self.prompt_ids)
        _require_shape("prompt_attention_mask", self.prompt_attention_mask, "prompt_ids", self.prompt_ids)


@dataclass
class RolloutBatch:
    """Prompts with what was generated (sequences, length), padded on both sides, the mask of their tokens, and where
    each response begins."""

    input_ids: Tensor
    attention_mask: Tensor
    response_start_idx: Tensor

    def __post_init__(self) -> None:
        """Raises RolloutError for other shapes."""
        _require_matrix("input_ids", self.input_ids)
        _require_shape("attention_mask", self.attention_mask, "input_ids", self.input_ids)
        if self.response_start_idx.shape != self.input_ids.shape[:1]:
            shape, length = tuple(self.response_start_idx.shape), len(self.input_ids)
            raise RolloutError(f"response_start_idx must be 1-D of length {length}: {shape}", value=shape)

    @property
    def batch_size(self) -> int:
        """How many sequences there are."""
        return len(self.input_ids)

    @property
    def seq_len(self) -> int:
        """How long they are, padding counted."""
        return self.input_ids.shape[1]


class RolloutEngine(ABC):
    """What a trainer asks for sequences."""

    name: str = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Return the prompts with their responses."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Take over the weights after an update; nothing where they are the trained ones."""

    def shutdown(self) -> None:  # noqa: B027 - most engines hold nothing
        """Free what the engine holds."""


class HybridEngineRollout(RolloutEngine):
    """Sequences of the engine that trains, with the weights that it has."""

    name = "hybrid_engine"

    def __init__(self, engine: Any, tokenizer: Any, cfg: Any = None) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        for name, usual in vars(HybridEngineRolloutConfig()).items():
            setattr(self, name, getattr(cfg, name, usual))

    @torch.no_grad()
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Return each prompt with `n_samples_per_prompt` responses. Collective where parameters are sharded.

        Raises RolloutError for a tokenizer without a token for padding and for an end.
        """
        end = self.tokenizer.eos_token_id
        padding = end if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        if padding is None:
            raise RolloutError("the tokenizer has neither pad_token_id nor eos_token_id", hint="set one of them")
        samples, width = sampling.n_samples_per_prompt, request.prompt_ids.shape[1]
        prompts = request.prompt_ids.repeat_interleave(samples, 0)
        mask = request.prompt_attention_mask.repeat_interleave(samples, 0)
        named: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "pad_token_id": padding}
        named |= {"attention_mask": mask, "eos_token_id": end, "do_sample": sampling.temperature > 0}
        if named["do_sample"]:
            named |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(sampling.top_k, 0)}
        tokens: Tensor = self.engine.generate(prompts, batch_size=sampling.continuous_batch_size, **named)
        tokens, of_response = _until_end(tokens, width, end, padding)
        attention = torch.cat((mask.to(of_response), of_response), 1)
        return RolloutBatch(tokens, attention, torch.full((len(tokens),), width, device=tokens.device))

    def sync_weights(self, step: int) -> None:
        """Nothing: the weights are the trained ones."""


def _until_end(tokens: Tensor, width: int, end: Any, padding: int) -> tuple[Tensor, Tensor]:
    """Return tokens with padding after each response's first end, and the mask of the responses, ends included."""
    response = tokens[:, width:]
    ends = torch.as_tensor([] if end is None else end, device=tokens.device, dtype=tokens.dtype).reshape(-1)
    is_end = torch.isin(response, ends)
    is_past = is_end.long().cumsum(1) - is_end.long() > 0
    kept = torch.where(is_past, padding, response)
    counts = ~is_past & ((response != padding) | is_end)
    return torch.cat((tokens[:, :width], kept), 1), counts.long()


def build_rollout(
    rollout_cfg: Any, student_engine: Any = None, tokenizer: Any = None, **kwargs: Any
) -> HybridEngineRollout:
    """Return what generates by `rollout_cfg.engine`.

    Raises RolloutError for another engine than "hybrid_engine", and where it has not both an engine and a tokenizer.
    """
    if rollout_cfg.engine != HybridEngineRollout.name:
        hint = f'use "{HybridEngineRollout.name}"'
        raise RolloutError(f"Unknown rollout engine: {rollout_cfg.engine!r}", hint=hint, value=rollout_cfg.engine)
    if student_engine is None or tokenizer is None:
        raise RolloutError("hybrid_engine rollout needs both student_engine and tokenizer", hint="pass both")
    return HybridEngineRollout(student_engine, tokenizer, rollout_cfg)


def _require_matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2:
        shape = tuple(tensor.shape)
        raise RolloutError(f"{name} must be 2-D: {shape}", hint="pass (sequences, length)", value=shape)


def _require_shape(name: str, tensor: Tensor, other: str, wanted: Tensor) -> None:
    if tensor.shape != wanted.shape:
        shape = tuple(tensor.shape)
        raise RolloutError(f"{name} of shape {shape} does not match {other} of {tuple(wanted.shape)}", value=shape)
