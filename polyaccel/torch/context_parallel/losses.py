"""The loss of a sequence that is cut over ranks, weighted by tokens.

[Note: Token-mean loss]
The engine takes the mean of the ranks' gradients. For the mean over all tokens, each of N ranks needs as its loss
    N * (sum over its tokens) / (number of tokens of all ranks),
so a rank that has few target tokens, or none, has as little weight. What users see is the mean over all tokens, which
is the mean of these losses, on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from polyaccel.comm.base import Communicator

IGNORED = -100
"""The label of tokens that are not targets."""


class _Valued(torch.autograd.Function):
    """A loss with another value, to the bit, and its own gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor) -> Tensor:
        return value.to(loss.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def targets_of_next_tokens(labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """For each token of `labels` (rows, length) the next one, which it is to predict; `ignored` for the last."""
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignored)


def mean_over_tokens(total: Tensor, tokens: Tensor | int, communicator: Communicator) -> Tensor:
    """The mean of `total`, a sum over this rank's `tokens`, over the tokens of all ranks of `communicator`; NaN
    where there are none, as in torch.

    Its value is the same on all ranks; its gradients are such that their mean over these ranks is that of the mean over
    tokens, however they are spread ([Note: Token-mean loss]). Collective.
    """
    wide = torch.promote_types(total.dtype, torch.float32)
    both = torch.stack([total.detach().to(wide), torch.as_tensor(tokens, device=total.device).to(wide)])
    communicator.all_reduce(communicator.accelerator.wrap(both), label="loss")
    count = both[1]
    own = total * (communicator.world_size / count)
    found: Tensor = _Valued.apply(own, both[0] / count)  # type: ignore[no-untyped-call]
    return found


def mean_of_ranks(loss: Tensor, communicator: Communicator) -> Tensor:
    """`loss` with the mean of the ranks' losses as its value, and its own gradient. Collective."""
    wide = torch.promote_types(loss.dtype, torch.float32)
    value = loss.detach().to(wide).reshape(1).clone()
    communicator.all_reduce(communicator.accelerator.wrap(value), label="loss")
    found: Tensor = _Valued.apply(loss, value[0] / communicator.world_size)  # type: ignore[no-untyped-call]
    return found


def cross_entropy_over_ranks(
    logits: Tensor, targets: Tensor, communicator: Communicator, ignored: int = IGNORED
) -> Tensor:
    """Cross entropy of this rank's `logits` (..., classes) and `targets` (...), as `mean_over_tokens`. Collective."""
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2).float() if logits.dtype.itemsize < 4 else logits.flatten(0, -2),
        targets.to(logits.device).flatten(),
        ignore_index=ignored,
        reduction="sum",
    )
    return mean_over_tokens(total, (targets != ignored).sum(), communicator)


class CausalLoss(ABC):
    """The causal loss of transformers' models (`model.loss_function`)."""

    @abstractmethod
    def _total(self, logits: Any, targets: Tensor, ignored: int) -> Tensor:
        """Return the sum of the losses of all tokens whose target is not `ignored`."""

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """The mean over the tokens that count, or the sum divided by `num_items_in_batch`. The label of a token is the
        next one's, but where `shift_labels` has them."""
        if shift_labels is None:
            assert labels is not None
            shift_labels = targets_of_next_tokens(labels, ignore_index)
        total = self._total(logits, shift_labels, ignore_index)
        count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)
