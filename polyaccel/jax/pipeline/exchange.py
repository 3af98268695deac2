"""What stages of JAX send each other. Types and shapes are never sent: every stage derives them from the functions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator
from polyaccel.comm.work import Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.jax.pytree import as_array
from polyaccel.jax.views import array_over
from polyaccel.pipeline.messages import StageMessage


class ArrayExchange:
    """Sends and receives arrays between this stage and others; `ranks` are the stages in order. A `label` describes a
    message in records and errors."""

    def __init__(self, ranks: Communicator, accelerator: Accelerator) -> None:
        self._ranks = ranks
        self._accelerator = accelerator
        self._begun: dict[StageMessage, list[tuple[Buffer, Work | None]]] = {}
        self._sending: deque[tuple[Work, object]] = deque()

    def send(self, message: StageMessage, arrays: Sequence[jax.Array], label: str) -> None:
        """Send arrays that are computed. They may be released."""
        for array in arrays:
            if array.size:
                own = as_array(array)
                buffer = self._accelerator.import_array(own)
                work = self._ranks.send(buffer, message.target, async_op=True, label=label)
                self._sending.append((work, (own, buffer)))
        while self._sending and self._sending[0][0].is_done():
            self._sending.popleft()[0].wait()

    def begin(self, message: StageMessage, shapes: Sequence[Any], label: str, *, early: bool = True) -> None:
        """Begin to receive arrays of these shapes, or receive them now, if it is not `early`. Receives begin in the
        order in which they are waited for."""
        begun = self._begun[message] = []
        for one in shapes:
            buffer = self._accelerator.allocate(int(np.prod(one.shape)), DType.parse(np.dtype(one.dtype).name))
            work = None
            if buffer.numel:
                work = self._ranks.recv(buffer, message.source, async_op=early, label=label)
            begun.append((buffer, work))

    def receive(self, message: StageMessage, shapes: Sequence[Any], label: str) -> list[jax.Array]:
        """The arrays of these shapes that `send` sent."""
        if message not in self._begun:
            self.begin(message, shapes, label, early=False)
        found = []
        for (buffer, work), one in zip(self._begun.pop(message), shapes, strict=True):
            if work is not None:
                work.wait()
            found.append(array_over(buffer, tuple(one.shape), f"the {message}"))
        return found

    def settle(self) -> None:
        """Wait until everything is sent."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def forget(self) -> None:
        """Forget what a step that failed has left."""
        self._begun.clear()
        self._sending.clear()
