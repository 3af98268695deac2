"""Outputs with a number for each token, of which scripts compute their loss: whole on every rank of a sequence."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from types import MethodType

import pytest
import torch
import transformers
from hf_models import VOCABULARY, tiny
from torch import Tensor
from transformers.utils import ModelOutput

from polyaccel.comm.init.threads import run_threads
from polyaccel.errors import PolyaccelError
from polyaccel.torch.context_parallel import SequenceSettings, TokenShares, apply_context_parallel, models
from polyaccel.torch.context_parallel.token_numbers import whole_token_numbers

LENGTH, ROWS = 13, 2


@dataclass
class Scored(ModelOutput):
    """What a trainer's own forward gives in place of logits."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    is_counted: Tensor | None = None


def with_scores(model):
    """`model` with a forward that gives the log-probability of each label, as TRL's fused head does."""
    of_model = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, labels=None, shift_labels=None, **named):
        outputs = of_model(*args, labels=labels, shift_labels=shift_labels, **named)
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
        is_counted = targets != -100
        chosen = outputs.logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return Scored(outputs.loss, chosen.masked_fill(~is_counted, 0), is_counted)

    model.forward = MethodType(forward, model)
    return model


def batch_of():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, : LENGTH // 2 + 1] = -100
    labels[1, -3:] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def own_loss(model):
    """A loss that is not the model's: of each row by itself, so that it needs all tokens of a row."""
    outputs = model(**batch_of())
    of_rows = -outputs.log_probs.sum(1) / outputs.is_counted.sum(1)
    loss = of_rows.square().mean()
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize(("method", "world"), [("ulysses", 2), ("ring", 2), ("ring", 3)])
def test_a_loss_of_token_numbers_is_that_of_one_rank(method, world):
    start = tiny("llama").train()
    expected, gradients = own_loss(with_scores(copy.deepcopy(start)))
    copies = [with_scores(copy.deepcopy(start)) for _ in range(world)]

    def run(communicator):
        own = copies[communicator.rank]
        apply_context_parallel(own, communicator, SequenceSettings(method))
        return own_loss(own)

    found = run_threads(world, run)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected)
    for name, gradient in gradients.items():
        mean = sum(of[name] for _, of in found) / world
        torch.testing.assert_close(mean, gradient, rtol=1e-6, atol=1e-6, msg=name)  # norms are in float32


def test_what_is_as_wide_as_the_part_of_one_rank_alone_stays():
    shares = TokenShares.contiguous(5, 2)  # three tokens and two

    def run(communicator):
        own = shares.lengths[communicator.rank]
        outputs = {"classes": torch.zeros(ROWS, 3), "ids": torch.full((ROWS, own), communicator.rank)}
        found = whole_token_numbers(outputs, shares, ROWS, communicator)
        return tuple(found["classes"].shape), found["ids"].tolist()

    assert run_threads(2, run) == [((ROWS, 3), [[0, 0, 0, 1, 1]] * ROWS)] * 2


def head_of(kind, over="llama"):
    """A model with a head of another kind over the same sizes."""
    return getattr(transformers, kind)(copy.deepcopy(tiny(over).config)).train()


@pytest.mark.parametrize(
    "model", [lambda: head_of("LlamaForSequenceClassification"), lambda: head_of("BertModel", "bert")]
)
def test_outputs_of_whole_sequences_are_refused(model):
    """A rank would give a class to its own tokens, silently where the script computes the loss, as TRL's rewards."""
    with pytest.raises(PolyaccelError):
        run_threads(1, lambda communicator: apply_context_parallel(model(), communicator, SequenceSettings("ring")))


def test_outputs_of_whole_sequences_are_refused_where_no_copy_could_show_them(monkeypatch):
    monkeypatch.setattr(models, "find_mixer", lambda model: None)
    copies = [head_of("LlamaForSequenceClassification") for _ in range(2)]

    def run(communicator):
        own = copies[communicator.rank]
        apply_context_parallel(own, communicator, SequenceSettings("ring"))
        with pytest.raises(PolyaccelError) as caught:
            own(input_ids=batch_of()["input_ids"])
        with pytest.raises(PolyaccelError) as choices:
            own(input_ids=batch_of()["input_ids"].expand(3, -1, -1))
        return caught.value.value, choices.value.value

    assert run_threads(2, run) == [("LlamaForSequenceClassification",) * 2] * 2


def test_outputs_of_tokens_are_not_refused():
    model = head_of("LlamaForTokenClassification")
    run_threads(1, lambda communicator: apply_context_parallel(model, communicator, SequenceSettings("ring")))


def test_ranks_with_other_batches_are_told_so():
    """As by completions that each rank samples for itself; later batches come from the same loader."""
    copies = [tiny("llama").train() for _ in range(2)]

    def run(communicator):
        own = copies[communicator.rank]
        apply_context_parallel(own, communicator, SequenceSettings("ring"))
        own(input_ids=batch_of()["input_ids"])
        with pytest.raises(PolyaccelError) as caught:
            own(input_ids=batch_of()["input_ids"].roll(communicator.rank, 1))
        return len(set(caught.value.value))

    assert run_threads(2, run) == [2, 2]
