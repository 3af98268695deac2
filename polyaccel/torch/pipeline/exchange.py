"""What stages send each other: outputs forward, gradients back, by the communicator's own messages.

[Note: What is known of a message]
Types and shapes of a chunk's output are told when they are not those of its output before: each message of tensors
follows a number, how many numbers of description come first, 0 nearly always. Gradients need none: they are like the
outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.torch import dtype_of, torch_dtype, wrap_torch
from polyaccel.comm.base import Communicator
from polyaccel.comm.work import Work
from polyaccel.pipeline.messages import StageMessage
from polyaccel.types import DType

_TYPES = tuple(DType)
Description = tuple[tuple[int, ...], ...]
"""Of each tensor: number of its type (-1: None), whether it has a gradient, its lengths."""


class StageExchange:
    """Sends and receives tensors between this stage and others; `ranks` are the stages in order. A `label` says in
    records and errors what a message is."""

    def __init__(self, ranks: Communicator, accelerator: Accelerator, device: torch.device) -> None:
        self._ranks = ranks
        self._accelerator = accelerator
        self._device = device
        self._told: dict[tuple[int, int], Description] = {}  # by target and chunk
        self._heard: dict[int, Description] = {}  # by chunk, which is on one stage
        self._sending: deque[tuple[Work, object]] = deque()

    def send_outputs(self, message: StageMessage, tensors: Sequence[Tensor | None], label: str) -> None:
        """Send the tensors of a forward pass. They may be let go of."""
        described = tuple(map(_described, tensors))
        news: list[int] = []
        if self._told.get((message.target, message.chunk)) != described:
            self._told[message.target, message.chunk] = described
            news = [len(described), *(number for one in described for number in (len(one), *one))]
        self._send_numbers(message.target, [len(news)], label)
        if news:
            self._send_numbers(message.target, news, label)
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                self._send(message.target, tensor.detach(), label)

    def receive_outputs(self, message: StageMessage, label: str, *, needs_grad: bool) -> list[Tensor | None]:
        """What `send_outputs` sent: leaves that require a gradient where the sent ones do, if any is needed."""
        (news,) = self._receive_numbers(message.source, 1, label)
        if news:
            count, *numbers = self._receive_numbers(message.source, news, label)
            described = []
            for _ in range(count):
                length, *numbers = numbers
                described.append(tuple(numbers[:length]))
                numbers = numbers[length:]
            self._heard[message.chunk] = tuple(described)
        return [self._receive(message.source, one, needs_grad, label) for one in self._heard[message.chunk]]

    def send_gradients(self, message: StageMessage, gradients: Sequence[Tensor], label: str) -> None:
        """Send the gradients of those tensors of `receive_outputs` that require one. They may be let go of."""
        for gradient in gradients:
            if gradient.numel():
                self._send(message.target, gradient, label)

    def receive_gradients(self, message: StageMessage, outputs: Sequence[Tensor | None], label: str) -> list[Tensor]:
        """The gradients of those `outputs` that have one."""
        found = []
        for tensor in outputs:
            if tensor is not None and tensor.requires_grad:
                gradient = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                if gradient.numel():
                    self._ranks.recv(wrap_torch(gradient.view(-1)), message.source, label=label)
                found.append(gradient)
        return found

    def settle(self) -> None:
        """Wait until everything is sent."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def forget(self) -> None:
        """Tell and hear types and shapes anew. Every stage calls it."""
        self._told.clear()
        self._heard.clear()

    def _keep(self, work: Work, sent: object) -> None:
        """Keep what is under way until it is sent. What is sent by now may go."""
        self._sending.append((work, sent))
        while self._sending and self._sending[0][0].is_done():
            self._sending.popleft()[0].wait()

    def _send(self, target: int, tensor: Tensor, label: str) -> None:
        flat = tensor.contiguous().view(-1)
        self._keep(self._ranks.send(wrap_torch(flat), target, async_op=True, label=label), flat)

    def _receive(self, source: int, described: tuple[int, ...], needs_grad: bool, label: str) -> Tensor | None:
        kind, has_grad, *shape = described
        if kind < 0:
            return None
        tensor = torch.empty(shape, dtype=torch_dtype(_TYPES[kind]), device=self._device)
        if tensor.numel():
            self._ranks.recv(wrap_torch(tensor.view(-1)), source, label=label)
        return tensor.requires_grad_(bool(has_grad) and needs_grad)

    def _send_numbers(self, target: int, numbers: list[int], label: str) -> None:
        buffer = self._accelerator.allocate(len(numbers), DType.INT64)
        buffer.from_bytes(torch.tensor(numbers, dtype=torch.int64).numpy().tobytes())
        self._keep(self._ranks.send(buffer, target, async_op=True, label=f"shapes of the {label}"), buffer)

    def _receive_numbers(self, source: int, count: int, label: str) -> list[int]:
        buffer = self._accelerator.allocate(count, DType.INT64)
        self._ranks.recv(buffer, source, label=f"shapes of the {label}")
        return torch.frombuffer(bytearray(buffer.to_bytes()), dtype=torch.int64).tolist()


def _described(tensor: Tensor | None) -> tuple[int, ...]:
    if tensor is None:
        return (-1, 0)
    return (_TYPES.index(dtype_of(tensor.dtype)), int(tensor.requires_grad), *tensor.shape)


def as_list(value: Any) -> list[Tensor | None]:
    """A layer's output as what is sent."""
    return list(value) if isinstance(value, (tuple, list)) else [value]


def handed_over(outputs: Sequence[Tensor | None], *, needs_grad: bool) -> list[Tensor | None]:
    """What the next chunk gets on the same stage: leaves, as `receive_outputs` would give."""
    return [None if one is None else one.detach().requires_grad_(one.requires_grad and needs_grad) for one in outputs]


def gradients_of(inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients of those `inputs` that require one, zeros where there is none."""
    return [
        torch.zeros_like(one) if one.grad is None else one.grad
        for one in inputs
        if one is not None and one.requires_grad
    ]
