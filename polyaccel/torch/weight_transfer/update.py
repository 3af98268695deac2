"""What a receiver has of a weight transfer: its tensors one after the other, verified, or a model that takes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import CommError, PolyaccelError, ShardingError
from polyaccel.torch.weight_transfer.manifest import Manifest, TensorInfo
from polyaccel.torch.weight_transfer.source import active_adapter, names_of, own_name


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """Elements of a tensor from `start` on, whose digest is right. `values` are flat, and valid until the next."""

    place: int
    start: int
    values: Tensor


class WeightUpdate(ABC):
    """All weights of one transfer. It can be iterated, or loaded into a model, once.

    Iterating yields `(name, tensor)` as `load_weights` of vLLM and SGLang takes them. Tensors are whole, and their
    memory is the caller's.

    Args:
        manifest: What was announced.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._is_taken = False

    @property
    def tensors(self) -> Sequence[TensorInfo]:
        """Names, types and shapes, in the order of the transfer."""
        return self._manifest.tensors

    @property
    def version(self) -> int:
        """Number of the weights, by default the steps of the engine."""
        return self._manifest.version

    @property
    def is_adapter(self) -> bool:
        """Whether the tensors are a PEFT adapter alone."""
        return self._manifest.is_adapter

    @abstractmethod
    def _received(self) -> Generator[WeightPiece, None, None]:
        """Yield verified pieces in order."""

    @abstractmethod
    def refuse(self, problem: str) -> None:
        """Report to the trainer that these weights are not taken.

        Args:
            problem: The reason, for the error message of the trainer.
        """

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        whole: Tensor | None = None
        filled = 0
        with closing(self._pieces()) as pieces:
            for piece in pieces:
                info = self.tensors[piece.place]
                if whole is None:
                    whole, filled = torch.empty(info.numel, dtype=info.dtype), 0
                whole[piece.start : piece.start + piece.values.numel()].copy_(piece.values)
                filled += piece.values.numel()
                if filled == info.numel:
                    yield info.name, whole.view(info.shape)
                    whole = None

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> None:
        """Copy all weights into a model, without memory for any of them; other types of elements are converted.

        Names and shapes are compared before anything is copied. After another error the model has a part of the
        weights: load a whole transfer before it is used.

        Args:
            model: Model with the names of the trained one. For an adapter alone, a PEFT model whose active adapter
                takes it.

        Raises:
            ShardingError: The model has another name or shape; the message has the first. The trainer
                raises too.
            CommError: The trainer has gone, or a digest is wrong; the message names the parameter.
            CommTimeout: The trainer is too slow.
        """
        targets = self._targets(model)
        flat: Tensor | None = None
        with closing(self._pieces()) as pieces:
            for piece in pieces:
                target = targets[piece.place]
                if flat is None:
                    flat = target.view(-1) if target.is_contiguous() else target.new_empty(target.numel())
                end = piece.start + piece.values.numel()
                flat[piece.start : end].copy_(piece.values)
                if end == target.numel():
                    if not target.is_contiguous():
                        target.copy_(flat.view(target.shape))
                    flat = None

    def _targets(self, model: nn.Module) -> list[Tensor]:
        """The tensors of `model` in the order of the transfer. Raises ShardingError for a model of other tensors."""
        try:
            own = own_tensors(model, is_adapter=self.is_adapter)
            problem = first_difference(self.tensors, own)
        except PolyaccelError as error:
            own, problem = {}, error.message
        if problem:
            self.refuse(problem)
            raise ShardingError(problem, hint="give the model that is trained", value=problem)
        return [own[info.name].detach() for info in self.tensors]

    def _pieces(self) -> Generator[WeightPiece, None, None]:
        """Yield pieces that follow each other without a gap, to the end of the last tensor."""
        if self._is_taken:
            raise PolyaccelError(f"weights of version {self.version} were taken already", hint="receive them again")
        self._is_taken = True
        place = start = 0
        with closing(self._received()) as received:
            for piece in received:
                if (piece.place, piece.start) != (place, start):
                    raise CommError(f"malformed weight transfer: tensor {piece.place} from {piece.start}")
                yield piece
                start += piece.values.numel()
                if start == self.tensors[place].numel:
                    place, start = place + 1, 0
        if place < len(self.tensors):
            raise CommError(f"weight transfer ended before {self.tensors[place].name!r}", hint="send the weights again")


def own_tensors(model: nn.Module, *, is_adapter: bool) -> dict[str, Tensor]:
    """Return the tensors of the state dict of `model`, or of its active PEFT adapter under the names of its files."""
    state: dict[str, Any] = {own_name(key): entry for key, entry in model.state_dict(keep_vars=True).items()}
    if is_adapter:
        state = {name: state[own_name(key)] for key, name in names_of(model, active_adapter(model)).items()}
    return {name: entry for name, entry in state.items() if isinstance(entry, Tensor)}


def first_difference(tensors: Sequence[TensorInfo], own: Mapping[str, Tensor]) -> str:
    """Return the first name or shape that differs, in words; "" without one."""
    for info in tensors:
        if info.name not in own:
            return f"the receiving model has no tensor {info.name!r}"
        if tuple(own[info.name].shape) != info.shape:
            return f"{info.name!r} has the shape {info.shape}, in the receiving model {tuple(own[info.name].shape)}"
    covered = {id(own[info.name]) for info in tensors}
    left = next((name for name, tensor in own.items() if id(tensor) not in covered), None)
    return "" if left is None else f"{left!r} of the receiving model is not sent"
