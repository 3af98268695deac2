"""How long each layer of a model takes: a trial step of layers one after the other, on one rank for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.comm.base import Communicator
from polyaccel.pipeline.table import PipelineError
from polyaccel.torch.data import to_device
from polyaccel.torch.pipeline.chunk import call_layer
from polyaccel.torch.pipeline.values import aliases_of, leaves_of, take_apart, tensors_in, unflatten

Maker = Callable[[], tuple[nn.Module | None, Callable[..., Any]]]
_RUNS = 4
"""Of each layer. The first does not count: it allocates."""


def measured_weights(
    makers: Sequence[Maker], inputs: Any, ranks: Communicator, names: Sequence[str], *, spreads: bool = True
) -> list[float]:
    """The seconds of each layer's forward and backward pass, as rank 0 of `ranks` measures them on its device.
    Collective: all ranks get the same figures. `makers` give each layer's module (None: it has none) and what is
    called, `inputs` are what the first one gets, and each other one gets what the one before gives, a tuple as its
    arguments if it `spreads`. Generators of random numbers are as before.

    Raises PipelineError on every rank where a layer fails, with its name.
    """
    measured: tuple[list[float], str] = ([], "")
    if ranks.rank == 0:
        measured = _measured(makers, inputs, ranks.accelerator, names, spreads=spreads)
    seconds, problem = ranks.all_gather_object(measured)[0]
    if problem:
        raise PipelineError(problem, hint="let trial_inputs be what the first layer gets from a micro-batch")
    return list(seconds)


def _measured(
    makers: Sequence[Maker], inputs: Any, accelerator: Accelerator, names: Sequence[str], *, spreads: bool
) -> tuple[list[float], str]:
    device, seconds = torch_device_of(accelerator), []
    with torch.random.fork_rng(), torch.enable_grad():
        for index, make in enumerate(makers):
            try:
                module, layer = make()
                if module is not None:
                    module.to(device)
                received = leaves_of(take_apart(to_device(inputs, device), device), needs_grad=True)
                taken = []
                for _ in range(_RUNS):
                    accelerator.synchronize()
                    began = perf_counter()
                    outputs = call_layer(layer, unflatten(aliases_of(received)), spreads=spreads)
                    roots = [one for one in tensors_in(outputs) if one.requires_grad]
                    if roots:
                        torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])
                    accelerator.synchronize()
                    taken.append(perf_counter() - began)
            except Exception as error:
                return [], f"the trial of layer {index} ({names[index]}) fails: {type(error).__name__}: {error}"
            seconds.append(median(taken[1:]))
            inputs = outputs
    return seconds, ""
