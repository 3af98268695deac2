"""`deepspeed.runtime.rollout.opsd`: targets of generated sequences, and a student's distance from its teacher on them.

The distance is the generalised Jensen-Shannon divergence (Agarwal et al. 2024, "On-Policy Distillation of Language
Models").
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from polyaccel_deepspeed.rollouts import RolloutBatch, RolloutError


@dataclass(frozen=True)
class ResponseTokenBatch:
    """Sequences, and for each position but the last the next token and whether it is one of the response."""

    input_ids: Tensor
    attention_mask: Tensor
    target_ids: Tensor
    response_mask: Tensor

    @classmethod
    def from_rollout(cls, rollout: RolloutBatch) -> ResponseTokenBatch:
        """Return the targets of what was generated.

        Raises RolloutError where tensors are on several devices, and for beginnings that are no positions after the
        first token.
        """
        tokens, starts = rollout.input_ids, rollout.response_start_idx
        devices = {one.device for one in (tokens, rollout.attention_mask, starts)}
        if len(devices) > 1:
            raise RolloutError(f"the rollout's tensors are on several devices: {sorted(map(str, devices))}")
        if starts.dtype not in (torch.int32, torch.int64):
            raise RolloutError(f"response_start_idx must be of integers: {starts.dtype}", value=starts.dtype)
        length = tokens.shape[1]
        if bool(((starts < 1) | (starts > length)).any()):
            raise RolloutError(f"response_start_idx must be 1 to {length}: {starts.tolist()}", value=starts.tolist())
        is_response = torch.arange(1, length, device=tokens.device) >= starts[:, None]
        mask = rollout.attention_mask[:, 1:].bool() & is_response
        return cls(tokens, rollout.attention_mask, tokens[:, 1:], mask)

    def select_causal_logits(self, logits: Tensor) -> Tensor:
        """Return the logits that predict the targets. Raises RolloutError for other shapes."""
        if logits.dim() != 3 or logits.shape[:2] != self.input_ids.shape:
            shape, wanted = tuple(logits.shape), tuple(self.input_ids.shape)
            raise RolloutError(f"logits of shape {shape} do not match {wanted} input_ids", value=shape)
        return logits[:, :-1]


@dataclass(frozen=True)
class JSDLossOutput:
    """The mean over the tokens that count, with the sum and the number of tokens that it is made of."""

    loss: Tensor
    loss_sum: Tensor
    valid_token_count: Tensor


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    response_mask: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_top_k: int | None = None,
    pointwise_clip: float | None = None,
) -> JSDLossOutput:
    """Return the divergence of logits (sequences, length, words) at the tokens of a mask.

    At `beta` 0 it is the KL divergence from teacher to student, at 1 that from student to teacher. With `teacher_top_k`
    the teacher's most likely words alone count; `pointwise_clip` is the most that one word adds. Raises RolloutError
    for shapes that differ and for values out of range.
    """
    _check(student_logits, teacher_logits, response_mask, beta, temperature, teacher_top_k, pointwise_clip)
    student, teacher = student_logits / temperature, teacher_logits / temperature
    if teacher_top_k is not None:
        words = teacher.topk(teacher_top_k, -1).indices
        student, teacher = student.gather(-1, words), teacher.gather(-1, words)
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta in (0.0, 1.0):
        first, second = (teacher, student) if beta == 0.0 else (student, teacher)
        added = first.exp() * (first - second)
    else:
        mixture = torch.logaddexp(student + log(1 - beta), teacher + log(beta))
        added = beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture)
    if pointwise_clip is not None:
        added = added.clamp(max=pointwise_clip)
    counts = response_mask.to(added.dtype)
    total, count = (added.sum(-1) * counts).sum(), counts.sum().long()
    return JSDLossOutput(total / count.clamp_min(1), total, count)


def _check(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    beta: float,
    temperature: float,
    words: int | None,
    clip: float | None,
) -> None:
    if student.dim() != 3 or student.shape != teacher.shape or mask.shape != student.shape[:2]:
        shapes = [tuple(one.shape) for one in (student, teacher, mask)]
        hint = "pass logits (sequences, length, words) twice, and a mask (sequences, length)"
        raise RolloutError(f"logits and mask do not match: {shapes}", hint=hint, value=shapes)
    for name, value, is_right, range_ in (
        ("beta", beta, 0.0 <= beta <= 1.0, "0 to 1"),
        ("temperature", temperature, temperature > 0.0, "above 0"),
        ("teacher_top_k", words, words is None or 1 <= words <= student.shape[-1], f"1 to {student.shape[-1]}"),
        ("pointwise_clip", clip, clip is None or clip >= 0.0, "0 or more"),
    ):
        if not is_right:
            raise RolloutError(f"{name} = {value}", hint=f"use {range_}", value=value)
