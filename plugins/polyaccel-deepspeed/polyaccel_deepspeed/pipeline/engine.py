"""The engine of a pipeline by DeepSpeed's names: losses are means over all ranks, and its attributes are there."""

from __future__ import annotations

from collections.abc import Mapping
from logging import getLogger
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.core.types import ReduceOp
from polyaccel.errors import PolyaccelError
from polyaccel.torch.engine import pipeline_engine as core
from polyaccel.torch.pipeline.batches import pair_of
from polyaccel_deepspeed.engine.engine import DeepSpeedEngine
from polyaccel_deepspeed.engine.loader import DealtSampler, RepeatingLoader
from polyaccel_deepspeed.pipeline.grid import PipelineParallelGrid
from polyaccel_deepspeed.pipeline.module import PipelineModule
from polyaccel_deepspeed.pipeline.topology import PipeModelDataParallelTopology

log = getLogger("polyaccel.deepspeed")


class PipelineEngine(DeepSpeedEngine, core.PipelineEngine):  # type: ignore[misc]  # of `module_state_dict`
    """An engine that `deepspeed.initialize` makes of a `PipelineModule`, and of any model over several stages."""

    has_attention_mask = False
    has_bool_tensors = False
    eval_return_logits = False
    # What scripts set before an evaluation of other shapes. Shapes may always change here.
    first_output_send = True
    first_gradient_send = True
    pipe_recv_buf: Any = None
    grad_layer: Any = None
    meta_buffer: Any = None

    loss: Tensor | None = None
    """The mean loss of this rank's last batch, on every stage."""
    total_loss: Tensor | None = None
    """The sum of the losses of its micro-batches."""
    dp_group_loss: Tensor | None = None
    """`loss`."""
    agg_train_loss: Tensor | None = None
    """The mean loss of all ranks' last batch."""
    agg_loss: Tensor | None = None
    """`agg_train_loss`."""
    agg_additional_losses: dict[str, Tensor] | None = None

    def compose_pipeline(self, schedule: str, chunks: int) -> None:
        """As polyaccel's."""
        super().compose_pipeline(schedule, chunks)
        self._batches.pair_of = self._pair_of
        module = self._own_module
        if isinstance(module, PipelineModule):
            self.grid = module.mpu()
            if interval := self.runtime.config.pipeline.activation_checkpoint_interval:
                module.set_checkpoint_interval(interval)
        else:
            sizes = (self.mesh.size_of((axis,)) for axis in ("pipe", "tensor"))
            stages, model = sizes
            rest = self.communicator.world_size // (stages * model)
            self.grid = PipelineParallelGrid(PipeModelDataParallelTopology(stages, model, rest))
        self.mpu = self.grid
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1
        self.is_pipe_parallel = self.grid.pipe_parallel_size > 1
        self.is_data_parallel = self.grid.data_parallel_size > 1
        self.is_model_parallel = self.grid.model_parallel_size > 1
        self.is_pipe_partitioned = self.is_grad_partitioned = False
        self._micro_batches: int | None = None

    def _single_names(self) -> dict[str, tuple[str, str]]:
        """As `DeepSpeedEngine`'s, of all stages."""
        own = super()._single_names()
        return dict(pair for each in self._line.all_gather_object(own) for pair in each.items())

    pipeline_parallelism, enable_backward_allreduce = True, False

    # Data.

    def adopt(self, raw_config: Mapping[str, Any], client: Any, collate_fn: Any) -> None:
        """As `DeepSpeedEngine`'s, and begin the first epoch, in the order of the dataset: DeepSpeed's pipelines deal
        `training_data` unshuffled. See [Note: DeepSpeed's random draws] of `loader`."""
        super().adopt(raw_config, client, collate_fn)
        if self.training_dataloader is not None:
            sampler = getattr(self.training_dataloader, "data_sampler", None)
            if isinstance(sampler, DealtSampler):
                sampler.shuffle = False
            self._own_data = RepeatingLoader(self.training_dataloader)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a batch has. Scripts set another number around an evaluation."""
        return self.gradient_accumulation_steps() if self._micro_batches is None else self._micro_batches

    @micro_batches.setter
    def micro_batches(self, count: int) -> None:
        self._micro_batches = None if count == self.gradient_accumulation_steps() else count

    @property
    def micro_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu()

    @property
    def batch_fn(self) -> Any:
        return self._batches.batch_fn

    @property
    def data_iterator(self) -> Any:
        return self._batches.iterator

    def set_has_attention_mask(self, value: bool) -> None:
        """Has no effect: tensors of any type pass between stages."""
        if not isinstance(value, bool):
            raise PolyaccelError(f"set_has_attention_mask({value!r})", hint="give True or False", value=value)
        self.has_attention_mask = value

    def _pair_of(self, batch: Any) -> tuple[Any, Any]:
        """The inputs require a gradient where a function of the script's own recomputes layers: torch's reentrant one
        drops the gradients of layers whose inputs need none."""
        inputs, labels = _first_two(batch)
        module = self._own_module
        recomputes = isinstance(module, PipelineModule) and module.activation_checkpoint_interval > 0
        if recomputes and module.activation_checkpoint_func is not checkpoint:
            inputs = tree_map_only(Tensor, _with_gradient, inputs)
        return inputs, labels

    # Batches.

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """As polyaccel's, but the loss is the mean over all ranks, and `data_iter` stays for calls without one."""
        if not torch.is_grad_enabled():
            raise PolyaccelError("train_batch under torch.no_grad", hint="call eval_batch, or leave no_grad")
        if self.micro_batches != self.gradient_accumulation_steps():
            raise PolyaccelError(
                f"micro_batches is {self.micro_batches}, and a step has {self.gradient_accumulation_steps()}",
                hint="set engine.micro_batches back before train_batch, or call engine.set_train_batch_size",
                value=self.micro_batches,
            )
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.loss = self.dp_group_loss = super().train_batch()
        self.total_loss = self.loss * self.micro_batches
        self.agg_train_loss = self.agg_loss = self._mean_over_data(self.loss)
        more = super().get_additional_losses()
        self.agg_additional_losses = (
            None if more is None else {name: self._mean_over_data(one) for name, one in more.items()}
        )
        return self.agg_train_loss

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
        """As polyaccel's, but means are over all ranks, and `return_logits` gives the outputs of the last micro-batch
        alone. `data_iter` is for this call."""
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        reduce = reduce_output if reduce_output is None else reduce_output.lower()
        found, outputs = super().eval_batch(data_iter, True, compute_loss, reduce, bcast_loss, count)
        if reduce is not None:
            found = self._mean_over_data(found)
        return (found, None if outputs is None else outputs[-1]) if return_logits else found

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """The means over all ranks of what `PipelineModule.get_additional_losses` reported in the last step."""
        return self.agg_additional_losses

    def _mean_over_data(self, value: Any) -> Any:
        """The mean of `value` over the ranks of this stage with other batches."""
        ranks = self.runtime.process_group_for(("data",))
        if ranks.world_size == 1 or value is None:
            return value
        if isinstance(value, Tensor):
            value = value.clone().contiguous()
            ranks.all_reduce(wrap_torch(value.view(-1)), ReduceOp.AVG)
            return value
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._mean_over_data, value))
        return value

    # Places and words.

    def get_pipeline_parallel_rank(self) -> int:
        return self.stage_id

    def log_for_device(self, *msg: Any) -> None:
        """Does nothing, as DeepSpeed's does unless its source is changed."""

    def tput_log(self, *msg: Any) -> None:
        """Log `msg` on rank 0 in steps that are printed."""
        every = self.steps_per_print()
        if self.global_rank == 0 and every and self.global_steps % every == 0:
            log.info(" ".join(map(str, msg)))


def _first_two(batch: Any) -> tuple[Any, Any]:
    """Inputs and labels as DeepSpeed takes them: the first two of a batch, and lists as tuples, which torch's loaders
    make lists of."""
    is_indexed = hasattr(batch, "__getitem__") and not isinstance(batch, (Mapping, Tensor, str))
    if not is_indexed or len(batch) < 2:
        return pair_of(batch)
    inputs, labels = (tuple(one) if isinstance(one, list) else one for one in (batch[0], batch[1]))
    return inputs, labels


def _with_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor
