"""What stages send each other: outputs forward, gradients back, by the communicator's own messages.

[Note: Message descriptions]
A chunk's output is described when its structure, its types and its shapes are not those of its output before: its
tensors follow a number, how many numbers of description come first, 0 nearly always. Gradients need none: they are like
the outputs.

[Note: Early receives]
A stage begins its next receive before the task in front of it, so that what arrives meanwhile is there when the task is
done. It must then take what comes to be like before. Where it is not, the sender sends as many bytes as it was expected
to, of nothing, before the description and the tensors; so it does not matter whether the other side has begun early.
Outputs that have changed more than `_MOST_CHANGES` times are expected to change on: only the number is received early.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.torch import dtype_of, torch_dtype, wrap_torch
from polyaccel.comm.base import Communicator
from polyaccel.comm.work import Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.pipeline.messages import StageMessage
from polyaccel.torch.pipeline.values import StageValue

_TYPES = tuple(DType)
_MOST_CHANGES = 2
Shapes = tuple[tuple[int, ...], ...]
"""Of each tensor: number of its type, whether it has a gradient, its lengths."""


@dataclass
class _Known:
    """What both sides have of the outputs of a chunk, in training and in evaluation each: how the last were, and
    whether the next are expected to be the same."""

    structure: bytes | None = None
    shapes: Shapes = ()
    changes: int = 0
    is_steady: bool = True

    @property
    def expected(self) -> Shapes:
        """The tensors that are sent before any description."""
        return self.shapes if self.is_steady else ()

    def numbers(self) -> list[int]:
        """The description as numbers, of which `read` is the inverse."""
        assert self.structure is not None  # it is of an output
        shapes = [number for shape in self.shapes for number in (len(shape), *shape)]
        padded = self.structure.ljust(-(-len(self.structure) // 8) * 8)
        packed = torch.frombuffer(bytearray(padded), dtype=torch.int64).tolist()
        return [int(self.is_steady), len(self.shapes), *shapes, *packed]

    def read(self, numbers: Sequence[int]) -> None:
        steady, count, *left = numbers
        shapes = []
        for _ in range(count):
            length, *left = left
            shapes.append(tuple(left[:length]))
            left = left[length:]
        self.shapes, self.is_steady = tuple(shapes), bool(steady)
        self.structure = torch.tensor(left, dtype=torch.int64).numpy().tobytes().rstrip()


@dataclass
class _Begun:
    """A receive that has begun, or where it is not `early` has ended: the number, and tensors as they are expected."""

    early: bool
    works: list[Work] = field(default_factory=list)
    number: Buffer | None = None
    tensors: list[Tensor] = field(default_factory=list)

    def add(self, ranks: Communicator, source: int, tensor: Tensor, label: str) -> None:
        if tensor.numel():
            self.works.append(ranks.recv(wrap_torch(tensor.view(-1)), source, async_op=self.early, label=label))
        self.tensors.append(tensor)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class StageExchange:
    """Sends and receives tensors between this stage and others; `line` are the stages in order. A `label` describes a
    message in records and errors. `trains` is whether a message is of training, the same on all stages."""

    def __init__(self, line: Communicator, accelerator: Accelerator, device: torch.device) -> None:
        self.line = line
        self._accelerator = accelerator
        self.device = device
        self._sent_shapes: defaultdict[tuple[int, bool], _Known] = defaultdict(
            _Known
        )  # by chunk, which is on one stage
        self._received_shapes: defaultdict[tuple[int, bool], _Known] = defaultdict(_Known)
        self._begun: dict[StageMessage, _Begun] = {}
        self._sending: deque[tuple[Work, object]] = deque()

    def send_outputs(self, message: StageMessage, value: StageValue, label: str, *, trains: bool) -> None:
        """Send what a chunk gave. Its tensors may be released."""
        known, shapes = self._sent_shapes[message.chunk, trains], tuple(map(_described, value.tensors))
        if (known.structure, known.shapes) == (value.structure, shapes):
            self._send_numbers(message.target, [0], label)
        else:
            expected = known.expected
            known.structure, known.shapes, known.changes = value.structure, shapes, known.changes + 1
            known.is_steady = known.changes <= _MOST_CHANGES
            news = known.numbers()
            self._send_numbers(message.target, [len(news)], label)
            for one in expected:
                self._send(message.target, self._empty(one).zero_(), f"nothing of the {label}")
            self._send_numbers(message.target, news, label)
        for tensor in value.tensors:
            self._send(message.target, tensor.detach(), label)

    def begin_outputs(self, message: StageMessage, label: str, *, trains: bool, early: bool = True) -> None:
        """Begin to receive what `send_outputs` sends, or receive it now, if it is not `early`. Receives begin in the
        order in which they are waited for."""
        begun = self._begun[message] = _Begun(early)
        begun.number = self._accelerator.allocate(1, DType.INT64)
        label_of_number = f"shapes of the {label}"
        begun.works.append(self.line.recv(begun.number, message.source, async_op=early, label=label_of_number))
        for one in self._received_shapes[message.chunk, trains].expected:
            begun.add(self.line, message.source, self._empty(one), label)

    def receive_outputs(self, message: StageMessage, label: str, *, trains: bool) -> StageValue:
        """What `send_outputs` sent: its tensors are leaves that require a gradient where the sent ones do, in
        training."""
        if message not in self._begun:
            self.begin_outputs(message, label, trains=trains, early=False)
        begun, known = self._begun.pop(message), self._received_shapes[message.chunk, trains]
        assert begun.number is not None  # of outputs there is one
        begun.wait()
        (count,) = _numbers_in(begun.number)
        if count or not known.is_steady:
            if count:
                known.read(self._receive_numbers(message.source, count, label))
            begun = _Begun(False)
            for one in known.shapes:
                begun.add(self.line, message.source, self._empty(one), label)
        assert known.structure is not None  # the first output comes with a description
        pairs = zip(begun.tensors, known.shapes, strict=True)
        return StageValue(known.structure, [tensor.requires_grad_(bool(one[1]) and trains) for tensor, one in pairs])

    def send_gradients(self, message: StageMessage, gradients: Sequence[Tensor], label: str) -> None:
        """Send the gradients of those tensors of `receive_outputs` that require one. They may be released."""
        for gradient in gradients:
            self._send(message.target, gradient, label)

    def begin_gradients(
        self, message: StageMessage, outputs: Sequence[Tensor], label: str, *, early: bool = True
    ) -> None:
        """Begin to receive the gradients of those `outputs` that have one, as `begin_outputs` does."""
        begun = self._begun[message] = _Begun(early)
        for tensor in outputs:
            if tensor.requires_grad:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                begun.add(self.line, message.source, empty, label)

    def receive_gradients(self, message: StageMessage, outputs: Sequence[Tensor], label: str) -> list[Tensor]:
        """The gradients of those `outputs` that have one."""
        if message not in self._begun:
            self.begin_gradients(message, outputs, label, early=False)
        begun = self._begun.pop(message)
        begun.wait()
        return begun.tensors

    def settle(self) -> None:
        """Wait until everything is sent."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def forget(self) -> None:
        """Exchange types and shapes again. Every stage calls it."""
        self._sent_shapes.clear()
        self._received_shapes.clear()

    def _keep(self, work: Work, sent: object) -> None:
        """Keep what is under way until it is sent. What is sent by now may go."""
        self._sending.append((work, sent))
        while self._sending and self._sending[0][0].is_done():
            self._sending.popleft()[0].wait()

    def _send(self, target: int, tensor: Tensor, label: str) -> None:
        if tensor.numel():
            flat = tensor.contiguous().view(-1)
            self._keep(self.line.send(wrap_torch(flat), target, async_op=True, label=label), flat)

    def _empty(self, described: tuple[int, ...]) -> Tensor:
        kind, _, *shape = described
        return torch.empty(shape, dtype=torch_dtype(_TYPES[kind]), device=self.device)

    def _send_numbers(self, target: int, numbers: list[int], label: str) -> None:
        buffer = self._accelerator.allocate(len(numbers), DType.INT64)
        buffer.from_bytes(torch.tensor(numbers, dtype=torch.int64).numpy().tobytes())
        self._keep(self.line.send(buffer, target, async_op=True, label=f"shapes of the {label}"), buffer)

    def _receive_numbers(self, source: int, count: int, label: str) -> list[int]:
        buffer = self._accelerator.allocate(count, DType.INT64)
        self.line.recv(buffer, source, label=f"shapes of the {label}")
        return _numbers_in(buffer)


def _numbers_in(buffer: Buffer) -> list[int]:
    return torch.frombuffer(bytearray(buffer.to_bytes()), dtype=torch.int64).tolist()


def _described(tensor: Tensor) -> tuple[int, ...]:
    return (_TYPES.index(dtype_of(tensor.dtype)), int(tensor.requires_grad), *tensor.shape)


def gradients_of(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of those `inputs` that require one, zeros where there is none."""
    return [torch.zeros_like(one) if one.grad is None else one.grad for one in inputs if one.requires_grad]
