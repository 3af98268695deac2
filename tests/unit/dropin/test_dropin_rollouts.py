"""`deepspeed.runtime.rollout`: what comes of generated sequences, and losses next to torch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.rollout import (
    HybridEngineRollout,
    ResponseTokenBatch,
    RolloutBatch,
    RolloutConfig,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
    generalized_jsd_loss,
)
from polyaccel_deepspeed.rollouts import RolloutError
from torch import Tensor
from torch.nn.functional import kl_div

END, PADDING = 9, 0


class Says:
    """An engine that gives every prompt the same response, and keeps what it was asked."""

    def __init__(self, *response: int) -> None:
        self.response = torch.tensor(response)
        self.asked: dict[str, Any] = {}

    def generate(self, prompts: Tensor, **named: Any) -> Tensor:
        self.asked = named
        return torch.cat((prompts, self.response.expand(len(prompts), -1)), 1)


def requested() -> RolloutRequest:
    return RolloutRequest(torch.tensor([[1, 2, 3], [0, 4, 5]]), torch.tensor([[1, 1, 1], [0, 1, 1]]))


@pytest.mark.parametrize(("padding", "kept"), [(PADDING, [7, 9, 0, 0]), (END, [7, 9, 9, 9]), (None, [7, 9, 9, 9])])
def test_a_response_counts_up_to_its_end(padding: int | None, kept: list[int]) -> None:
    engine = Says(7, END, 6, END)
    tokenizer = SimpleNamespace(pad_token_id=padding, eos_token_id=END)
    rollout = build_rollout(RolloutConfig(), engine, tokenizer)
    found = rollout.generate(requested(), SamplingConfig(max_new_tokens=4, n_samples_per_prompt=2))
    prompts = [[1, 2, 3], [1, 2, 3], [0, 4, 5], [0, 4, 5]]
    assert found.input_ids.tolist() == [prompt + kept for prompt in prompts]
    assert found.attention_mask.tolist() == [[int(token > 0) for token in prompt] + [1, 1, 0, 0] for prompt in prompts]
    assert (found.response_start_idx.tolist(), found.batch_size, found.seq_len) == ([3] * 4, 4, 7)
    assert engine.asked["do_sample"]
    assert engine.asked["top_k"] == 0
    rollout.generate(requested(), SamplingConfig(max_new_tokens=4, temperature=0.0))
    assert not engine.asked["do_sample"]
    assert "temperature" not in engine.asked


def test_a_tokenizer_without_any_end_is_refused() -> None:
    rollout = HybridEngineRollout(Says(1), SimpleNamespace(pad_token_id=None, eos_token_id=None))
    with pytest.raises(RolloutError):
        rollout.generate(requested(), SamplingConfig(1))


def test_targets_are_the_next_tokens_of_the_responses() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 0], [0, 5, 6, 7, 8]])
    rollout = RolloutBatch(tokens, (tokens > 0).long(), torch.tensor([2, 3]))
    batch = ResponseTokenBatch.from_rollout(rollout)
    assert torch.equal(batch.target_ids, tokens[:, 1:])
    assert batch.response_mask.tolist() == [[False, True, True, False], [False, False, True, True]]
    logits = torch.randn(2, 5, 3)
    assert torch.equal(batch.select_causal_logits(logits), logits[:, :4])
    with pytest.raises(RolloutError):
        batch.select_causal_logits(logits[:, 1:])
    for starts in (torch.tensor([0, 3]), torch.tensor([2, 6]), torch.tensor([2.0, 3.0])):
        with pytest.raises(RolloutError):
            ResponseTokenBatch.from_rollout(RolloutBatch(tokens, (tokens > 0).long(), starts))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_is_made_of_torchs(beta: float) -> None:
    drawn = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn(2, 3, 5, generator=drawn, dtype=torch.float64) for _ in range(2))
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]])
    ours, theirs = (logits.div(2.0).log_softmax(-1) for logits in (student, teacher))
    mixture = (beta * theirs.exp() + (1 - beta) * ours.exp()).log()
    if beta == 0.0:
        rows = kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)
    elif beta == 1.0:
        rows = kl_div(theirs, ours, log_target=True, reduction="none").sum(-1)
    else:
        both = [kl_div(mixture, one, log_target=True, reduction="none").sum(-1) for one in (theirs, ours)]
        rows = beta * both[0] + (1 - beta) * both[1]
    found = generalized_jsd_loss(student, teacher, mask, beta=beta, temperature=2.0)
    assert found.valid_token_count.item() == 3
    assert torch.allclose(found.loss_sum, (rows * mask).sum(), rtol=1e-12)
    assert torch.equal(found.loss, found.loss_sum / 3)


def test_words_beyond_the_teachers_first_do_not_count() -> None:
    student, teacher = torch.randn(1, 2, 6), torch.randn(1, 2, 6)
    words = teacher.topk(2, -1).indices
    mask = torch.ones(1, 2)
    found = generalized_jsd_loss(student, teacher, mask, teacher_top_k=2)
    assert torch.equal(
        found.loss, generalized_jsd_loss(student.gather(-1, words), teacher.gather(-1, words), mask).loss
    )
    assert generalized_jsd_loss(student, teacher, mask, pointwise_clip=0.0).loss <= 0
    for refused in ({"beta": 1.5}, {"temperature": 0.0}, {"teacher_top_k": 7}, {"pointwise_clip": -1.0}):
        with pytest.raises(RolloutError):
            generalized_jsd_loss(student, teacher, mask, **refused)  # type: ignore[arg-type]
