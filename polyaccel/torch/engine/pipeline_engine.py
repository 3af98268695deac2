"""The engine of a pipeline: it runs the program of its stage, and is an engine of the whole model in all else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from polyaccel.accelerators.memory.torch import torch_dtype, wrap_torch
from polyaccel.engine.rank_consistency import require_same_training
from polyaccel.errors import CommError, PolyaccelError
from polyaccel.ops.base import LINEAR_WEIGHT_GRAD
from polyaccel.pipeline.csv_schedule import write_table
from polyaccel.pipeline.messages import StageMessage, StageReceive, StageSend
from polyaccel.pipeline.program import TaskTime, spans_of, with_stages
from polyaccel.pipeline.render import estimated_picture
from polyaccel.pipeline.table import PipelineError, PipelineOp, PipelineTask
from polyaccel.torch.data import call_with
from polyaccel.torch.engine.pipeline_states import StagedStates
from polyaccel.torch.pipeline.batches import StageBatches
from polyaccel.torch.pipeline.exchange import StageExchange, gradients_of
from polyaccel.torch.pipeline.microbatch import NOTHING, MicroBatchState, Results, mean_of
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.pipeline.programs import StageProgram, StagePrograms, names_by_chunk
from polyaccel.torch.pipeline.stage_module import StageModule, cut_of
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
from polyaccel.torch.weight_grad import SplitBackwardLinears

_FORWARD = PipelineOp.FORWARD
_BACKWARD, _INPUT, _WEIGHT = PipelineOp.BACKWARD, PipelineOp.BACKWARD_INPUT, PipelineOp.BACKWARD_WEIGHT


class PipelineEngine(StagedStates):
    """Engine of a `PipelineModule`, or of a model cut by its blocks, with `train_batch` and `eval_batch`."""

    def compose_pipeline(self, schedule: str, chunks: int) -> None:
        """Find this rank's neighbours and instructions. Collective.

        Args:
            schedule: Name of the pipeline schedule.
            chunks: Chunks of the model on each stage; 0 is as many as the schedule needs.

        Raises:
            PipelineError: The model was not cut for this schedule.
        """
        self._cut = cut_of(self._own_module)
        module = self._own_module if self._cut is None else self._cut
        assert isinstance(module, (PipelineModule, StageModule))  # what `initialize` makes
        if self._cut is not None:
            dtype = self.runtime.param_dtype
            self._cut.place(self.device, None if dtype is None else torch_dtype(dtype))
        self._stages, self._stage, self._loss_fn = module.num_stages, module.stage, module.loss_fn
        self._placement = module.placement
        self._passes.keeps_own_scale = self._stages > 1
        self._programs = StagePrograms(module, schedule, chunks)
        table = self._programs.table(self.gradient_accumulation_steps())
        self.monitor.add_picture("pipeline.svg", lambda: estimated_picture(table))
        parts = [
            f"chunk {chunk} on stage {stage} with layers {list(part)}"
            for chunk, (stage, part) in enumerate(zip(module.placement, module.parts, strict=True))
        ]
        told = f"the schedule {table.name}, whose table has the sum {crc32(write_table(table).encode()):08x}"
        require_same_training(self.communicator, [told, *parts])
        training = self._programs.training(table.micro_batches)
        self._line = line = self.runtime.process_group_for(("pipe",))
        self._exchange = StageExchange(line, self.accelerator, self.device)
        self._ties = TiedWeights(module, line, self.device)
        self._ties.agree_on_types()
        faster = set(self.accelerator.matrix_kernels("auto")) if training.splits and len(self.linears) else ()
        delays = self._own_module if training.splits else torch.nn.Identity()
        self._delayed = SplitBackwardLinears(delays, adds_in_place=LINEAR_WEIGHT_GRAD not in faster)
        self._names_of = names_by_chunk(self._own_module, self.adapter.names.values(), module)
        owned = self._ties.owned_parameters()
        self._tied_names = {name for parameter, name in self.adapter.names.items() if parameter in owned}
        self.task_times: list[TaskTime] = []
        """When this stage did the tasks of the last batch, in order."""
        if self._recorder.trace is not None:
            self._recorder.trace.add_source(lambda: spans_of(self.task_times))
        needs = (self.is_first_stage(), self.is_last_stage()) if self._cut is None else (True, True)
        is_whole = self._cut is not None and self._loss_fn is None
        self._batches = StageBatches(needs, self.device, is_whole=is_whole)
        self._in_batch = self._receives = False
        self._more_losses: dict[str, Tensor] | None = None
        self._passing: dict[tuple[int, int], MicroBatchState] = defaultdict(MicroBatchState)

    def _check_accumulation(self, steps: int) -> None:
        super()._check_accumulation(steps)
        self._programs.table(steps)

    @property
    def num_stages(self) -> int:
        """How many places the pipeline has."""
        return self._stages

    @property
    def stage_id(self) -> int:
        """This rank's place."""
        return self._stage

    def is_first_stage(self) -> bool:
        """Return whether this rank's stage has the first layers."""
        return self._placement[0] == self._stage

    def is_last_stage(self) -> bool:
        """Return whether this rank's stage has the last layers, and the loss."""
        return self._placement[-1] == self._stage

    def destroy(self) -> None:
        """As that of `TorchEngine`."""
        self._delayed.release()
        super().destroy()

    def set_dataiterator(self, iterator: Any) -> None:
        """Set the default source of micro-batches for `train_batch` and `eval_batch`.

        Args:
            iterator: Yields micro-batches.
        """
        self._batches.iterator = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Set the default source of micro-batches for `train_batch` and `eval_batch`, and start at its first one.

        Args:
            loader: Iterable of micro-batches.
        """
        self._batches.iterator = iter(loader)

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Set a function that makes micro-batches on the stages that need one.

        Args:
            fn: Receives one item of the data, or None on a rank without data, and returns a micro-batch.
        """
        self._batches.batch_fn = fn

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """Return the last batch's means of `PipelineModule.get_additional_losses`, on every stage; None without any."""
        return self._more_losses

    def reset_activation_shape(self) -> None:
        """Describe activations again. It is not needed: they are described wherever they change."""
        self._exchange.forget()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run this rank's layers.

        Args:
            *inputs: Inputs of the first layer.
            **named: Inputs of the first layer, by name.

        Returns:
            The output of the last layer.

        Raises:
            PolyaccelError: Called outside of a batch, and other ranks have more layers.
        """
        self._require_batch("engine(...)")
        return super().forward(*inputs, **named)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute and reduce the gradients of a loss, as `TorchEngine.backward`.

        Args:
            loss: Scalar to differentiate.
            retain_graph: Keep the graph for another backward pass.
            scale_wrt_gas: Divide by the gradient accumulation steps.

        Returns:
            The loss, divided as `scale_wrt_gas` says, without a graph.

        Raises:
            PolyaccelError: Called outside of a batch, and other ranks have more layers.
        """
        self._require_batch("engine.backward(...)")
        return super().backward(loss, retain_graph, scale_wrt_gas)

    def _require_batch(self, call: str) -> None:
        if self._stages > 1 and not self._in_batch:
            raise PolyaccelError(
                f"{call}: this rank has stage {self._stage} of {self._stages} alone",
                hint="call engine.train_batch(data_iter) or engine.eval_batch(data_iter) on every rank",
                value=self._stage,
            )

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """Run one optimizer step over its micro-batches.

        A micro-batch of a `PipelineModule` is a pair: inputs for the first stage, labels for the last. Other models
        take their own. Stages between the first and the last need no data.

        Args:
            data_iter: Yields micro-batches. None is the iterator of `set_dataiterator`, else the engine's own loader.

        Returns:
            Mean loss of this rank's micro-batches, on every stage.
        """
        self._require_optimizer()
        self.train()
        results = Results()
        self._do_steps(self._programs.training(self.gradient_accumulation_steps()), data_iter, results)
        loss = self._from_last_stage(results, self.gradient_accumulation_steps()).mean()
        self._losses[:] = [loss]
        self.step()
        return loss

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
        """Compute the loss of micro-batches without gradients. The training mode is restored.

        Args:
            data_iter: Yields micro-batches. None is the iterator of `set_dataiterator`, else the engine's own loader.
            return_logits: Also return the outputs.
            compute_loss: False returns the outputs of the last layers in place of the loss.
            reduce_output: "avg" for the mean loss, None for a list with the loss of each micro-batch.
            bcast_loss: False leaves the loss on the last stage.
            num_micro_batches: How many micro-batches to run; None is as many as a step has.

        Returns:
            The loss, on every stage. Outputs are on the last stage only, and the other stages have None. With
            `return_logits` a pair: the same, and a list of outputs by micro-batch.
        """
        if reduce_output not in (None, "avg"):
            raise PolyaccelError(f"reduce_output {reduce_output!r}", hint='use "avg" or None', value=reduce_output)
        count = self.gradient_accumulation_steps() if num_micro_batches is None else num_micro_batches
        was_training = self.training
        self.eval()
        results = Results(wants_losses=compute_loss, wants_outputs=return_logits or not compute_loss)
        try:
            self._do_steps(self._programs.evaluation(count), data_iter, results)
        finally:
            self.train(was_training)
        outputs = results.outputs if self.is_last_stage() else None
        found: Any = None
        if compute_loss:
            losses = self._from_last_stage(results, count) if bcast_loss else results.stacked()
            if losses is not None:
                found = losses.mean() if reduce_output else list(losses)
        else:
            found = mean_of(outputs) if reduce_output and outputs is not None else outputs
        return (found, outputs) if return_logits else found

    def _do_steps(self, program: StageProgram, data_iter: Any, results: Results) -> None:
        """Do the steps of a program with new micro-batches."""
        with self.timer("data"):
            batches = self._batches.take(self._source(data_iter), program.micro_batches)
        trains = torch.is_grad_enabled()
        ties_come_last = self._ties.is_owner and program.ends_with_message
        left = program.backward_passes + ties_come_last
        self._ties.refresh()
        self._passing.clear()
        self.task_times.clear()
        self._in_batch = True
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
                    self._do_forward(step, *batches[step.micro_batch], results)
                else:
                    left -= step.op is not _INPUT
                    self._do_backward(step, is_last=not left)
                self.task_times.append(TaskTime(step, began_s, perf_counter()))
            if trains:
                self._ties.return_gradients()  # behind the last message of activations
                if ties_come_last:
                    self._passes.is_last, self._passes.params_expected = True, self._tied_names
                    self._run_from(self._ties.take_gradients())
            self._exchange.settle()
            self._ties.settle()
        except CommError as error:
            raise with_stages(error, at, self._stage, self._line.ranks) from error
        finally:
            self._in_batch = False
            self._passes.is_last = self._passes.params_expected = None
            self._passing.clear()
        if trains:
            for _ in batches[1:]:
                self.counters.advance()

    def _source(self, data_iter: Any) -> Iterator[Any] | None:
        """Where micro-batches come from; None where the stage needs none or makes its own."""
        given = self._batches.iterator if data_iter is None else data_iter
        has_none = given is None and self.training_dataloader is None
        if has_none and (self._batches.batch_fn is not None or not self._batches.are_needed):
            return None
        return self._data(given)

    def _begin(self, message: StageMessage, label: str) -> None:
        """Begin a receive."""
        if message.op is _FORWARD:
            self._exchange.begin_outputs(message, label, trains=torch.is_grad_enabled())
        else:
            outputs = self._passing[message.micro_batch, message.chunk - 1].outputs
            self._exchange.begin_gradients(message, outputs.tensors, label)

    def _move(self, step: StageSend | StageReceive, label: str) -> None:
        message, trains = step.message, torch.is_grad_enabled()
        forward = message.op is _FORWARD
        if isinstance(step, StageSend):
            here = self._passing[message.micro_batch, message.chunk]
            if forward:
                self._exchange.send_outputs(message, here.outputs, label, trains=trains)
            else:
                self._exchange.send_gradients(message, gradients_of(here.inputs.tensors), label)
                here.inputs = NOTHING
        elif forward:
            here = self._passing[message.micro_batch, message.chunk + 1]
            here.inputs = self._exchange.receive_outputs(message, label, trains=trains)
        else:
            here = self._passing[message.micro_batch, message.chunk - 1]
            here.gradients = self._exchange.receive_gradients(message, here.outputs.tensors, label)

    def _is_here(self, chunk: int) -> bool:
        return 0 <= chunk < len(self._placement) and self._placement[chunk] == self._stage

    def _do_forward(self, task: PipelineTask, inputs: Any, labels: Any, results: Results) -> None:
        _, micro_batch, chunk = task
        here, trains = self._passing[micro_batch, chunk], torch.is_grad_enabled()
        before = self._passing[micro_batch, chunk - 1] if chunk and self._is_here(chunk - 1) else None
        if before is not None:
            here.inputs = leaves_of(before.outputs, needs_grad=trains)
        received = aliases_of(here.inputs)
        outputs = self._outputs_of(chunk, inputs, received)
        if before is not None:
            count_changes(received, before.outputs)
        if chunk + 1 < len(self._placement):
            here.outputs = self._taken_apart(chunk, outputs)
        else:
            if results.wants_losses:
                here.loss = results.add_loss(self._loss_of(outputs, labels))
                module = self._own_module
                if isinstance(module, PipelineModule) and (more := module.get_additional_losses()) is not None:
                    results.more.append(more)
            if results.wants_outputs:
                results.outputs.append(outputs if self._cut is None else getattr(outputs, "logits", outputs))
        if not trains:
            self._passing.pop((micro_batch, chunk - 1), None)  # what it made was sent, or used
            here.inputs = NOTHING

    def _outputs_of(self, chunk: int, inputs: Any, received: StageValue) -> Any:
        """Run a chunk on `received` values; the first, or all of a block model, gets `inputs`."""
        try:
            before = unflatten(received) if chunk else None
        except UnsendableValue as error:
            raise self._refused(chunk - 1, error) from error
        if self._cut is not None:
            return self._cut.run(lambda: call_with(self, inputs), chunk, before or ())
        self._receives = chunk > 0
        return self(before if chunk else inputs, chunk=chunk)

    def _taken_apart(self, chunk: int, outputs: Any) -> StageValue:
        """What a chunk gave, as it is sent. Raises PipelineError, with the layer, where it cannot be."""
        try:
            return take_apart(outputs, self.device)
        except UnsendableValue as error:
            raise self._refused(chunk, error) from error

    def _refused(self, chunk: int, error: UnsendableValue) -> PipelineError:
        """What to raise where the output of a chunk cannot pass to the next stage."""
        module = self._own_module if self._cut is None else self._cut
        assert isinstance(module, (PipelineModule, StageModule))  # see `compose_pipeline`
        place = module.last_layer_of(chunk)
        return PipelineError(
            f"{place} gives {error.message}, which cannot pass to the next stage",
            hint=error.hint or "give tensors and plain values, in tuples, lists, dicts and dataclasses of a module",
            value=place,
        )

    def _loss_of(self, outputs: Any, labels: Any) -> Any:
        return outputs if self._loss_fn is None else self._loss_fn(outputs, labels)

    def _do_backward(self, task: PipelineTask, *, is_last: bool) -> None:
        """`is_last`: of the step. The update counts that one."""
        here = self._passing[task.micro_batch, task.chunk]
        self._passes.is_last = is_last
        if self._names_of is not None:
            self._passes.params_expected = self._names_of[task.chunk] | (self._tied_names if is_last else set())
        if task.op is _INPUT:
            with self._passes.defer_weight_grads(here.left), self._delayed.defer_weight_grads(here.products):
                self._run_chunk(task, here, [])
            return
        ties = self._ties.take_gradients() if is_last else []
        if task.op is _WEIGHT:
            left, here.left = here.left, []
            products, here.products = here.products, []
            self._passes.run_products(products, [*left, *ties])
        else:
            self._run_chunk(task, here, ties)

    def _run_chunk(self, task: PipelineTask, here: MicroBatchState, ties: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Run a chunk's backward pass, from the loss or outgoing gradients, and those of `ties`."""
        _, micro_batch, chunk = task
        if chunk + 1 == len(self._placement):
            assert here.loss is not None  # the forward pass was before
            loss, here.loss = here.loss, None
            self.backward(loss)
            return
        if self._is_here(chunk + 1):
            behind = self._passing[micro_batch, chunk + 1]
            here.gradients, behind.inputs = gradients_of(behind.inputs.tensors), NOTHING
        roots = [output for output in here.outputs.tensors if output.requires_grad]
        pairs = list(zip(roots, here.gradients, strict=True))
        here.outputs, here.gradients = NOTHING, []
        self._run_from([*pairs, *ties])

    def _run_from(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """A backward pass from tensors with their gradients."""
        if pairs:
            self._passes.run_from(*zip(*pairs, strict=True))

    def _from_last_stage(self, results: Results, count: int) -> Tensor:
        """The losses of `count` micro-batches, on every stage, and what else the model reports."""
        more = results.mean_of_more()
        losses = results.stacked()
        if self._stages > 1:
            told = torch.zeros(count + 1, device=self.device)
            if losses is not None:
                told[:count], told[count] = losses, len(more)
            self._line.broadcast(wrap_torch(told), self._placement[-1], label="losses")
            losses = told[:count]
            if told[count]:
                more = self._line.broadcast_object(more, self._placement[-1])
        assert losses is not None  # there is one stage, or the last one has them
        self._more_losses = {name: torch.tensor(one, device=self.device) for name, one in more.items()} or None
        return losses
