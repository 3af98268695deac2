"""The executor of a pipeline stage: it runs the program of a schedule on micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from polyaccel.errors import CommError
from polyaccel.pipeline.messages import StageMessage, StageReceive, StageSend
from polyaccel.pipeline.program import TaskTime, with_stages
from polyaccel.pipeline.table import PipelineError, PipelineOp, PipelineTask
from polyaccel.torch.data import call_with
from polyaccel.torch.pipeline.exchange import StageExchange, gradients_of
from polyaccel.torch.pipeline.microbatch import NOTHING, MicroBatchState, Results
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.pipeline.programs import StageProgram
from polyaccel.torch.pipeline.stage_module import StageModule
from polyaccel.torch.pipeline.ties import TiedWeights
from polyaccel.torch.pipeline.values import (
    StageValue,
    UnsendableValue,
    aliases_of,
    count_changes,
    leaves_of,
    take_apart,
    unflatten,
)
from polyaccel.torch.sharding.backward import BackwardRunner
from polyaccel.torch.weight_grad import SplitBackwardLinears

_FORWARD = PipelineOp.FORWARD
_INPUT, _WEIGHT = PipelineOp.BACKWARD_INPUT, PipelineOp.BACKWARD_WEIGHT


class ChunkRunner(Protocol):
    """An engine as the executor calls it."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the whole model."""

    def run_chunk(self, value: Any, chunk: int) -> Any:
        """Run the layers of a chunk."""

    def backward(self, loss: Tensor) -> Tensor:
        """Compute the gradients of a loss."""


class StageExecutor:
    """Forward and backward passes of a stage, and the messages between them, in the order of a program.

    `names_by_chunk`: parameters that each chunk may give gradients to; None for a single chunk. `tied_names`: those
    that this stage owns and others use too. `task_times` receives the times of the tasks of the last batch.
    """

    def __init__(
        self,
        module: PipelineModule | StageModule,
        exchange: StageExchange,
        ties: TiedWeights,
        passes: BackwardRunner,
        delayed: SplitBackwardLinears,
        *,
        names_by_chunk: dict[int, set[str]] | None,
        tied_names: set[str],
        task_times: list[TaskTime],
    ) -> None:
        self._module = module
        self._cut = module if isinstance(module, StageModule) else None
        self._stage, self._placement, self._loss_fn = module.stage, module.placement, module.loss_fn
        self._exchange, self._ties = exchange, ties
        self._passes, self._delayed = passes, delayed
        self._names_by_chunk, self._tied_names = names_by_chunk, tied_names
        self._task_times = task_times
        self._states: dict[tuple[int, int], MicroBatchState] = defaultdict(MicroBatchState)
        """Micro-batches that are under way, by their number and the chunk."""

    def forget_shapes(self) -> None:
        """Describe activations to the next stage again."""
        self._exchange.forget()

    def execute(
        self, engine: ChunkRunner, program: StageProgram, batches: Sequence[tuple[Any, Any]], results: Results
    ) -> None:
        """Do the steps of a program on `batches`: pairs of inputs and labels. Collective."""
        trains = torch.is_grad_enabled()
        ties_come_last = self._ties.is_owner and program.ends_with_message
        left = program.backward_passes + ties_come_last
        self._ties.refresh()
        self._states.clear()
        self._task_times.clear()
        at = "the first step"
        try:
            for step, at, begins in program.steps:
                if isinstance(step, (StageSend, StageReceive)):
                    self._move(step, at)
                    continue
                if begins is not None:
                    self._begin(*begins)
                began_s = perf_counter()
                if step.op is _FORWARD:
                    self._do_forward(engine, step, *batches[step.micro_batch], results)
                else:
                    left -= step.op is not _INPUT
                    self._do_backward(engine, step, is_last=not left)
                self._task_times.append(TaskTime(step, began_s, perf_counter()))
            if trains:
                self._ties.return_gradients()  # behind the last message of activations
                if ties_come_last:
                    self._passes.is_last, self._passes.params_expected = True, self._tied_names
                    self._run_from(self._ties.take_gradients())
            self._exchange.settle()
            self._ties.settle()
        except CommError as error:
            raise with_stages(error, at, self._stage, self._exchange.line.ranks) from error
        finally:
            self._passes.is_last = self._passes.params_expected = None
            self._states.clear()

    def _begin(self, message: StageMessage, label: str) -> None:
        """Begin a receive."""
        if message.op is _FORWARD:
            self._exchange.begin_outputs(message, label, trains=torch.is_grad_enabled())
        else:
            outputs = self._states[message.micro_batch, message.chunk - 1].outputs
            self._exchange.begin_gradients(message, outputs.tensors, label)

    def _move(self, step: StageSend | StageReceive, label: str) -> None:
        message, trains = step.message, torch.is_grad_enabled()
        forward = message.op is _FORWARD
        if isinstance(step, StageSend):
            here = self._states[message.micro_batch, message.chunk]
            if forward:
                self._exchange.send_outputs(message, here.outputs, label, trains=trains)
            else:
                self._exchange.send_gradients(message, gradients_of(here.inputs.tensors), label)
                here.inputs = NOTHING
        elif forward:
            here = self._states[message.micro_batch, message.chunk + 1]
            here.inputs = self._exchange.receive_outputs(message, label, trains=trains)
        else:
            here = self._states[message.micro_batch, message.chunk - 1]
            here.gradients = self._exchange.receive_gradients(message, here.outputs.tensors, label)

    def _is_here(self, chunk: int) -> bool:
        return 0 <= chunk < len(self._placement) and self._placement[chunk] == self._stage

    def _do_forward(self, engine: ChunkRunner, task: PipelineTask, inputs: Any, labels: Any, results: Results) -> None:
        _, micro_batch, chunk = task
        here, trains = self._states[micro_batch, chunk], torch.is_grad_enabled()
        before = self._states[micro_batch, chunk - 1] if chunk and self._is_here(chunk - 1) else None
        if before is not None:
            here.inputs = leaves_of(before.outputs, needs_grad=trains)
        received = aliases_of(here.inputs)
        outputs = self._outputs_of(engine, chunk, inputs, received)
        if before is not None:
            count_changes(received, before.outputs)
        if chunk + 1 < len(self._placement):
            here.outputs = self._taken_apart(chunk, outputs)
        else:
            if results.wants_losses:
                here.loss = results.add_loss(self._loss_of(outputs, labels))
                module = self._module
                if isinstance(module, PipelineModule) and (more := module.get_additional_losses()) is not None:
                    results.more.append(more)
            if results.wants_outputs:
                results.outputs.append(outputs if self._cut is None else getattr(outputs, "logits", outputs))
        if not trains:
            self._states.pop((micro_batch, chunk - 1), None)  # what it made was sent, or used
            here.inputs = NOTHING

    def _outputs_of(self, engine: ChunkRunner, chunk: int, inputs: Any, received: StageValue) -> Any:
        """Run a chunk on `received` values; the first, or all of a block model, gets `inputs`."""
        try:
            before = unflatten(received) if chunk else None
        except UnsendableValue as error:
            raise self._refused(chunk - 1, error) from error
        if self._cut is not None:
            return self._cut.run(lambda: call_with(engine, inputs), chunk, before or ())
        return engine.run_chunk(before if chunk else inputs, chunk)

    def _taken_apart(self, chunk: int, outputs: Any) -> StageValue:
        """What a chunk gave, as it is sent. Raises PipelineError, with the layer, where it cannot be."""
        try:
            return take_apart(outputs, self._exchange.device)
        except UnsendableValue as error:
            raise self._refused(chunk, error) from error

    def _refused(self, chunk: int, error: UnsendableValue) -> PipelineError:
        """What to raise where the output of a chunk cannot pass to the next stage."""
        place = self._module.last_layer_of(chunk)
        return PipelineError(
            f"{place} gives {error.message}, which cannot pass to the next stage",
            hint=error.hint or "give tensors and plain values, in tuples, lists, dicts and dataclasses of a module",
            value=place,
        )

    def _loss_of(self, outputs: Any, labels: Any) -> Any:
        return outputs if self._loss_fn is None else self._loss_fn(outputs, labels)

    def _do_backward(self, engine: ChunkRunner, task: PipelineTask, *, is_last: bool) -> None:
        """`is_last`: of the step. The update counts that one."""
        here = self._states[task.micro_batch, task.chunk]
        self._passes.is_last = is_last
        if self._names_by_chunk is not None:
            self._passes.params_expected = self._names_by_chunk[task.chunk] | (self._tied_names if is_last else set())
        if task.op is _INPUT:
            with self._passes.defer_weight_grads(here.left), self._delayed.defer_weight_grads(here.products):
                self._run_backward(engine, task, here, [])
            return
        ties = self._ties.take_gradients() if is_last else []
        if task.op is _WEIGHT:
            left, here.left = here.left, []
            products, here.products = here.products, []
            self._passes.run_products(products, [*left, *ties])
        else:
            self._run_backward(engine, task, here, ties)

    def _run_backward(
        self, engine: ChunkRunner, task: PipelineTask, here: MicroBatchState, ties: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Run a chunk's backward pass, from the loss or outgoing gradients, and those of `ties`."""
        _, micro_batch, chunk = task
        if chunk + 1 == len(self._placement):
            assert here.loss is not None  # the forward pass was before
            loss, here.loss = here.loss, None
            engine.backward(loss)
            return
        if self._is_here(chunk + 1):
            behind = self._states[micro_batch, chunk + 1]
            here.gradients, behind.inputs = gradients_of(behind.inputs.tensors), NOTHING
        roots = [output for output in here.outputs.tensors if output.requires_grad]
        pairs = list(zip(roots, here.gradients, strict=True))
        here.outputs, here.gradients = NOTHING, []
        self._run_from([*pairs, *ties])

    def _run_from(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """A backward pass from tensors with their gradients."""
        if pairs:
            self._passes.run_from(*zip(*pairs, strict=True))
