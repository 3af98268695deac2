"""The calls of a pipeline's engine where each rank has all stages: in plain runs, and without the cut into stages."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.engine.runtime import EngineBuilder
from polyaccel.torch.data import call_with, loss_of
from polyaccel.torch.engine.pipeline_engine import PipelineEngine
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.pipeline.batches import StageBatches
from polyaccel.torch.pipeline.microbatch import mean_of
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.verify.plain_engine import OptimizerLike, PlainEngine
from polyaccel.verify.variant import ActiveRun


class AllStages(PipelineEngine):
    """Batches of a pipeline on ranks that have all stages of it each."""

    def stand_at(self, runtime: EngineBuilder) -> None:
        """Let the script see the stages of `runtime`, which ranks with data are chosen by. Collective."""
        self._stages = runtime.mesh.size_of(("pipe",))
        self._stage = runtime.mesh.coordinates(runtime.communicator.rank).get("pipe", 0)
        self._placement = tuple(range(self._stages))
        self._line = runtime.process_group_for(("pipe",)) if self._stages > 1 else runtime.communicator
        model = self._own_module
        self._loss_fn = getattr(model, "loss_fn", None)
        is_whole = not isinstance(model, PipelineModule) and self._loss_fn is None
        self._batches = StageBatches((True, True), self.device, is_whole=is_whole)
        self._more_losses = None
        self.task_times = []

    def reset_activation_shape(self) -> None:
        """Do nothing."""

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """Run one optimizer step, with all its micro-batches. Collective."""
        self.train()
        losses = []
        for inputs, labels in self._taken(data_iter, self.gradient_accumulation_steps()):
            loss = self._loss_here(inputs, labels)[0]
            self.backward(loss)
            losses.append(loss.detach())
            self.step()
        return torch.stack(losses).mean()

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Any = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Compute the loss of micro-batches without gradients, and restore the training mode."""
        was_training = self.training
        self.eval()
        try:
            count = self.gradient_accumulation_steps() if num_micro_batches is None else num_micro_batches
            pairs = [self._loss_here(*one, wants_loss=compute_loss) for one in self._taken(data_iter, count)]
        finally:
            self.train(was_training)
        outputs = [getattr(one, "logits", one) for _, one in pairs] if self.is_last_stage() else None
        if compute_loss:
            losses = [loss for loss, _ in pairs]
            has_loss = bcast_loss or self.is_last_stage()
            found: Any = (torch.stack(losses).mean() if reduce_output else losses) if has_loss else None
        else:
            found = mean_of(outputs) if reduce_output and outputs is not None else outputs
        return (found, outputs) if return_logits else found

    def _loss_here(self, inputs: Any, labels: Any, *, wants_loss: bool = True) -> tuple[Any, Any]:
        """The loss of a micro-batch and the outputs."""
        is_module = isinstance(self._own_module, PipelineModule)
        outputs = self(inputs) if is_module else call_with(self, inputs)
        if not wants_loss:
            return None, outputs
        if self._loss_fn is not None:
            return self._loss_fn(outputs, labels), outputs
        return loss_of(outputs), outputs

    def _taken(self, data_iter: Any, count: int) -> Iterator[tuple[Any, Any]]:
        """The next micro-batches: inputs of the first stage and labels of the last, as their ranks have them."""
        source = self._source(data_iter)
        for _ in range(count):
            has_data = source is not None or self._batches.batch_fn is not None
            inputs, labels = self._batches.take(source, 1)[0] if has_data else (None, None)
            if self._stages > 1:
                has_all = all(self._line.all_gather_object(has_data))
                if not has_all or isinstance(self._own_module, PipelineModule):
                    inputs, labels = self._sent(inputs, 0), self._sent(labels, self._stages - 1)
            yield inputs, labels

    def _source(self, data_iter: Any) -> Iterator[Any] | None:
        given = self._batches.iterator if data_iter is None else data_iter
        return None if given is None and self.training_dataloader is None else self._data(given)

    def _sent(self, value: Any, stage: int) -> Any:
        """The value that the rank of `stage` has."""
        data = b""
        if self._stage == stage:
            file = io.BytesIO()
            torch.save(value, file)
            data = file.getvalue()
        data = self._line.broadcast_object(data, stage)
        return torch.load(io.BytesIO(data), map_location=self.device, weights_only=True)


class UnstagedEngine(AllStages):
    """An engine of a model over stages in a run without them: all its other rewrites act."""

    def compose_pipeline(self, schedule: str, chunks: int) -> None:
        """Do nothing: `stand_at` does what is left of it."""

    def _check_accumulation(self, steps: int) -> None:
        TorchEngine._check_accumulation(self, steps)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the module."""
        return TorchEngine.forward(self, *inputs, **named)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute and reduce the gradients of a loss."""
        return TorchEngine.backward(self, loss, retain_graph, scale_wrt_gas)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the module's state dict."""
        return TorchEngine.module_state_dict(self, exclude_frozen_parameters)

    def load_module_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Load a state dict of the module."""
        TorchEngine.load_module_state_dict(self, state_dict, strict)

    def destroy(self) -> None:
        """Remove the hooks and release buffers."""
        TorchEngine.destroy(self)


class PlainPipelineEngine(PlainEngine, AllStages):
    """The engine of a plain run of a pipeline."""

    train_batch = AllStages.train_batch
    eval_batch = AllStages.eval_batch

    def __init__(
        self,
        run: ActiveRun,
        model: nn.Module,
        runtime: EngineBuilder,
        client: OptimizerLike | None,
        model_parameters: Iterable[Any] | None,
    ) -> None:
        PlainEngine.__init__(self, run, model, runtime, client, model_parameters)
        self.stand_at(runtime)
