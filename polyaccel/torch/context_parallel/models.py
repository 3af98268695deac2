"""Models of Hugging Face's whose sequences are cut over ranks, without a change to them or to their scripts.

[Note: Context-parallel forward pass]
All ranks of a sequence are called with the same batch. Before the model runs, a hook keeps this rank's tokens of it:
ids, labels (shifted first, so that the loss over the border between two ranks is right), position ids (made where
there are none). Documents and padding are noted for the attention, which computes over ranks. After the model a hook
makes its loss one that is weighted by tokens ([Note: Token-mean loss]). Logits and hidden states are those of this
rank's tokens.

A pass is left whole, the same on all ranks, where there is nothing to cut: in evaluation without labels (generation,
logits), with a cache, and where there are fewer tokens than ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from contextvars import Token
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from polyaccel.comm.base import Communicator
from polyaccel.errors import PolyaccelError
from polyaccel.torch.context_parallel.batches import WholeBatch, own_part, target_count
from polyaccel.torch.context_parallel.block_mask import DocumentMask
from polyaccel.torch.context_parallel.huggingface import PREFIX, CutForward, current, registered
from polyaccel.torch.context_parallel.loss_shift import loss_form
from polyaccel.torch.context_parallel.losses import IGNORED, mean_of_ranks
from polyaccel.torch.context_parallel.settings import OTHER_METHOD, SequenceSettings
from polyaccel.torch.context_parallel.shares import TokenShares
from polyaccel.torch.context_parallel.token_mixing import find_mixer
from polyaccel.torch.context_parallel.token_numbers import whole_token_numbers

_log = getLogger(__name__)

_COMPARED = 2
"""Passes whose batches are compared: later ones come from the same loader."""
_FULL_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


class SequenceParallel:
    """The hooks of [Note: Context-parallel forward pass], on one model;
    `polyaccel.torch.context_parallel.apply_context_parallel` makes them."""

    def __init__(self, model: nn.Module, communicator: Communicator, settings: SequenceSettings) -> None:
        self.communicator = communicator
        self.settings = settings
        self._model = model
        self._transformer = _transformer_in(model)
        _require_attention_only(self._transformer)
        theirs = self._transformer.config
        self._before = theirs._attn_implementation
        self._core = settings.core_attention if settings.core_attention != "blockwise" else self._before
        if self._core.startswith(PREFIX):
            raise PolyaccelError("the sequences of this model are cut over ranks already", hint="call remove() first")
        name = registered(self._core)
        self._transformer.set_attn_implementation(name)
        if theirs._attn_implementation != name:
            raise _refusal(self._transformer, "its attention is not chosen by name (AttentionInterface)")
        if (mixer := find_mixer(model)) is not None:
            self._transformer.set_attn_implementation(self._before)
            reason = f"{mixer or 'its forward'} joins tokens without attention, or counts their places itself"
            raise _refusal(self._transformer, reason, mixer)
        self._has_logged = False
        self._to_compare = _COMPARED
        self._signature = inspect.signature(model.forward)
        self._loss = _loss_of(self._transformer)
        self._cut: _Pass | None = None
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    @property
    def module_names(self) -> tuple[str, ...]:
        """Full names of the modules that compute with parts of sequences."""
        modules = self._model.named_modules()
        return tuple(name for name, one in modules if one is self._model or one is self._transformer)

    def remove(self) -> None:
        """Let the model run whole again."""
        for handle in self._handles:
            handle.remove()
        self._transformer.set_attn_implementation(self._before)

    def own_part(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a tensor that has those of the whole sequence along `dim`: for losses of one's own."""
        return own_part(tensor, self._shares(tensor.shape[dim]), self.communicator.rank, dim)

    def _shares(self, length: int) -> TokenShares:
        make = TokenShares.balanced if self.settings.method == "ring" else TokenShares.contiguous
        return make(length, self.communicator.world_size)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        batch = WholeBatch(_by_name(self._signature, args, named))
        if not self._is_cut(batch):
            return None
        rows, length = batch.shape
        if batch.has_choices:
            raise _refusal(self._transformer, "input_ids has several sequences in a row")
        if self._to_compare:
            self._to_compare -= 1
            self._require_one_batch(batch)
        shares, marks = self._shares(length), batch.marks()
        self._log_documents(batch, marks)
        given = {**batch.named, "use_cache": False}
        tokens = batch.tokens
        assert tokens is not None
        given["position_ids"] = _positions(self._transformer, batch, tokens.device)
        # With its own mask transformers does not look for documents in this rank's positions.
        given["attention_mask"] = torch.ones(rows, length, dtype=torch.int64, device=tokens.device)
        targets = batch.targets(shifted=self._loss.is_shifted)
        if targets is not None:
            self._loss.announce(given, targets, self.communicator.world_size)
        kind = type(self._transformer).__name__
        cut = CutForward(self.communicator, self.settings, self._core, shares, marks, rows, kind)
        own = WholeBatch(given).cut(shares, self.communicator.rank)
        own_targets = None if targets is None else own_part(targets, shares, self.communicator.rank)
        whole_count = None if targets is None else target_count(targets)
        self._cut = _Pass(cut, current.set(cut), own_targets, whole_count)
        return (), own

    def _require_one_batch(self, batch: WholeBatch) -> None:
        """Raise PolyaccelError where the ranks of a sequence were called with other tokens. Collective."""
        digests = self.communicator.all_gather_object(batch.digest())
        if len(set(digests)) > 1:
            raise PolyaccelError(
                "the ranks that share a sequence were called with other batches",
                hint="give all of them the same tokens; completions that each samples by a seed that follows from its "
                "rank (TRL's GRPO) are not the same",
                value=digests,
            )

    def _log_documents(self, batch: WholeBatch, marks: DocumentMask) -> None:
        if self._has_logged or batch.named.get("attention_mask") is not None:
            return
        if any(len(row.cuts) > 2 for row in marks.rows):
            self._has_logged = True
            if self.communicator.rank == 0:
                _log.warning(
                    "sequence ranks separate the documents that position_ids mark; on one rank some models of "
                    "transformers (OPT, BioGPT, AFMoE, Electra) let them attend to each other; logged once"
                )

    def _is_cut(self, batch: WholeBatch) -> bool:
        has_labels = any(batch.named.get(name) is not None for name in ("labels", "shift_labels"))
        has_cache = batch.named.get("past_key_values") is not None
        return (
            self.communicator.world_size > 1
            and (self._model.training or has_labels)
            and not has_cache
            and batch.shape[1] >= self.communicator.world_size
        )

    def _end(self, module: nn.Module, args: Any, named: Any, outputs: Any) -> Any:
        done, self._cut = self._cut, None
        if done is None:
            return None
        current.reset(done.token)
        if outputs is None:  # the model raised
            return None
        if not done.cut.calls:
            raise _refusal(self._transformer, "none of its layers asked transformers for its attention")
        if isinstance(outputs, list):  # what a stage of a pipeline sends to the next
            return None
        if _is_of_sequences(outputs, done.cut.rows, done.cut.shares.lengths):
            raise _refusal(self._transformer, "its outputs are of a whole sequence each, not of tokens")
        if done.targets is None:
            return None
        outputs = whole_token_numbers(outputs, done.cut.shares, done.cut.rows, self.communicator)
        loss = self._loss.computed(outputs, done.targets, done.count, self.communicator.world_size)
        return _with_loss(outputs, mean_of_ranks(loss, self.communicator))


@dataclass
class _Pass:
    cut: CutForward
    token: Token[CutForward | None]
    targets: Tensor | None
    """The labels that this rank's tokens are to predict."""
    count: Tensor | None
    """How many targets the whole sequence has."""


@dataclass(frozen=True)
class _Loss:
    """Where the loss of a model comes from.

    Most models compute it by transformers' table of losses, to which they pass on what they do not have: targets that
    are shifted already, and the number by which a sum is divided. Of others the logits are taken.
    """

    is_shifted: bool
    """The model predicts the next token."""
    by_table: bool

    def announce(self, named: dict[str, Any], targets: Tensor, ranks: int) -> None:
        """Change the arguments of a forward pass with labels, so that its loss is this rank's."""
        count = named.pop("num_items_in_batch", None)
        named.pop("shift_labels", None)
        if not self.by_table:
            named.pop("labels", None)
            return
        named["labels"] = targets
        if self.is_shifted:
            named["shift_labels"] = targets
        named["num_items_in_batch"] = (target_count(targets) if count is None else count) / ranks

    def computed(self, outputs: Any, targets: Tensor, count: Tensor | None, ranks: int) -> Tensor:
        """This rank's loss, of which the ranks' mean is that over all tokens ([Note: Token-mean loss])."""
        if self.by_table:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
            assert isinstance(loss, Tensor)
            return loss
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        if logits.shape[:-1] != targets.shape:
            raise PolyaccelError(
                f"labels: the model gives {tuple(logits.shape)} for {tuple(targets.shape)} tokens of this rank",
                hint="a sequence that is cut over ranks needs a model with logits for each token",
                value=tuple(logits.shape),
            )
        total = nn.functional.cross_entropy(
            logits.float().flatten(0, -2) if logits.dtype.itemsize < 4 else logits.flatten(0, -2),
            targets.to(logits.device).flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        assert count is not None
        return total * ranks / count.to(total.device)


def _loss_of(model: PreTrainedModel) -> _Loss:
    form = loss_form(model)
    return _Loss(form.is_shifted, form.takes_targets)


def _with_loss(outputs: Any, loss: Tensor) -> Any:
    """`outputs` of a model, with `loss` where its loss is."""
    if isinstance(outputs, Mapping):
        return type(outputs)(**{**outputs, "loss": loss})
    is_first = isinstance(outputs[0], Tensor) and outputs[0].dim() == 0
    return (loss, *outputs[1:]) if is_first else (loss, *outputs)


def _is_of_sequences(outputs: Any, rows: int, tokens: Collection[int]) -> bool:
    """Whether logits, or the only output, are a vector for each of `rows`, not numbers of a rank's `tokens`."""
    found = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
    return isinstance(found, Tensor) and found.dim() == 2 and found.shape[0] == rows and found.shape[1] not in tokens


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    bound = signature.bind_partial(*args, **named)
    found = dict(bound.arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            found.update(found.pop(parameter.name, {}))
    return found


def _positions(model: PreTrainedModel, batch: WholeBatch, device: torch.device) -> Tensor:
    """The position ids of the whole sequence: the caller's, else those that the model would make."""
    given = batch.named.get("position_ids")
    rows, length = batch.shape
    if given is not None:
        found: Tensor = given
        return found
    ids = batch.named.get("input_ids")
    for module in model.modules():  # those that count from the first id that is not padding
        make = getattr(module, "create_position_ids_from_input_ids", None)
        if make is not None and isinstance(ids, Tensor):
            made: Tensor = make(ids, module.padding_idx)
            return made
    return torch.arange(length, device=device).expand(rows, -1)


def _transformer_in(model: nn.Module) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise PolyaccelError(
        f"the sequences of a {type(model).__name__} cannot be cut over ranks: no model of transformers is in it",
        hint="call polyaccel.torch.context_parallel.ulysses_attention or ring_attention in its layers, or set "
        "sequence_parallel_size to 1",
        value=type(model).__name__,
    )


def _require_attention_only(model: PreTrainedModel) -> None:
    """Raise PolyaccelError for models whose tokens interact elsewhere than in attention, or cannot receive their
    positions."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise _refusal(model, "it has an encoder and a decoder, whose sequences differ")
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise _refusal(model, "its forward takes no position_ids, so a rank cannot pass where its tokens stand")
    others = sorted(set(getattr(model.config, "layer_types", None) or ()) - _FULL_ATTENTION)
    if others:
        raise _refusal(model, f"it has layers of the type {', '.join(others)}, which mix tokens without attention")
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d) and module.kernel_size != (1,):
            raise _refusal(model, f"{name} is a convolution along the sequence")


def _refusal(model: PreTrainedModel, reason: str, value: str = "") -> PolyaccelError:
    kind = type(model).__name__
    return PolyaccelError(
        f"the sequences of a {kind} cannot be cut over ranks: {reason}",
        hint=OTHER_METHOD,
        value=value or kind,
    )
