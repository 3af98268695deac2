"""What neighbouring stages send each other: outputs forward, gradients back, by the communicator's own messages.

[Note: What is known of a message]
Types and shapes of an output are told when they are not those of the output before it: each message of tensors follows
a number, how many numbers of description come first, 0 nearly always. Gradients need none: they are like the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.torch import dtype_of, torch_dtype, wrap_torch
from polyaccel.comm.base import Communicator
from polyaccel.comm.work import Work
from polyaccel.types import DType

_TYPES = tuple(DType)
Description = tuple[tuple[int, ...], ...]
"""Of each tensor: number of its type (-1: None), whether it has a gradient, its lengths."""


class StageExchange:
    """Sends and receives tensors between this stage and others; `ranks` are the stages in order."""

    def __init__(self, ranks: Communicator, accelerator: Accelerator, device: torch.device) -> None:
        self._ranks = ranks
        self._accelerator = accelerator
        self._device = device
        self._told: dict[int, Description] = {}
        self._heard: dict[int, Description] = {}
        self._sending: list[tuple[Work, Tensor]] = []

    def send_outputs(self, target: int, tensors: Sequence[Tensor | None]) -> None:
        """Send the tensors of a forward pass. They may be let go of."""
        described = tuple(map(_described, tensors))
        news: list[int] = []
        if self._told.get(target) != described:
            self._told[target] = described
            news = [len(described), *(number for one in described for number in (len(one), *one))]
        self._send_numbers(target, [len(news)])
        if news:
            self._send_numbers(target, news)
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                self._send(target, tensor.detach())

    def receive_outputs(self, source: int, *, needs_grad: bool) -> list[Tensor | None]:
        """What `send_outputs` sent: leaves that require a gradient where the sent ones do, if any is needed."""
        (news,) = self._receive_numbers(source, 1)
        if news:
            count, *numbers = self._receive_numbers(source, news)
            described = []
            for _ in range(count):
                length, *numbers = numbers
                described.append(tuple(numbers[:length]))
                numbers = numbers[length:]
            self._heard[source] = tuple(described)
        return [self._receive(source, one, needs_grad) for one in self._heard[source]]

    def send_gradients(self, target: int, inputs: Sequence[Tensor | None]) -> None:
        """Send the gradients of what `receive_outputs` gave, zeros where there is none."""
        for tensor in inputs:
            if tensor is not None and tensor.requires_grad and tensor.numel():
                self._send(target, torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)

    def receive_gradients(self, source: int, outputs: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients of those `outputs` that have one."""
        found = []
        for tensor in outputs:
            if tensor is not None and tensor.requires_grad:
                gradient = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                if gradient.numel():
                    self._ranks.recv(wrap_torch(gradient.view(-1)), source, label="gradients of activations")
                found.append(gradient)
        return found

    def settle(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def forget(self) -> None:
        """Tell and hear types and shapes anew. Every stage calls it."""
        self._told.clear()
        self._heard.clear()

    def _send(self, target: int, tensor: Tensor) -> None:
        flat = tensor.contiguous().view(-1)
        work = self._ranks.send(wrap_torch(flat), target, async_op=True, label="activations")
        self._sending.append((work, flat))

    def _receive(self, source: int, described: tuple[int, ...], needs_grad: bool) -> Tensor | None:
        kind, has_grad, *shape = described
        if kind < 0:
            return None
        tensor = torch.empty(shape, dtype=torch_dtype(_TYPES[kind]), device=self._device)
        if tensor.numel():
            self._ranks.recv(wrap_torch(tensor.view(-1)), source, label="activations")
        return tensor.requires_grad_(bool(has_grad) and needs_grad)

    def _send_numbers(self, target: int, numbers: list[int]) -> None:
        buffer = self._accelerator.allocate(len(numbers), DType.INT64)
        buffer.from_bytes(torch.tensor(numbers, dtype=torch.int64).numpy().tobytes())
        self._ranks.send(buffer, target, label="shapes of activations")

    def _receive_numbers(self, source: int, count: int) -> list[int]:
        buffer = self._accelerator.allocate(count, DType.INT64)
        self._ranks.recv(buffer, source, label="shapes of activations")
        return torch.frombuffer(bytearray(buffer.to_bytes()), dtype=torch.int64).tolist()


def _described(tensor: Tensor | None) -> tuple[int, ...]:
    if tensor is None:
        return (-1, 0)
    return (_TYPES.index(dtype_of(tensor.dtype)), int(tensor.requires_grad), *tensor.shape)


def as_list(value: Any) -> list[Tensor | None]:
    """A layer's output as what is sent."""
    return list(value) if isinstance(value, (tuple, list)) else [value]
