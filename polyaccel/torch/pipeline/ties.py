"""Modules that several stages have: values from the owner, gradients to it. See [Note: Tied weight owner]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.comm.base import Communicator
from polyaccel.comm.work import Work
from polyaccel.torch.pipeline.module import TiedModule


class HasTies(Protocol):
    """A stage of a model, with the modules that others have too, by key."""

    stage: int
    ties: dict[str, TiedModule]

    def parameters(self) -> Iterator[Tensor]: ...


class TiedWeights:
    """The exchange of tied weights between this stage and others; `ranks` are the stages in order."""

    def __init__(self, module: HasTies, ranks: Communicator, device: torch.device) -> None:
        self._module = module
        self._ranks = ranks
        self._device = device
        self._sending: list[tuple[Work, Tensor]] = []
        self._dtype: torch.dtype | None = None

    @property
    def is_owner(self) -> bool:
        """Whether this stage owns parameters that others have too."""
        return any(True for _ in self._owned())

    @torch.no_grad()
    def refresh(self) -> None:
        """Let all holders have the owner's values, in the owner's types. Every stage calls it."""
        for tie, others in self._owned():
            for parameter in tie.module.parameters():
                for other in others:
                    self._send(other, parameter.detach())
        for tie in self._borrowed():
            for part, name in tie.lent:
                before = vars(part)[name]
                values = torch.empty(before.shape, dtype=self._dtype or before.dtype, device=self._device)
                self._ranks.recv(wrap_torch(values.view(-1)), tie.holders[0], label="tied weights")
                values.requires_grad_(before.requires_grad)
                for place in ((part, name), *tie.also):
                    setattr(*place, values)
        self.settle()

    def return_gradients(self) -> None:
        """Send the owners what this stage has summed. Called when this stage has ended a step's last backward
        pass and sent what that made."""
        for tie in self._borrowed():
            for part, name in tie.lent:
                value = vars(part)[name]
                if value.requires_grad:
                    self._send(tie.holders[0], torch.zeros_like(value) if value.grad is None else value.grad)
                    value.grad = None

    def take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Views of the parameters that this stage owns and others have summed gradients of, with these. Called before
        the last backward pass of a step."""
        found = []
        for tie, others in self._owned():
            for parameter in tie.module.parameters():
                if parameter.requires_grad:
                    total = torch.zeros_like(parameter)
                    for other in others:
                        part = torch.empty_like(total)
                        self._ranks.recv(wrap_torch(part.view(-1)), other, label="gradients of tied weights")
                        total += part
                    found.append((parameter.view_as(parameter), total))
        return found

    def owned_parameters(self) -> set[Tensor]:
        """The parameters of this stage that others have too."""
        return {parameter for tie, _ in self._owned() for parameter in tie.module.parameters()}

    def settle(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def agree_on_types(self) -> None:
        """Send holders the type in which parameters are held. Every stage calls it."""
        own = {str(parameter.dtype) for parameter in self._module.parameters() if parameter.is_floating_point()}
        gathered = sorted({name for names in self._ranks.all_gather_object(sorted(own)) for name in names})
        self._dtype = getattr(torch, gathered[0].removeprefix("torch.")) if len(gathered) == 1 else None

    def _owned(self) -> Iterator[tuple[TiedModule, tuple[int, ...]]]:
        for tie in self._module.ties.values():
            if tie.holders[0] == self._module.stage:
                yield tie, tie.holders[1:]

    def _borrowed(self) -> Iterator[TiedModule]:
        for tie in self._module.ties.values():
            if tie.holders[0] != self._module.stage:
                yield tie

    def _send(self, target: int, tensor: Tensor) -> None:
        flat = tensor.contiguous().view(-1)
        work = self._ranks.send(wrap_torch(flat), target, async_op=True, label="tied weights")
        self._sending.append((work, flat))
