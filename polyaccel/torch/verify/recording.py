"""What a run records of a torch module: whole gradients, updates, norms, buffers, attributes and generators."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyaccel.verify.compare import MAGNITUDE
from polyaccel.verify.variant import ActiveRun

_LEAST_LR = 1e-3
"""Learning rates below it, such as those of a warm-up, are raised: an update of zero would show no error."""
Whole = Callable[[str, nn.Parameter], Tensor | None]
"""Full name and parameter to a whole tensor. Collective."""


class StepRecording:
    """The steps of one engine, the `index`-th of its rank.

    `gradient_of` and `value_of` are called for all trained parameters in the order of `module.named_parameters`.
    Buffers that another stage of a pipeline changes are not recorded.
    """

    def __init__(
        self,
        run: ActiveRun,
        rank: int,
        module: nn.Module,
        *,
        gradient_of: Whole,
        value_of: Whole,
        groups: Callable[[], Sequence[dict[str, Any]]],
        records_draws: bool,
        buffers_elsewhere: Container[str] = (),
    ) -> None:
        self._run, self._rank, self._module = run, rank, module
        self._gradient_of, self._value_of = gradient_of, value_of
        self._record = run.record_of(rank)
        index = self._record.engines
        self._record.engines += 1
        self._record.unfinished += 1
        self._prefix = f"{index}:" if index else ""
        self._groups = groups
        self._buffers_elsewhere = buffers_elsewhere
        self._records_draws = records_draws and threading.current_thread() is threading.main_thread()
        self._step = 0
        self._attributes = dict(attributes_of(module))
        self._before: dict[str, Tensor] = {}

    @property
    def record(self) -> Mapping[str, Any]:
        """What was recorded so far."""
        return self._record.values

    def before_update(self) -> None:
        """Record whole gradients, and keep the parameters that the update changes. Collective."""
        if self._step >= self._run.variant.steps:
            return
        for group in self._groups():
            if group.get("lr") is not None and float(group["lr"]) < _LEAST_LR:
                group["lr"] = _LEAST_LR
        for name, parameter in self._trained():
            gradient, value = self._gradient_of(name, parameter), self._value_of(name, parameter)
            if value is None:
                continue
            gradient = torch.zeros_like(value) if gradient is None else gradient
            self._add("gradient", name, gradient)
            self._before[name] = value.detach().clone()

    def after_update(self, norm: float | None) -> None:
        """Record the norm, updates, buffers, attributes and the state of generators. Collective."""
        if self._step >= self._run.variant.steps:
            return
        if norm is not None:
            self._add("norm", "", torch.tensor(norm, dtype=torch.float64))
        for name, parameter in self._trained():
            if (value := self._value_of(name, parameter)) is not None and name in self._before:
                self._add("update", name, value.detach() - self._before.pop(name))
                self._add(MAGNITUDE, name, value.detach().abs().amax() if value.numel() else torch.zeros(()))
        for name, buffer in self._module.named_buffers():
            if buffer.layout is torch.strided and not buffer.is_meta and name not in self._buffers_elsewhere:
                self._add("buffer", name, buffer)
        for name, number in attributes_of(self._module):
            if self._attributes.get(name) != number:
                self._add("attribute", name, torch.tensor(number, dtype=torch.float64))
        if self._records_draws:
            for name, digest in _generators():
                self._record.add(self._step, "random", name, np.frombuffer(digest, np.uint8))

    def end_step(self, loss: float | None) -> None:
        """Record the loss. Raises VerificationEnd when this was the last step of the last engine."""
        if self._step >= self._run.variant.steps:
            return
        if loss is not None:
            self._add("loss", "", torch.tensor(loss, dtype=torch.float64))
        self._step += 1
        if self._step == self._run.variant.steps:
            self._record.unfinished -= 1
            if self._record.unfinished == 0:
                self._run.end(self._rank)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, one) for name, one in self._module.named_parameters() if one.requires_grad)

    def _add(self, kind: str, name: str, value: Tensor) -> None:
        value = value.detach().to("cpu", copy=True)
        if value.is_complex():
            value = torch.view_as_real(value)
        if value.dtype in (torch.bfloat16, torch.float16):
            value = value.float()
        self._record.add(self._step, kind, f"{self._prefix}{name}", _in_bins(value, self._run.variant.bins).numpy())


def _in_bins(value: Tensor, bins: int) -> Tensor:
    """`value`, or the sums of its elements by their place modulo `bins`, a prime: a change of any element changes one,
    and an exchange of rows, columns or blocks changes many."""
    if not bins or value.numel() <= bins or not value.is_floating_point():
        return value
    flat = value.reshape(-1)
    rows = flat.numel() // bins
    sums = flat[: rows * bins].view(rows, bins).sum(0)
    rest = flat[rows * bins :]
    sums[: rest.numel()] += rest
    return sums


def attributes_of(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Numbers that the user's modules keep as plain attributes."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_") and isinstance(value, (int, float)) and name != "training":
                yield (f"{prefix}.{name}" if prefix else name), float(value)


def _generators() -> Iterator[tuple[str, bytes]]:
    for name, state in (
        ("torch", torch.get_rng_state().numpy().tobytes()),
        ("python", repr(random.getstate()).encode()),
        ("numpy", repr(np.random.get_state()).encode()),
    ):
        yield name, hashlib.sha256(state).digest()
