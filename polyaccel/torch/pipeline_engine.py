"""The engine of a pipeline: it runs the program of its stage, and is an engine of the whole model in all else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.engine.same_training import require_same_training
from polyaccel.engine.timing import OUTSIDE
from polyaccel.errors import PolyaccelError
from polyaccel.pipeline.check import check_table
from polyaccel.pipeline.messages import StageReceive, StageSend, StageStep
from polyaccel.pipeline.schedules import make_table
from polyaccel.pipeline.table import PipelineOp, PipelineTask
from polyaccel.torch.api.data import to_device
from polyaccel.torch.engine import TorchEngine
from polyaccel.torch.pipeline.exchange import StageExchange, as_list
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.pipeline.ties import TiedWeights
from polyaccel.torch.pipeline.whole import merged_tensors, own_entries
from polyaccel.torch.states.whole_model import require_fitting, write_whole_model


class _Passing:
    """A micro-batch in this stage: what came in, what went out."""

    def __init__(self) -> None:
        self.inputs: list[Tensor | None] = []
        self.outputs: list[Tensor | None] = []
        self.gradients: list[Tensor] = []
        self.loss: Tensor | None = None


class PipelineEngine(TorchEngine):
    """An engine whose model is a `PipelineModule`: `train_batch` does a step, `eval_batch` computes a loss."""

    def compose_pipeline(self, schedule: str) -> None:
        """Find this rank's neighbours. Collective."""
        module = self._own_module
        assert isinstance(module, PipelineModule)  # what `initialize` makes
        self._stages, self._stage, self._loss_fn = module.num_stages, module.stage, module.loss_fn
        parts = [f"stage {stage} with layers {list(part)}" for stage, part in enumerate(module.parts)]
        require_same_training(self.communicator, [f"the schedule {schedule}", *parts])
        count = self.gradient_accumulation_steps()
        self._training = check_table(make_table(schedule, self._stages, count))[self._stage]
        self._evaluation = check_table(make_table("inference", self._stages, count, 1))[self._stage]
        line = self.runtime.along(("pipe",))
        self._line = line
        self._exchange = StageExchange(line, self.accelerator, self.device)
        self._ties = TiedWeights(module, line, self.device)
        self._ties.agree_on_types()
        self._iterator: Any = None
        self._in_batch = False

    def is_first_stage(self) -> bool:
        """Whether this rank's stage has the first layers."""
        return self._stage == 0

    def is_last_stage(self) -> bool:
        """Whether this rank's stage has the last layers, and the loss."""
        return self._stage == self._stages - 1

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
        engine's own loader). A micro-batch is a pair of inputs and labels: the first stage uses the inputs, the last
        the labels. Returns the mean loss of this rank's micro-batches, on every stage."""
        self._require_optimizer()
        self.train()
        loss = self._do_steps(self._training, data_iter)
        self._losses[:] = [loss]
        self.step()
        return loss

    @torch.no_grad()
    def eval_batch(self, data_iter: Any = None) -> Tensor:
        """The mean loss of as many micro-batches as a step has, without gradients, on every stage; the training mode is
        restored."""
        was_training = self.training
        self.eval()
        try:
            return self._do_steps(self._evaluation, data_iter)
        finally:
            self.train(was_training)

    def _do_steps(self, steps: tuple[StageStep, ...], data_iter: Any) -> Tensor:
        """Do the steps of a program with new micro-batches. Returns the mean loss."""
        source = self._data(self._iterator if data_iter is None else data_iter)
        with self.timer("data"):
            batches = [_pair(to_device(next(source), self.device)) for _ in range(self.gradient_accumulation_steps())]
        passing = [_Passing() for _ in batches]
        losses: list[Tensor] = []
        left = sum(isinstance(step, PipelineTask) and step.op is PipelineOp.BACKWARD for step in steps)
        self._ties.refresh()
        self._in_batch = True
        try:
            for step in steps:
                if isinstance(step, PipelineTask):
                    here = passing[step.micro_batch]
                    if step.op is PipelineOp.FORWARD:
                        self._do_forward(here, *batches[step.micro_batch], losses)
                    else:
                        left -= 1
                        self._do_backward(here, is_last=not left)
                else:
                    self._move(step, passing[step.message.micro_batch])
        finally:
            self._in_batch = False
        if torch.is_grad_enabled():
            self._ties.return_gradients()  # behind the last message of activations
        self._exchange.settle()
        self._ties.settle()
        return self._from_last_stage(losses)

    def _move(self, step: StageSend | StageReceive, here: _Passing) -> None:
        message = step.message
        if isinstance(step, StageSend):
            if message.op is PipelineOp.FORWARD:
                self._exchange.send_outputs(message.target, here.outputs)
            else:
                self._exchange.send_gradients(message.target, here.inputs)
                here.inputs = []
        elif message.op is PipelineOp.FORWARD:
            here.inputs = self._exchange.receive_outputs(message.source, needs_grad=torch.is_grad_enabled())
        else:
            here.gradients = self._exchange.receive_gradients(message.source, here.outputs)

    def _do_forward(self, here: _Passing, inputs: Any, labels: Any, losses: list[Tensor]) -> None:
        if not self.is_first_stage():
            inputs = here.inputs[0] if len(here.inputs) == 1 else tuple(here.inputs)
        outputs = self(inputs)
        if self.is_last_stage():
            here.loss = outputs if self._loss_fn is None else self._loss_fn(outputs, labels)
            losses.append(here.loss.detach())
        else:
            here.outputs = as_list(outputs)

    def _do_backward(self, here: _Passing, *, is_last: bool) -> None:
        """`is_last`: of the step. The update counts that one."""
        ties = self._ties.take_gradients() if is_last else []
        if self.is_last_stage():
            assert here.loss is not None  # the forward pass was before
            self.backward(here.loss)
            here.loss = None
        else:
            pairs = [output for output in here.outputs if output is not None and output.requires_grad]
            roots = [*zip(pairs, here.gradients, strict=True), *ties]
            if roots:
                self._passes.run_from(*zip(*roots, strict=True))
            here.outputs, here.gradients = [], []
        if not is_last:
            self.counters.advance()

    def _from_last_stage(self, losses: list[Tensor]) -> Tensor:
        value = torch.stack(losses).float().mean() if losses else torch.zeros((), device=self.device)
        flat = value.reshape(1).contiguous()
        if self._stages > 1:
            self._line.broadcast(wrap_torch(flat), self._stages - 1, label="loss")
        return flat[0]

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
            require_fitting(self._own_module, state_dict, self.communicator, strict=strict)
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


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise PolyaccelError(f"a micro-batch of a pipeline is a {kind}", cure="give pairs (inputs, labels)", value=kind)
    return batch[0], batch[1]
