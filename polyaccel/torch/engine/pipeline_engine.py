"""The engine of a pipeline: it runs the program of its stage, and is an engine of the whole model in all else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from polyaccel.accelerators.memory.torch import torch_dtype, wrap_torch
from polyaccel.engine.rank_consistency import require_same_training
from polyaccel.errors import PolyaccelError
from polyaccel.ops.base import LINEAR_WEIGHT_GRAD
from polyaccel.pipeline.csv_schedule import write_table
from polyaccel.pipeline.program import TaskTime, spans_of
from polyaccel.pipeline.render import estimated_picture
from polyaccel.torch.engine.pipeline_states import StagedStates
from polyaccel.torch.engine.stage_executor import StageExecutor
from polyaccel.torch.pipeline.batches import StageBatches
from polyaccel.torch.pipeline.exchange import StageExchange
from polyaccel.torch.pipeline.microbatch import Results, mean_of
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.pipeline.programs import StageProgram, StagePrograms, names_by_chunk
from polyaccel.torch.pipeline.stage_module import StageModule, cut_of
from polyaccel.torch.pipeline.ties import TiedWeights
from polyaccel.torch.weight_grad import SplitBackwardLinears


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
        schedule_text = f"the schedule {table.name}, whose table has the sum {crc32(write_table(table).encode()):08x}"
        require_same_training(self.communicator, [schedule_text, *parts])
        training = self._programs.training(table.micro_batches)
        self._line = line = self.runtime.process_group_for(("pipe",))
        exchange = StageExchange(line, self.accelerator, self.device)
        ties = TiedWeights(module, line, self.device)
        ties.agree_on_types()
        faster = set(self.accelerator.matrix_kernels("auto")) if training.splits and len(self.linears) else ()
        delays = self._own_module if training.splits else torch.nn.Identity()
        self._delayed = SplitBackwardLinears(delays, adds_in_place=LINEAR_WEIGHT_GRAD not in faster)
        self.task_times: list[TaskTime] = []
        """When this stage did the tasks of the last batch, in order."""
        if self._recorder.trace is not None:
            self._recorder.trace.add_source(lambda: spans_of(self.task_times))
        needs = (self.is_first_stage(), self.is_last_stage()) if self._cut is None else (True, True)
        is_whole = self._cut is not None and self._loss_fn is None
        self._batches = StageBatches(needs, self.device, is_whole=is_whole)
        self._in_batch = self._receives = False
        self._more_losses: dict[str, Tensor] | None = None
        owned = ties.owned_parameters()
        self._executor = StageExecutor(
            module,
            exchange,
            ties,
            self._passes,
            self._delayed,
            names_by_chunk=names_by_chunk(self._own_module, self.adapter.names.values(), module),
            tied_names={name for parameter, name in self.adapter.names.items() if parameter in owned},
            task_times=self.task_times,
        )

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
        self._executor.forget_shapes()

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
        self._in_batch = True
        try:
            self._executor.execute(self, program, batches, results)
        finally:
            self._in_batch = False
        if torch.is_grad_enabled():
            for _ in batches[1:]:
                self.counters.advance()

    def run_chunk(self, value: Any, chunk: int) -> Any:
        """Run the layers of a chunk, for the executor.

        Args:
            value: Input of the first layer, or what the chunk before it gave.
            chunk: Index of the chunk.

        Returns:
            The output of its last layer.
        """
        self._receives = chunk > 0
        return self(value, chunk=chunk)

    def _source(self, data_iter: Any) -> Iterator[Any] | None:
        """Where micro-batches come from; None where the stage needs none or makes its own."""
        given = self._batches.iterator if data_iter is None else data_iter
        has_none = given is None and self.training_dataloader is None
        if has_none and (self._batches.batch_fn is not None or not self._batches.are_needed):
            return None
        return self._data(given)

    def _from_last_stage(self, results: Results, count: int) -> Tensor:
        """The losses of `count` micro-batches, on every stage, and what else the model reports."""
        more = results.mean_of_more()
        losses = results.stacked()
        if self._stages > 1:
            sent = torch.zeros(count + 1, device=self.device)
            if losses is not None:
                sent[:count], sent[count] = losses, len(more)
            self._line.broadcast(wrap_torch(sent), self._placement[-1], label="losses")
            losses = sent[:count]
            if sent[count]:
                more = self._line.broadcast_object(more, self._placement[-1])
        assert losses is not None  # there is one stage, or the last one has them
        self._more_losses = {name: torch.tensor(one, device=self.device) for name, one in more.items()} or None
        return losses
