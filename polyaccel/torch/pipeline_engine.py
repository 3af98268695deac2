"""The engine of a pipeline: it runs the program of its stage, and is an engine of the whole model in all else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from polyaccel.accelerators.memory.torch import torch_dtype, wrap_torch
from polyaccel.engine.same_training import require_same_training
from polyaccel.engine.timing import OUTSIDE
from polyaccel.errors import CommError, PolyaccelError
from polyaccel.ops.base import LINEAR_WEIGHT_GRAD
from polyaccel.pipeline.check import check_table
from polyaccel.pipeline.messages import StageMessage, StageReceive, StageSend, message_of
from polyaccel.pipeline.own import write_table
from polyaccel.pipeline.picture import foretold_picture
from polyaccel.pipeline.program import TaskTime, program_of, spans_of, with_stages
from polyaccel.pipeline.table import PipelineOp, PipelineTable, PipelineTask
from polyaccel.torch.api.data import call_with, loss_of, to_device
from polyaccel.torch.delayed_linears import DelayedLinears
from polyaccel.torch.engine import TorchEngine
from polyaccel.torch.params.units import parts_of_parameters
from polyaccel.torch.pipeline.cut import CutModel, cut_of, table_of
from polyaccel.torch.pipeline.exchange import StageExchange, as_list, gradients_of, handed_over
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.pipeline.passing import Passing, Results, mean_of, pair_of
from polyaccel.torch.pipeline.ties import TiedWeights
from polyaccel.torch.pipeline.whole import merged_tensors, own_entries
from polyaccel.torch.states.whole_model import own_blocks, require_fitting, write_whole_model

_FORWARD = PipelineOp.FORWARD
_BACKWARD, _INPUT, _WEIGHT = PipelineOp.BACKWARD, PipelineOp.BACKWARD_INPUT, PipelineOp.BACKWARD_WEIGHT


class PipelineEngine(TorchEngine):
    """An engine whose model is a `PipelineModule`, or was cut by its blocks: `train_batch` does a step, `eval_batch`
    computes a loss."""

    def compose_pipeline(self, schedule: str, chunks: int) -> None:
        """Find this rank's neighbours, and what it does by `schedule`, of `chunks` a stage (0: what that needs).
        Collective. Raises PipelineError for a schedule for which the model was not cut."""
        self._cut = cut_of(self._own_module)
        module = self._own_module if self._cut is None else self._cut
        assert isinstance(module, (PipelineModule, CutModel))  # what `initialize` makes
        if self._cut is not None:
            dtype = self.runtime.param_dtype
            self._cut.place(self.device, None if dtype is None else torch_dtype(dtype))
        self._stages, self._stage, self._loss_fn = module.num_stages, module.stage, module.loss_fn
        self._placement = module.placement
        self._passes.keeps_own_scale = self._stages > 1
        self._table_for = partial(table_of, module, schedule, chunks)
        table = self._table_for(self.gradient_accumulation_steps())
        self.monitor.add_picture("pipeline.svg", lambda: foretold_picture(table))
        parts = [
            f"chunk {chunk} on stage {stage} with layers {list(part)}"
            for chunk, (stage, part) in enumerate(zip(module.placement, module.parts, strict=True))
        ]
        told = f"the schedule {table.name}, whose table has the sum {crc32(write_table(table).encode()):08x}"
        require_same_training(self.communicator, [told, *parts])
        line = self.runtime.along(("pipe",))
        self._line = line
        self._exchange = StageExchange(line, self.accelerator, self.device)
        self._ties = TiedWeights(module, line, self.device)
        self._ties.agree_on_types()
        self._follow(table)
        splits = any(task.op is _INPUT for task in table.tasks[self._stage])
        faster = set(self.accelerator.matrix_kernels("auto")) if splits and len(self._linears) else ()
        delays = self._own_module if splits else torch.nn.Identity()
        self._delayed = DelayedLinears(delays, adds_in_place=LINEAR_WEIGHT_GRAD not in faster)
        self._names_of = self._names_by_chunk()
        owned = self._ties.owned_parameters()
        self._tied_names = {name for parameter, name in self.adapter.names.items() if parameter in owned}
        self.task_times: list[TaskTime] = []
        if self._recorder.trace is not None:
            self._recorder.trace.add_source(lambda: spans_of(self.task_times))
        """When this stage did the tasks of the last batch, in order."""
        self._iterator: Any = None
        self._in_batch = False
        self._passing: dict[tuple[int, int], Passing] = defaultdict(Passing)

    def _follow(self, table: PipelineTable) -> None:
        """Do steps by `table` from now on."""
        self._micro_batch_count = table.micro_batches
        self._training = program_of(check_table(table)[self._stage])
        self._evaluation = program_of(check_table(table.forwards())[self._stage])
        tasks = table.tasks[self._stage]
        self._count_of_passes = sum(task.op in (_BACKWARD, _WEIGHT) for task in tasks)
        self._ties_come_last = self._ties.is_owner and message_of(tasks[-1], table.placement) is not None

    def _check_accumulation(self, steps: int) -> None:
        super()._check_accumulation(steps)
        self._table_for(steps)

    def _names_by_chunk(self) -> dict[int, set[str]] | None:
        """The parameters that each chunk of this stage may give gradients to; None where there is but one chunk. A
        parameter of which the model says nothing is every chunk's."""
        chunks = [chunk for chunk, stage in enumerate(self._placement) if stage == self._stage]
        told, everyone = parts_of_parameters(self._own_module), " ".join(map(str, chunks))
        of_names = {name: (told.get(name) or everyone).split() for name in self.adapter.names.values()}
        if len(chunks) == 1:
            return None
        return {chunk: {name for name, users in of_names.items() if str(chunk) in users} for chunk in chunks}

    def is_first_stage(self) -> bool:
        """Whether this rank's stage has the first layers."""
        return self._placement[0] == self._stage

    def is_last_stage(self) -> bool:
        """Whether this rank's stage has the last layers, and the loss."""
        return self._placement[-1] == self._stage

    def destroy(self) -> None:
        """As that of `TorchEngine`."""
        self._delayed.release()
        super().destroy()

    def set_dataiterator(self, iterator: Any) -> None:
        """Take micro-batches from `iterator` where `train_batch` and `eval_batch` are given none."""
        self._iterator = iterator

    def reset_activation_shape(self) -> None:
        """Tell types and shapes of activations anew. It is not needed: they are told wherever they change."""
        self._exchange.forget()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The output of this rank's layers. Raises PolyaccelError outside of a batch, where other ranks have more."""
        self._require_batch("engine(...)")
        return super().forward(*inputs, **named)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """As that of `TorchEngine`. Raises PolyaccelError outside of a batch, where other ranks have more layers."""
        self._require_batch("engine.backward(...)")
        return super().backward(loss, retain_graph, scale_wrt_gas)

    def _require_batch(self, call: str) -> None:
        if self._stages > 1 and not self._in_batch:
            raise PolyaccelError(
                f"{call}: this rank has stage {self._stage} of {self._stages} alone",
                cure="call engine.train_batch(data_iter) or engine.eval_batch(data_iter) on every rank",
                value=self._stage,
            )

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """One optimizer step over its micro-batches from `data_iter` (None: that of `set_dataiterator`, else the
        engine's own loader). A micro-batch of a `PipelineModule` is a pair of inputs and labels: the stage of the first
        layers uses the inputs, that of the last the labels; a model that was cut takes its own. Returns the mean loss
        of this rank's micro-batches, on every stage."""
        self._require_optimizer()
        self.train()
        results = Results()
        self._do_steps(data_iter, results)
        loss = self._from_last_stage(results.losses).mean()
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
    ) -> Any:
        """The mean loss of as many micro-batches as a step has, without gradients, on every stage; the training mode is
        restored. With `reduce_output` None the losses of all of them, as a list. Without `compute_loss` the outputs of
        the last layers take their place, and only the stage of these has them, the others None. `return_logits` gives a
        pair: that, and the outputs by micro-batch as a list, again on that stage alone."""
        if reduce_output not in (None, "avg"):
            raise PolyaccelError(f"reduce_output {reduce_output!r}", cure='use "avg" or None', value=reduce_output)
        was_training = self.training
        self.eval()
        results = Results(wants_losses=compute_loss, wants_outputs=return_logits or not compute_loss)
        try:
            self._do_steps(data_iter, results)
        finally:
            self.train(was_training)
        outputs = results.outputs if self.is_last_stage() else None
        found: Any
        if compute_loss:
            losses = self._from_last_stage(results.losses)
            found = losses.mean() if reduce_output else list(losses)
        else:
            found = mean_of(outputs) if reduce_output and outputs is not None else outputs
        return (found, outputs) if return_logits else found

    def _do_steps(self, data_iter: Any, results: Results) -> None:
        """Do the steps of training, or of evaluation without gradients, with new micro-batches."""
        if self._micro_batch_count != self.gradient_accumulation_steps():
            self._follow(self._table_for(self.gradient_accumulation_steps()))
        trains = torch.is_grad_enabled()
        program = self._training if trains else self._evaluation
        source = self._data(self._iterator if data_iter is None else data_iter)
        with self.timer("data"):
            batches = [self._taken(next(source)) for _ in range(self._micro_batch_count)]
        left = self._count_of_passes + self._ties_come_last
        self._ties.refresh()
        self._passing.clear()
        self.task_times.clear()
        self._in_batch = True
        at = "the first step"
        try:
            for step, at, begins in program:
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
                if self._ties_come_last:
                    self._passes.is_last, self._passes.concerned = True, self._tied_names
                    self._run_from(self._ties.take_gradients())
            self._exchange.settle()
            self._ties.settle()
        except CommError as error:
            raise with_stages(error, at, self._stage, self._line.ranks) from error
        finally:
            self._in_batch = False
            self._passes.is_last = self._passes.concerned = None
            self._passing.clear()
        if trains:
            for _ in batches[1:]:
                self.counters.advance()

    def _begin(self, message: StageMessage, label: str) -> None:
        """Begin a receive."""
        if message.op is _FORWARD:
            self._exchange.begin_outputs(message, label, trains=torch.is_grad_enabled())
        else:
            outputs = self._passing[message.micro_batch, message.chunk - 1].outputs
            self._exchange.begin_gradients(message, outputs, label)

    def _move(self, step: StageSend | StageReceive, label: str) -> None:
        message, trains = step.message, torch.is_grad_enabled()
        forward = message.op is _FORWARD
        if isinstance(step, StageSend):
            here = self._passing[message.micro_batch, message.chunk]
            if forward:
                self._exchange.send_outputs(message, here.outputs, label, trains=trains)
            else:
                self._exchange.send_gradients(message, gradients_of(here.inputs), label)
                here.inputs = []
        elif forward:
            here = self._passing[message.micro_batch, message.chunk + 1]
            here.inputs = self._exchange.receive_outputs(message, label, trains=trains)
        else:
            here = self._passing[message.micro_batch, message.chunk - 1]
            here.gradients = self._exchange.receive_gradients(message, here.outputs, label)

    def _is_here(self, chunk: int) -> bool:
        return 0 <= chunk < len(self._placement) and self._placement[chunk] == self._stage

    def _do_forward(self, task: PipelineTask, inputs: Any, labels: Any, results: Results) -> None:
        _, micro_batch, chunk = task
        here, trains = self._passing[micro_batch, chunk], torch.is_grad_enabled()
        if chunk and self._is_here(chunk - 1):
            before = self._passing[micro_batch, chunk - 1]
            here.inputs = handed_over(before.outputs, needs_grad=trains)
        outputs = self._outputs_of(chunk, inputs, here.inputs)
        if chunk + 1 < len(self._placement):
            here.outputs = as_list(outputs)
        else:
            if results.wants_losses:
                loss = self._loss_of(outputs, labels)
                results.losses.append(loss.detach())
                here.loss = loss
            if results.wants_outputs:
                results.outputs.append(outputs if self._cut is None else getattr(outputs, "logits", outputs))
        if not trains:
            self._passing.pop((micro_batch, chunk - 1), None)  # what it made was sent, or used
            here.inputs = []

    def _taken(self, batch: Any) -> tuple[Any, Any]:
        """The inputs and the labels of a micro-batch, on the device. A model with a loss of its own is given both."""
        batch = to_device(batch, self.device)
        return (batch, None) if self._cut is not None and self._loss_fn is None else pair_of(batch)

    def _outputs_of(self, chunk: int, inputs: Any, received: Sequence[Tensor | None]) -> Any:
        """What a chunk makes of what it has `received`; the first one of the micro-batch's `inputs`, of which a model
        that was cut by its blocks has something in every chunk."""
        if self._cut is not None:
            return self._cut.run(lambda: call_with(self, inputs), chunk, received)
        if chunk:
            inputs = received[0] if len(received) == 1 else tuple(received)
        return self(inputs, chunk=chunk)

    def _loss_of(self, outputs: Any, labels: Any) -> Tensor:
        if self._loss_fn is not None:
            loss: Tensor = self._loss_fn(outputs, labels)
            return loss
        return loss_of(outputs) if self._cut is not None else outputs

    def _do_backward(self, task: PipelineTask, *, is_last: bool) -> None:
        """`is_last`: of the step. The update counts that one."""
        here = self._passing[task.micro_batch, task.chunk]
        self._passes.is_last = is_last
        if self._names_of is not None:
            self._passes.concerned = self._names_of[task.chunk] | (self._tied_names if is_last else set())
        if task.op is _INPUT:
            with self._passes.leaving(here.left), self._delayed.leaving(here.products):
                self._run_chunk(task, here, [])
            return
        ties = self._ties.take_gradients() if is_last else []
        if task.op is _WEIGHT:
            left, here.left = here.left, []
            products, here.products = here.products, []
            self._passes.run_products(products, [*left, *ties])
        else:
            self._run_chunk(task, here, ties)

    def _run_chunk(self, task: PipelineTask, here: Passing, ties: Sequence[tuple[Tensor, Tensor]]) -> None:
        """A backward pass of a chunk, from the loss or from the gradients of what went out, and from those of `ties`,
        which a stage with the loss gets with another chunk."""
        _, micro_batch, chunk = task
        if chunk + 1 == len(self._placement):
            assert here.loss is not None  # the forward pass was before
            loss, here.loss = here.loss, None
            self.backward(loss)
            return
        if self._is_here(chunk + 1):
            behind = self._passing[micro_batch, chunk + 1]
            here.gradients, behind.inputs = gradients_of(behind.inputs), []
        roots = [output for output in here.outputs if output is not None and output.requires_grad]
        pairs = list(zip(roots, here.gradients, strict=True))
        here.outputs, here.gradients = [], []
        self._run_from([*pairs, *ties])

    def _run_from(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """A backward pass from tensors with their gradients."""
        if pairs:
            self._passes.run_from(*zip(*pairs, strict=True))

    def _from_last_stage(self, losses: Sequence[Tensor]) -> Tensor:
        """The losses of the micro-batches, on every stage."""
        if self._stages == 1:
            return torch.stack(list(losses)).float()
        count = self.gradient_accumulation_steps()
        values = torch.stack(list(losses)).float() if losses else torch.zeros(count, device=self.device)
        self._line.broadcast(wrap_torch(values), self._placement[-1], label="losses")
        return values

    # The whole model.

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The state dict of the whole model, on every rank. Every rank calls it."""
        own = super().module_state_dict(exclude_frozen_parameters)
        return merged_tensors(own, self._line, self.device) if self._stages > 1 else own

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Take over the state dict of the whole model, equal on all ranks. Every rank calls it. Raises torch's
        RuntimeError for other names or shapes."""
        if self._stages > 1:
            own = self._own_module.state_dict(keep_vars=True)
            state_dict = own_entries(state_dict, own.keys(), self._line, strict=strict)
            blocks = own_blocks(self.adapter, state_dict)
            require_fitting(self._own_module, blocks, self.communicator, strict=strict)
        super().load_module_state_dict(state_dict, strict)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the state dict of the whole model to one file, as `TorchEngine` does. Every rank has the whole model
        meanwhile."""
        if self._stages == 1:
            return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)
        with self.timer(OUTSIDE):
            state = self.module_state_dict(exclude_frozen_parameters)
            on_host = {
                name: one.to("cpu", copy=True) if isinstance(one, Tensor) else one for name, one in state.items()
            }
            write_whole_model(on_host, self.communicator, save_dir, save_filename)
        return True
