"""What a run records of a torch module: whole gradients, updates, optimizer states, norms, gradients of inputs,
buffers, attributes and generators."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyaccel.torch.verify.forward_pass import ForwardOrder, InputGradients
from polyaccel.verify.compare import MAGNITUDE, OF_SHAPES
from polyaccel.verify.variant import ActiveRun

_LEAST_LR = 1e-3
"""Learning rates below it, such as those of a warm-up, are raised: an update of zero would show no error."""
_MOST_KEPT = 1 << 20
Whole = Callable[[str, nn.Parameter], Tensor | None]
"""Full name and parameter to a whole tensor. Collective."""
States = Mapping[str, Mapping[str, Tensor | float]]
"""Optimizer states by name, by the full name of their parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantities:
    """Where the quantities of an engine are read.

    `gradient_of` and `value_of` are called for all trained parameters in the order of `module.named_parameters`. They
    may return what the engine keeps writing to: it is read before its next call.
    Buffers that another stage of a pipeline changes are not recorded.
    """

    gradient_of: Whole
    value_of: Whole
    states: Callable[[], States]
    """Whole optimizer states. Collective."""
    groups: Callable[[], Sequence[dict[str, Any]]]
    shares_samples: bool
    """Whether several ranks compute parts of one sample: what they draw and keep differs by design."""
    splits_inputs: bool = False
    """Whether a rank has parts of its inputs' gradients, or gets inputs of other stages."""
    attributes: Mapping[str, float] | None = None
    """Numbers among attributes before the first rewrite; None where other stages' modules do not change theirs."""
    foreign_buffers: frozenset[str] = frozenset()
    """Buffers that another stage updates."""


class StepRecording:
    """The steps of one engine, the `index`-th of its rank. `engine` is what the script calls for a forward pass."""

    def __init__(self, run: ActiveRun, rank: int, engine: nn.Module, module: nn.Module, read: Quantities) -> None:
        self._run, self._rank, self._module, self._read = run, rank, module, read
        self._record = run.record_of(rank)
        index = self._record.engines
        self._record.engines += 1
        self._record.unfinished += 1
        self._index, self._prefix = index, f"{index}:" if index else ""
        self._step = 0
        self._attributes = dict(attributes_of(module))
        self._before: dict[str, Tensor] = {}
        self._inputs = None if read.splits_inputs else InputGradients(engine, module)
        self._order = ForwardOrder(module) if run.variant.is_plain else None

    @property
    def record(self) -> Mapping[str, Any]:
        """What was recorded so far."""
        return self._record.values

    def before_update(self) -> None:
        """Record whole gradients, and keep the parameters that the update changes. Collective."""
        if self._step >= self._run.variant.steps:
            return
        self._record.events.append(f"{self._index}/{self._step}")
        for group in self._read.groups():
            if group.get("lr") is not None and float(group["lr"]) < _LEAST_LR:
                group["lr"] = _LEAST_LR
        for name, parameter in self._trained():
            gradient, value = self._read.gradient_of(name, parameter), self._read.value_of(name, parameter)
            if value is None:
                continue
            gradient = torch.zeros_like(value) if gradient is None else gradient
            self._add("gradient", name, gradient)
            self._before[name] = value.detach().clone()
        if self._inputs is not None:
            for name, gradient in self._inputs.take():
                self._add("input", name, gradient)
        if self._order is not None:
            self._record.order += [f"{self._prefix}{name}" for name in self._order.take()]
            self._order = None

    def after_update(self, norm: float | None) -> None:
        """Record the norm, updates, states, buffers, attributes and the states of generators. Collective."""
        if self._step >= self._run.variant.steps:
            return
        if norm is not None:
            self._add("norm", "", torch.tensor(norm, dtype=torch.float64))
        for name, parameter in self._trained():
            if (value := self._read.value_of(name, parameter)) is not None and name in self._before:
                value = value.detach()
                before = self._before.pop(name)
                self._add("update", name, torch.sub(value, before, out=before))
                self._add(MAGNITUDE, name, _largest(value))
        for name, states in self._read.states().items():
            for key, state in states.items():
                value = state if isinstance(state, Tensor) else torch.tensor(state, dtype=torch.float64)
                self._add("state", f"{name} {key}", value)
        self._record_module()

    def _record_module(self) -> None:
        """Record what the modules keep apart from parameters."""
        for name, buffer in self._module.named_buffers():
            if buffer.layout is torch.strided and not buffer.is_meta and name not in self._read.foreign_buffers:
                self._add("buffer", name, buffer)
        untouched = self._read.attributes or {}
        for name, number in attributes_of(self._module):
            before = self._attributes.get(name)
            if before != number or (before is not None and untouched.get(name) == before):
                self._add("attribute", name, torch.tensor(number, dtype=torch.float64))
        if self._read.shares_samples:
            return
        for name, value in _kept(self._module):
            if isinstance(value, torch.Generator):
                self._digest(name, value.get_state().numpy().tobytes())
            else:
                self._add("kept", name, value)
        if threading.current_thread() is threading.main_thread():  # ranks that are threads share them
            for name, state in _generators():
                self._digest(name, state)

    def _digest(self, name: str, state: bytes) -> None:
        digest = np.frombuffer(hashlib.sha256(state).digest(), np.uint8)
        self._record.add(self._step, "random", f"{self._prefix}{name}", digest)

    def end_step(self, loss: float | None) -> None:
        """Record the loss. Raises VerificationEnd when this was the last step of the last engine."""
        if self._step >= self._run.variant.steps:
            return
        if loss is not None:
            self._add("loss", "", torch.tensor(loss, dtype=torch.float64))
        self._step += 1
        if self._step == self._run.variant.steps:
            if self._inputs is not None:
                self._inputs.close()
            self._run.end_engine(self._rank)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, one) for name, one in self._module.named_parameters() if one.requires_grad)

    def _add(self, kind: str, name: str, value: Tensor) -> None:
        value = value.detach()
        if value.is_complex():
            value = torch.view_as_real(value)
        if value.dtype in (torch.bfloat16, torch.float16):
            value = value.float()
        binned = _in_bins(value, self._run.variant.bins).cpu()
        if kind in OF_SHAPES and binned.numel() < value.numel():
            name = f"{name} of {value.numel()} elements"
        self._record.add(self._step, kind, f"{self._prefix}{name}", binned.numpy())


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


def _largest(value: Tensor) -> Tensor:
    """The largest absolute value, in one pass over real numbers and without a copy."""
    if value.numel() == 0:
        return torch.zeros(())
    return value.abs().amax() if value.is_complex() else torch.stack(torch.aminmax(value)).abs().amax()


def attributes_of(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Numbers that the user's modules keep as plain attributes."""
    for prefix, part in module.named_modules():
        for name, value in numbers_of(part):
            yield (f"{prefix}.{name}" if prefix else name), value


def numbers_of(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Numbers among the attributes of `module` itself."""
    for name, value in vars(module).items():
        if not name.startswith("_") and isinstance(value, (int, float)) and name != "training":
            yield name, float(value)


def _kept(module: nn.Module) -> Iterator[tuple[str, Tensor | torch.Generator]]:
    """Tensors and generators that modules keep as plain attributes."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            full = f"{prefix}.{name}" if prefix else name
            if isinstance(value, torch.Generator) or (
                isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and _is_readable(value)
            ):
                yield full, value


def _is_readable(value: Tensor) -> bool:
    """Whether a tensor has values of its own here; views of sharded parameters have none between steps."""
    if value.layout is not torch.strided or value.is_meta or value.is_quantized or not 0 < value.numel() <= _MOST_KEPT:
        return False
    return value.untyped_storage().nbytes() > 0 and not value.is_complex()


def _generators() -> Iterator[tuple[str, bytes]]:
    yield "torch", torch.get_rng_state().numpy().tobytes()
    yield "python", repr(random.getstate()).encode()
    yield "numpy", repr(np.random.get_state()).encode()
    if (device := torch.accelerator.current_accelerator()) is not None and torch.accelerator.is_available():
        yield device.type, torch.get_device_module(device).get_rng_state().numpy().tobytes()
