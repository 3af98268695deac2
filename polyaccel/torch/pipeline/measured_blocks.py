"""Block times of a model that was not written for a pipeline: a trial step of the whole model on every rank.

Every rank runs it, because ranks that share layers exchange in them; the figures of rank 0 are everybody's. What comes
before the blocks counts to the first of them, what comes after them to the last, as in every other partition.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.comm.base import Communicator
from polyaccel.pipeline.table import PipelineError
from polyaccel.torch.data import call_with, to_device
from polyaccel.torch.pipeline.blocks import BlockList
from polyaccel.torch.pipeline.trace import as_called, evaluating, other_parameters, tensors_in

_RUNS = 4
"""Of the whole model. The first does not count: it allocates."""


def measured_blocks(model: nn.Module, blocks: BlockList, ranks: Communicator) -> list[float]:
    """The seconds of each block's forward and backward pass on a micro-batch that `model.trial_inputs` has, in eval
    mode. Collective. The model is as before; while it is tried all of it is on the device, with the activations of one
    micro-batch.

    Raises PipelineError where the model lacks the inputs, and on every rank where the trial fails on any.
    """
    kind = type(model).__name__
    inputs = getattr(model, "trial_inputs", None)
    if inputs is None:
        raise PipelineError(
            f"partition 'measured' needs a trial step of {kind}, and it has no trial_inputs",
            hint='set them: model.trial_inputs = {"input_ids": ..., "labels": ...}, or the like, is a micro-batch as '
            "those of the training",
            value="profiled",
        )
    found: tuple[list[float], str] = ([], "")
    try:
        found = (_Trial(model, blocks, ranks.accelerator).seconds(inputs), "")
    except Exception as error:
        found = ([], f"{type(error).__name__}: {error}")
    gathered = ranks.all_gather_object(found)
    for rank, (_, problem) in enumerate(gathered):
        if problem:
            raise PipelineError(
                f"the trial step of {kind} fails on rank {rank}: {problem}",
                hint="let model.trial_inputs be a micro-batch that the model takes",
                value=rank,
            )
    return list(gathered[0][0])


class _Trial:
    """Runs a model and takes the time of each of its parts, whose values are cut off from those before."""

    def __init__(self, model: nn.Module, blocks: BlockList, accelerator: Accelerator) -> None:
        self._model, self._blocks = model, blocks
        self._accelerator = accelerator
        self._device = torch_device_of(accelerator)
        self._began_s = 0.0
        self._taken: list[float] = []
        self._roots: list[list[Tensor]] = []

    def seconds(self, inputs: Any) -> list[float]:
        """Those of each block, the median of several runs."""
        given = to_device(as_called(self._model, inputs), self._device)
        handles = [block.register_forward_hook(self._cut, prepend=True) for block in self._blocks.modules]
        try:
            with other_parameters(self._model, self._device) as twins, evaluating(self._model), torch.enable_grad():
                for twin in self._model.parameters():
                    if twin.requires_grad_(twins[id(twin)].requires_grad).requires_grad:
                        twin.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
                runs = [self._run(given) for _ in range(_RUNS)]
        finally:
            for handle in handles:
                handle.remove()
        return [median(each) for each in zip(*runs[1:], strict=True)]

    def _run(self, given: Any) -> list[float]:
        self._taken, self._roots = [], []
        self._began_s = self._now()
        self._part_ends(call_with(self._model, given))
        for part in reversed(range(len(self._roots))):
            began_s, roots = self._now(), self._roots[part]
            if roots:
                # What comes before the blocks may stand behind several of them, and is needed again.
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots], retain_graph=True)
            self._taken[part] += self._now() - began_s
        self._roots.clear()
        *blocks, behind = self._taken
        return [*blocks[:-1], blocks[-1] + behind]

    def _part_ends(self, outputs: Any) -> None:
        self._taken.append(self._now() - self._began_s)
        self._roots.append([one for one in tensors_in(outputs) if one.requires_grad])

    def _cut(self, block: nn.Module, args: Any, output: Any) -> Any:
        self._part_ends(output)
        cut = tree_map_only(Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), output)
        self._began_s = self._now()
        return cut

    def _now(self) -> float:
        self._accelerator.synchronize()
        return perf_counter()


def _forget(parameter: Tensor) -> None:
    parameter.grad = None
