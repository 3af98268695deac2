"""How long each layer of a model takes: a trial step of layers one after the other, on one rank for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.comm.base import Communicator
from polyaccel.pipeline.table import PipelineError

Maker = Callable[[], tuple[nn.Module | None, Callable[..., Any]]]
_RUNS = 4
"""Of each layer. The first does not count: it allocates."""


def measured_weights(makers: Sequence[Maker], inputs: Any, ranks: Communicator, names: Sequence[str]) -> list[float]:
    """The seconds of each layer's forward and backward pass, as rank 0 of `ranks` measures them on its device.
    Collective: all ranks get the same figures. `makers` give each layer's module (None: it has none) and what is
    called, `inputs` are what the first one gets, and each other one gets what the one before gives. Generators of
    random numbers are as before.

    Raises PipelineError on every rank where a layer fails, with its name.
    """
    told: tuple[list[float], str] = ([], "")
    if ranks.rank == 0:
        told = _measured(makers, inputs, ranks.accelerator, names)
    seconds, problem = ranks.all_gather_object(told)[0]
    if problem:
        raise PipelineError(problem, cure="let trial_inputs be what the first layer gets from a micro-batch")
    return list(seconds)


def _measured(
    makers: Sequence[Maker], inputs: Any, accelerator: Accelerator, names: Sequence[str]
) -> tuple[list[float], str]:
    device, seconds = torch_device_of(accelerator), []
    with torch.random.fork_rng(), torch.enable_grad():
        for index, make in enumerate(makers):
            try:
                module, layer = make()
                if module is not None:
                    module.to(device)
                inputs = _leaves(inputs, device)
                taken = []
                for _ in range(_RUNS):
                    accelerator.synchronize()
                    began = perf_counter()
                    outputs = layer(*inputs) if isinstance(inputs, tuple) else layer(inputs)
                    roots = [one for one in _tensors(outputs) if one.requires_grad]
                    if roots:
                        torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])
                    accelerator.synchronize()
                    taken.append(perf_counter() - began)
            except Exception as error:
                return [], f"the trial of layer {index} ({names[index]}) fails: {type(error).__name__}: {error}"
            seconds.append(median(taken[1:]))
            inputs = outputs
    return seconds, ""


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(one, Tensor)]


def _leaves(value: Any, device: torch.device) -> Any:
    """`value` on `device` as a stage would get it."""
    if isinstance(value, (tuple, list)):
        return tuple(_leaves(one, device) for one in value)
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.is_floating_point())
