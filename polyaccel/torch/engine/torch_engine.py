"""The engine that torch users hold: forward, backward, step, and everything they ask of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.engine.base import learning_rates
from polyaccel.engine.replica_groups import place_among
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.observability.profiles import ProfileNode
from polyaccel.observability.timing import OUTSIDE
from polyaccel.torch.activation_checkpointing.blocks import Recomputation
from polyaccel.torch.api.client_optimizer import ClientOptimizer
from polyaccel.torch.api.optimizer import ZeroOptimizer
from polyaccel.torch.data import (
    RepeatingLoader,
    call_with,
    cast_floats,
    loss_of,
    mean_to_host,
    to_device,
)
from polyaccel.torch.deferred_init.init import is_constructing
from polyaccel.torch.engine.autocast import ForwardAutocast
from polyaccel.torch.engine.states import TorchStates
from polyaccel.torch.generation.generates import Generates
from polyaccel.torch.linears import Linears
from polyaccel.torch.loaders import TrainingLoader, make_loader
from polyaccel.torch.profiling.forward_work import ForwardWork
from polyaccel.torch.rewrites import REWRITES, RewriteContext
from polyaccel.torch.sharding.backward import BackwardRunner
from polyaccel.torch.sharding.compiled_units import CompiledUnits
from polyaccel.torch.sharding.transforms import explaining_refusal, is_transforming
from polyaccel.torch.tensor_parallel.same_inputs import require_same_inputs
from polyaccel.torch.weight_transfer.sends import SendsWeights

log = getLogger(__name__)


class TorchEngine(nn.Module, TorchStates, Generates, SendsWeights):
    """A torch module in training under ZeRO, built by `polyaccel.initialize`.

    `engine(*inputs)` runs the module; `backward(loss)` or `loss.backward()` computes gradients; `step()` updates at the
    accumulation boundary. Attributes that the engine lacks are the module's. It has the methods of `Engine` too, such
    as `global_steps` and `get_global_grad_norm`.

    Args:
        rewrites: The model, and the rewrites that `polyaccel.initialize` has applied to it so far.
    """

    linears: Linears
    step_inputs: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    """What changes the inputs of each forward pass of training by the step."""
    token_drop: Any = None
    """The layers that see a part of the tokens; None where all see all."""
    before_forward: list[Callable[[], None]]
    """What is called before each forward pass of a training step, on all ranks."""
    before_backward: list[Callable[[Tensor], None]]
    """What is called with each loss before its backward pass."""
    _autocast: ForwardAutocast
    _warned_of_16_bits = _is_closed = False

    def __init__(self, rewrites: RewriteContext) -> None:
        super().__init__()
        self._modules["module"] = module = rewrites.model
        self.runtime, self._stage_runtime = rewrites.runtime, rewrites.runtime.of_stage()
        self._compose(self.runtime.engine_parts())
        self.training_dataloader: Any = None
        self._module_settings = settings = rewrites.settings
        self._autocast = ForwardAutocast(self.device.type, settings.autocast_dtype)
        self._losses: list[Tensor] = []
        self.before_forward, self.before_backward = [], []
        self._passes = BackwardRunner(self.accelerator, self.counters, self.loss_scaler, self.timer)
        self.recomputation: Recomputation | None = None
        self._compiled_units: CompiledUnits | None = None
        self._rewrites = rewrites
        rewrites.engine = self
        rewrites.apply([one for one in REWRITES if one.needs_engine])
        rewrites.engine = None
        self.optimizer: Any = None
        slice_optimizer, groups = rewrites.slice_optimizer, rewrites.groups
        if slice_optimizer is not None:
            evaluates = isinstance(slice_optimizer, ClientOptimizer) and slice_optimizer.evaluates
            if isinstance(slice_optimizer, ClientOptimizer):
                slice_optimizer.bind(self.zero.shards)
            self.optimizer = ZeroOptimizer(groups, self._update, self.zero_grad, evaluates=evaluates)
        self.adapter.broadcast_buffers(self._stage_runtime.communicator)
        whole = self.adapter.param_specs(), frozenset(self.adapter.unit_names().values())
        self._compares_inputs = self.mesh.has_several("tensor") and not self.mesh.has_several("pipe")
        self._work = ForwardWork(module, settings, self._recorder, self.counters, *whole)
        self._recorder.begin()

    # Running the module.

    @property
    def module(self) -> nn.Module:
        """The user's module, with its parameters up to date."""
        self.zero.params.wait_all_gathers()
        return self._own_module

    @property
    def _own_module(self) -> nn.Module:
        module = self._modules["module"]
        assert module is not None  # set in the constructor
        return module

    @property
    def device(self) -> torch.device:
        """Device that this rank's parameters are on."""
        return torch_device_of(self.accelerator)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the module under the autocast of the config, or else of the caller.

        Collective if parameters are sharded.

        Args:
            *inputs: Inputs of the module. Under fp16 floating tensors are cast to float16.
            **named: Named inputs, treated the same way.

        Returns:
            The module's output.

        Raises:
            PolyaccelError: It is called inside zero.Init, where new tensors have no values.
            ShardingError: Ranks that share layers have other inputs in the first pass of training.
        """
        if is_constructing():
            raise PolyaccelError(
                "the engine was called inside zero.Init", hint="build models inside, and train after the block"
            )
        if self.runtime.casts_inputs and not getattr(self, "_receives", False):  # of users, not of another stage
            inputs, named = cast_floats((inputs, named), torch.float16)
        is_trained_on = torch.is_grad_enabled() and self.training and self.optimizer is not None
        if is_trained_on:
            if self._compares_inputs and not is_transforming():
                self._compares_inputs = False
                require_same_inputs(self.runtime.process_group_for(("tensor",)), inputs, named)
            if self.step_inputs is not None:
                inputs, named = self.step_inputs(inputs, named)
            self._train_unfrozen()
            for call in self.before_forward:
                call()
        charge = self.timer("forward" if torch.is_grad_enabled() else OUTSIDE)
        again = nullcontext() if self.recomputation is None else self.recomputation.forward_pass(inputs, named)
        counted = self._work.forward_pass(inputs, named, counts=is_trained_on)
        refusals = explaining_refusal(self._own_module)
        with charge, self._autocast(), counted, again, refusals:
            outputs = self._own_module(*inputs, **named)
        if is_trained_on and not is_transforming():
            self._passes.watch_outputs(outputs)
        return outputs

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module, not the engine around it.

        Where parameters are gathered around units, each unit is compiled by itself, and what is between them is not.
        Graphs also end where ranks communicate.

        Args:
            *args: Arguments of `torch.compile` after the module.
            **kwargs: Named arguments of `torch.compile`.
        """
        units = self.adapter.sharding.units_to_compile()
        if self._compiled_units is not None:
            self._compiled_units.release()
        self._compiled_units = CompiledUnits(units, args, kwargs) if units else None
        if not units:
            self._own_module.compile(*args, **kwargs)
        if self.recomputation is not None:
            self.recomputation.compile(*args, **kwargs)

    # Gradients.

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute the gradients of `loss` and start to reduce them. Collective.

        Args:
            loss: Scalar tensor. It is scaled here for accumulation and fp16.
            retain_graph: Keep the graph for another backward pass, as in torch.
            scale_wrt_gas: Divide by the accumulation steps (DeepSpeed's name).

        Returns:
            The loss divided by the accumulation steps, or as it is without `scale_wrt_gas`.

        Raises:
            PolyaccelError: `loss` is not a scalar tensor, or the engine has no optimizer.
        """
        self._require_optimizer()
        self.adapter.require_nothing_away()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise PolyaccelError(
                f"backward needs a scalar loss, not {shape}", hint="reduce it: loss.mean()", value=shape
            )
        with self._passes.unwatched():
            for call in self.before_backward:
                call(loss)
        shared = self._passes.run(loss, retain_graph=retain_graph, accumulates=scale_wrt_gas)
        self._losses.append(loss.detach())
        return shared

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the loss scale, for users who call `.backward()` on it themselves under fp16.

        Args:
            loss: Scalar tensor.

        Returns:
            Scaled loss, part of the same graph.
        """
        return self._passes.scale(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context whose backward passes accumulate on this rank only; the first one outside reduces their
        gradients.
        """
        return self._passes.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients, accumulated ones too.

        Args:
            set_to_none: As in `torch.nn.Module.zero_grad`, for gradients that the engine does not hold.
        """
        self.adapter.discard_gradients()
        super().zero_grad(set_to_none)
        self.counters.begin_window()

    def _check_accumulation(self, steps: int) -> None:
        if isinstance(self.zero.optimizer, ClientOptimizer) and self.zero.optimizer.evaluates and steps != 1:
            expected = "the optimizer evaluates the loss several times a step"
            raise ConfigError([Problem("gradient_accumulation_steps", steps, expected, "use 1 micro-batch a step")])
        types = {spec.dtype for spec in self.adapter.param_specs() if spec.trainable}
        if steps > 1 and self.zero.plan.policy.precision.adds_in_16_bits(types) and not self._warned_of_16_bits:
            self._warned_of_16_bits = True
            log.warning('micro-batches add up in 16 bits: say "data_types": {"grad_accum_dtype": "fp32"} in the config')

    @property
    def profile(self) -> ProfileNode | None:
        """Operations of the pass that `flops_profiler` names, by module; None before it, and on other ranks than 0."""
        return self._work.profile

    # The update.

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch: at the accumulation boundary update the parameters and the learning-rate schedule.
        Collective.

        Args:
            lr_kwargs: Named arguments of the schedule's `step`.

        Raises:
            PolyaccelError: It is called inside `no_sync`, or the engine has no optimizer.
            LossScaleError: Gradients are not finite step after step, at the smallest loss scale of fp16.
        """
        if not self._passes.reduce:
            raise PolyaccelError("step was called inside no_sync", hint="leave the no_sync block first")
        self._require_optimizer()
        self.adapter.require_nothing_away()
        if not self.counters.is_boundary:
            self.counters.advance()
            return
        mean_loss = mean_to_host(
            self._losses, self.accelerator
        )  # asked for after the update, it would keep the host until that has ended
        self.optimizer.step()
        self._losses.clear()
        self._end_step(self.optimizer.param_groups, mean_loss(), lr_kwargs or {})

    def _update(self, closure: Callable[[], Any] | None) -> Any:
        """The update, which `optimizer.step()` calls: parameters change, and gradients are forgotten. `closure` is
        there for an optimizer that evaluates the loss itself; returns what such a one returns."""
        self._settle_replica()
        self.adapter.before_update()
        result = None
        if closure is None:
            self._apply_update(self.optimizer.param_groups)
        else:
            assert isinstance(self.zero.optimizer, ClientOptimizer)  # no other one evaluates
            result = self.zero.optimizer.minimise(closure, self.communicator)
            self.adapter.adopt_changes()  # it wrote to the module's own parameters
        self.adapter.discard_gradients()
        self.adapter.on_update()
        return result

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """Run one optimizer step, with all its micro-batches. Collective.

        Args:
            data_iter: Iterator of this rank's micro-batches: a mapping (named inputs), a sequence (inputs) or one
                input. None takes the engine's own loader, epoch after epoch.

        Returns:
            Scalar: the mean loss of this rank's micro-batches.

        Raises:
            PolyaccelError: There is no data, or the module does not return its loss: alone, first in a tuple, or as
                `loss`.
        """
        self.train()
        source = self._data(data_iter)
        losses = []
        for _ in range(self.gradient_accumulation_steps()):
            with self.timer("data"):
                batch = to_device(next(source), self.device)
            loss = loss_of(call_with(self, batch))
            self.backward(loss)
            losses.append(loss.detach())
            self.step()
        return torch.stack(losses).mean()

    @torch.no_grad()
    def eval_batch(self, data_iter: Any) -> Tensor:
        """Compute the loss of one micro-batch without gradients, and restore the training mode.

        Collective if parameters are sharded.

        Args:
            data_iter: Iterator whose next micro-batch is taken. None takes the engine's own loader.

        Returns:
            Scalar loss.

        Raises:
            PolyaccelError: There is no data, or the module does not return its loss.
        """
        was_training = self.training
        self.eval()
        try:
            with self.timer(OUTSIDE):
                return loss_of(call_with(self, to_device(next(self._data(data_iter)), self.device)))
        finally:
            self.train(was_training)

    def _data(self, data_iter: Any) -> Iterator[Any]:
        if data_iter is not None:
            return iter(data_iter) if not hasattr(data_iter, "__next__") else data_iter
        if self.training_dataloader is None:
            raise PolyaccelError("train_batch has no data", hint="pass data_iter, or training_data to initialize")
        if self._own_data is None:
            self._own_data = iter(RepeatingLoader(self.training_dataloader))
        return self._own_data

    def deepspeed_io(
        self, dataset: Any, *, collate_fn: Callable[[list[Any]], Any] | None = None, num_workers: int = 0
    ) -> TrainingLoader:
        """Build a loader of this rank's micro-batches, shuffled again in each epoch. DeepSpeed's name.

        `data_efficiency.data_sampling` may choose them by difficulty, or put them into batches by tokens instead.

        Args:
            dataset: torch Dataset or IterableDataset.
            collate_fn: Makes a batch from a list of samples; None is torch's default.
            num_workers: Processes that load samples; 0 loads in this one.

        Returns:
            Loader with the engine's micro-batch size, over the data-parallel ranks.
        """
        line = self.mesh.group(("data",), self.communicator.rank)
        place, count = place_among(self.replica_group, line.index(self.communicator.rank), len(line))
        own: dict[str, Any] = {"rank": place, "world_size": count}
        own |= {"micro_batch_size": self.train_micro_batch_size_per_gpu(), "collate_fn": collate_fn}
        settings = self._module_settings
        return make_loader(
            settings.sampling,
            dataset,
            accumulation=self.gradient_accumulation_steps(),
            num_workers=num_workers,
            drop_last=settings.drop_last,
            **own,
        )

    # What users ask.

    def get_lr(self) -> list[float]:
        """Return the learning rate of every optimizer group that has one."""
        return list(learning_rates(self.optimizer.param_groups)) if self.optimizer is not None else []

    def destroy(self) -> None:
        """Remove the hooks and release buffers. Collective with sharded parameters, of which every rank then holds all.

        The module keeps its parameters' values. A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._close_saving()
        if self.adapter.residency.away:
            self.reload_states()
        self.zero.params.wait_all_gathers()
        if self._compiled_units is not None:
            self._compiled_units.release()
        self._rewrites.remove()
        self.leave_receivers()
        self.runtime.leave_groups()
        self._recorder.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self._own_module, name)
