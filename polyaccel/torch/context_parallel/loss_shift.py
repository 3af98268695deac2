"""Whether a model's own loss shifts its labels, found by comparison: `loss_form`.

[Note: Shift of labels]
Ranks of a sequence get labels that are shifted before they are cut, where the model predicts the next token. The name
of a class does not decide that: transformers' default loss shifts for a class of any name. So a copy of the model
computes its loss of a few tokens for two sets of labels. The difference of the two is that of the cross entropies of
its logits with shifted labels, or with the labels as they are; what a loss adds for other reasons cancels. A model that
is too large for that, or a stage of a pipeline, has the loss function that it names called with random logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from polyaccel.errors import PolyaccelError
from polyaccel.torch.context_parallel.losses import IGNORED, CausalLoss, targets_of_next_tokens
from polyaccel.torch.random_copy import random_copy, unchanged_generators

_ROWS, _TOKENS, _CLASSES = 2, 6, 11
_LARGEST = 1 << 27
"""Elements of a model that a copy of it computes within a second."""
_CLOSE = 1e-3
"""Cross entropies of random logits differ by about 1; rounding by 1e-6."""
_log = getLogger(__name__)


@dataclass(frozen=True)
class LossForm:
    """How a model computes its loss."""

    is_shifted: bool
    """The model predicts the next token."""
    takes_targets: bool
    """Its loss function takes targets that are shifted already, and the number by which a sum is divided."""


def loss_form(model: PreTrainedModel) -> LossForm:
    """Return the form of the loss of `model`. Raises PolyaccelError for a loss that is neither of the two."""
    if isinstance(model.loss_function, CausalLoss):  # of cut logits, which no other loss function takes
        return LossForm(is_shifted=True, takes_targets=True)
    with unchanged_generators():
        by_function = _shift_of_function(model)
        found = _shift_of_model(model)
        if found is None:
            found = by_function
        if found is None:
            _log.info("not proven: whether the loss of %s shifts its labels; by its name", type(model).__name__)
            found = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        return LossForm(found, by_function == found and _takes_targets(model, shifted=found))


def _shift_of_model(model: PreTrainedModel) -> bool | None:
    """Compare the losses of a copy of `model`; None where it cannot be called with ids and labels."""
    is_cut = any(getattr(one, "parallel_cuts", None) for one in model.modules())
    if is_cut or sum(one.numel() for one in model.parameters()) > _LARGEST:
        return None
    theirs = model.config
    vocabulary = getattr(theirs.get_text_config(), "vocab_size", None)
    if not isinstance(vocabulary, int):
        return None
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary // 2, vocabulary, (_ROWS, _TOKENS), generator=generator)
    try:
        own = random_copy(model)
        outputs = []
        for _ in range(2):
            labels = torch.randint(0, _labels_of(model, vocabulary), (_ROWS, _TOKENS), generator=generator)
            with torch.no_grad():
                outputs.append((labels, own(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)))
        logits = [_logits(one) for _, one in outputs]
        if any(one.shape[:-1] != ids.shape for one in logits):
            return None
        losses = [float(_loss(one)) for _, one in outputs]
    except Exception as error:
        _log.debug("%s: no loss of a copy: %s: %s", type(model).__name__, type(error).__name__, error)
        return None
    return _decided(model, losses, [(own, labels) for own, (labels, _) in zip(logits, outputs, strict=True)])


def _shift_of_function(model: PreTrainedModel) -> bool | None:
    """Compare what the model's loss function gives for random logits; None where its forward does not call it."""
    if "loss_function" not in inspect.unwrap(type(model).forward).__code__.co_names:
        return None
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(_ROWS, _TOKENS, _CLASSES, generator=generator)
    both = [torch.randint(0, _CLASSES, (_ROWS, _TOKENS), generator=generator) for _ in range(2)]
    try:
        losses = [float(model.loss_function(logits=logits, labels=one, vocab_size=_CLASSES)) for one in both]
    except Exception as error:
        _log.debug("%s: no loss of logits: %s: %s", type(model).__name__, type(error).__name__, error)
        return None
    return _decided(model, losses, [(logits, one) for one in both])


def _takes_targets(model: PreTrainedModel, *, shifted: bool) -> bool:
    """Whether the model passes on, and its loss function uses, targets and their number."""
    forward: Callable[..., Any] = inspect.unwrap(type(model).forward)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(forward).parameters.values()):
        return False
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(_ROWS, _TOKENS, _CLASSES, generator=generator)
    targets = torch.randint(0, _CLASSES, (_ROWS, _TOKENS), generator=generator)
    count, wanted = torch.tensor(5.0), _cross_entropy(logits, targets) * targets.numel() / 5
    named = {"shift_labels": targets} if shifted else {}
    try:
        found = model.loss_function(
            logits=logits, labels=targets, vocab_size=_CLASSES, num_items_in_batch=count, **named
        )
    except Exception:
        return False
    return abs(float(found) - wanted) < _CLOSE


def _decided(model: PreTrainedModel, losses: list[float], of: list[tuple[Tensor, Tensor]]) -> bool | None:
    """Return which of the two the losses are. Raises PolyaccelError where they are neither."""
    found = losses[0] - losses[1]
    plain = [_cross_entropy(logits, labels) for logits, labels in of]
    shifted = [_cross_entropy(logits, targets_of_next_tokens(labels)) for logits, labels in of]
    apart = {True: abs(found - (shifted[0] - shifted[1])), False: abs(found - (plain[0] - plain[1]))}
    matches = [each for each, difference in apart.items() if difference < _CLOSE]
    if len(matches) == len(apart):
        return None  # logits that hardly differ
    if not matches:
        kind = type(model).__name__
        raise PolyaccelError(
            f"the sequences of a {kind} cannot be cut over ranks: its loss is neither the cross entropy of its labels "
            "nor of the next ones",
            hint="leave labels out and compute the loss by polyaccel.torch.context_parallel.cross_entropy_over_ranks, "
            "or set sequence_parallel_size to 1",
            value=kind,
        )
    return matches[0]


def _labels_of(model: PreTrainedModel, vocabulary: int) -> int:
    """How many classes labels may have."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return vocabulary if head is not None else int(getattr(model.config, "num_labels", vocabulary))


def _cross_entropy(logits: Tensor, labels: Tensor) -> float:
    return float(functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED))


def _logits(outputs: Any) -> Tensor:
    found = outputs["logits"] if isinstance(outputs, Mapping) else outputs[1]
    if not isinstance(found, Tensor):
        raise TypeError("no logits")
    return found


def _loss(outputs: Any) -> Tensor:
    found = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    assert isinstance(found, Tensor)
    return found
