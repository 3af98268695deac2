"""The loss of a student that follows its teacher (Hinton et al. 2015, arXiv 1503.02531, section 2).

Hidden states of the layers that `layer_reduction` copied are compared too, as XTC's skip-layer distillation does (Wu et
al. 2022, arXiv 2206.01859, section 4).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from polyaccel.config import load_config
from polyaccel.engine.policies.compression import LayerReduction, compression_policy_of
from polyaccel.errors import PolyaccelError
from polyaccel.torch.compression.models import GivenConfig


def distillation_loss(
    student: Any, teacher: Any, config: GivenConfig, *, loss: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Mix a student's loss with its distance from the teacher, by `layer_reduction.distillation`.

    With weight a, temperature T and hidden weight b it is (1 - a) loss + a T² KL(teacher || student) + b MSE. KL is the
    mean over rows of logits, and MSE the sum over embeddings and layers of the mean squared difference.

    Args:
        student: Outputs of the student: logits, or an object with `logits`, and `hidden_states` where they count.
        teacher: Outputs of the teacher for the same batch, computed without gradients.
        config: The config: a path, a mapping or a `Config`.
        loss: The loss against labels; None takes `student.loss`.
        mask: Which rows of logits count, in their shape without the last dimension; None is all.

    Returns:
        The scalar loss for `engine.backward`.

    Raises:
        PolyaccelError: `layer_reduction` is off, an output that the config needs is missing, or shapes differ.

    Example:
        ```python
        with torch.no_grad():
            wanted = teacher(tokens)
        loss = polyaccel.distillation_loss(engine(tokens, labels=tokens), wanted, "config.json")
        engine.backward(loss)
        ```
    """
    reduction = compression_policy_of(load_config(config)).reduction
    if reduction is None:
        raise PolyaccelError("layer_reduction is off", hint='set "layer_reduction": {"enabled": true, ...}')
    how = reduction.distillation
    found, wanted = _logits(student, "student"), _logits(teacher, "teacher")
    total = how.weight * how.temperature**2 * _divergence(found, wanted, how.temperature, mask)
    if how.weight < 1.0:
        labelled = getattr(student, "loss", None) if loss is None else loss
        if labelled is None:
            hint = 'pass loss= or labels to the student, or set "weight": 1'
            raise PolyaccelError("the outputs of the student have no loss", hint=hint)
        total = total + (1.0 - how.weight) * labelled
    if how.hidden_weight:
        total = total + how.hidden_weight * _hidden_distance(student, teacher, reduction)
    return total


def _divergence(found: Tensor, wanted: Tensor, temperature: float, mask: Tensor | None) -> Tensor:
    if found.shape != wanted.shape:
        shapes = f"{tuple(found.shape)} and {tuple(wanted.shape)}"
        raise PolyaccelError(f"logits of student and teacher differ in shape: {shapes}", hint="give both one batch")
    own, targets = (functional.log_softmax(one.float() / temperature, -1) for one in (found, wanted.detach()))
    rows = (targets.exp() * (targets - own)).sum(-1)
    if mask is None:
        return rows.mean()
    if mask.shape != rows.shape:
        shapes = f"{tuple(mask.shape)}, logits have rows of {tuple(rows.shape)}"
        raise PolyaccelError(f"the mask is of shape {shapes}", hint="give one value for each row", value=mask.shape)
    counts = mask.to(rows)
    return (rows * counts).sum() / counts.sum().clamp(min=1)


def _logits(outputs: Any, role: str) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor) or not logits.dim():
        hint = "pass its logits, or an output that has them"
        raise PolyaccelError(f"the {role} has no logits", hint=hint, value=type(outputs).__name__)
    return logits


def _hidden_distance(student: Any, teacher: Any, reduction: LayerReduction) -> Tensor:
    """Compare the embeddings, and after each of the student's layers its state with that after the teacher's one."""
    own, others = (_hidden(one, role) for one, role in ((student, "student"), (teacher, "teacher")))
    pairs = [(0, 0), *((mine + 1, theirs + 1) for mine, theirs in enumerate(reduction.teacher_layers))]
    if len(own) != len(pairs) or len(others) <= max(theirs for _, theirs in pairs):
        counts = f"{len(own) - 1} and {len(others) - 1} layers"
        raise PolyaccelError(f"hidden states are of {counts}", hint="check teacher_layer of layer_reduction")
    terms = [functional.mse_loss(own[mine].float(), others[theirs].detach().float()) for mine, theirs in pairs]
    return sum(terms[1:], terms[0])


def _hidden(outputs: Any, role: str) -> tuple[Tensor, ...]:
    states = getattr(outputs, "hidden_states", None)
    if states is None:
        hint = "call it with output_hidden_states=True, or leave hidden_weight out"
        raise PolyaccelError(f"the {role} has no hidden states", hint=hint, value=type(outputs).__name__)
    return tuple(states)
