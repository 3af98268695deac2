"""`PlainEngine`: an engine's calls on plain torch, for the runs that a verification compares with.

Every rank holds the whole module and an optimizer of torch, and whole gradients are averaged over all ranks. Ranks that
share one sample (along `tensor`, `sequence` or `pipe`) all compute it, so the average is that over the data ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.config import Config
from polyaccel.core.types import ReduceOp
from polyaccel.engine.policies.engines import native_optimizer_of
from polyaccel.engine.policies.muon import MUON
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import PolyaccelError
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.torch.api.client_optimizer import needs_closure
from polyaccel.torch.api.fragments import serve_plain
from polyaccel.torch.api.mup import MUP, mup_groups
from polyaccel.torch.api.optimizer import ZeroOptimizer, make_groups, torch_optimizer
from polyaccel.torch.data import cast_floats
from polyaccel.torch.engine.autocast import ForwardAutocast
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.muon.groups import muon_groups
from polyaccel.torch.muon.plain import Muon
from polyaccel.torch.random_copy import choose_plain_kernels
from polyaccel.torch.settings import ModuleSettings
from polyaccel.torch.sharding.backward import BackwardRunner
from polyaccel.torch.verify.recording import Quantities, StepRecording, attributes_of
from polyaccel.torch.verify.saved_runs import PlainSaves
from polyaccel.torch.verify.shadow import move_weights
from polyaccel.torch.verify.states import plain_states
from polyaccel.torch.weight_transfer.sends import SentWeights
from polyaccel.verify.variant import ActiveRun
from polyaccel.zero.fragments import GRAD, PARAM
from polyaccel.zero.update.global_norm import GradientNorm
from polyaccel.zero.update.optimizer_step import StepResult

_TORCH = {"adagrad": "Adagrad", "adam": "Adam", "adamax": "Adamax", "adamw": "AdamW", "sgd": "SGD"}
_SHARE = "share of the accumulation in the loss of this pass"
_SHARED_AXES = ("pipe", "sequence", "tensor")
_CHUNK = 1 << 16
OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


class PlainEngine(TorchEngine):
    """The engine of a plain run: what scripts ask and set is a `TorchEngine`'s, and nothing of what it computes."""

    torch_optimizer: torch.optim.Optimizer

    def __init__(
        self,
        run: ActiveRun,
        model: nn.Module,
        runtime: EngineBuilder,
        client: OptimizerLike | None,
        model_parameters: Iterable[Any] | None,
        *,
        records_draws: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        self._compose(runtime.engine_parts())
        self._recorder.memory = lambda: None
        self.runtime = self._stage_runtime = runtime
        self._module_settings = ModuleSettings(
            autocast_dtype=None,
            recompute=None,
            checks_contents=False,
            matrix_kernels="off",
            drop_last=runtime.config.dataloader_drop_last,
        )
        self._autocast = ForwardAutocast(self.device.type, None)
        self._passes = BackwardRunner(self.accelerator, self.counters, self.loss_scaler, self.timer)
        self._is_double = run.variant.is_double
        model.to(torch_device_of(runtime.accelerator))
        self._modules["module"] = model
        self._broadcast(model)
        move_weights(model, run.variant)
        if self._is_double:
            model.double()
            choose_plain_kernels(model)
        own = _optimizer(runtime, model, client, model_parameters)
        self.optimizer: Any = None
        if own is not None:
            self.torch_optimizer = own
            self.optimizer = ZeroOptimizer(own.param_groups, self._update, self.zero_grad)
        self.training_dataloader: Any = None
        self._own_data: Iterator[Any] | None = None
        self._losses: list[Tensor] = []
        self._saves = PlainSaves(self, run)
        self._hooked: set[nn.Parameter] = set()
        self._shared = run.record_of(self.communicator.rank).shared
        self._synchronizes, self._in_own_pass = True, False
        if self.optimizer is not None:
            self._record(run, model, records_draws=records_draws)

    def _record(self, run: ActiveRun, model: nn.Module, *, records_draws: bool) -> None:
        if needs_closure(self.torch_optimizer):
            kind = type(self.torch_optimizer).__name__
            hint = "verify the script with another optimizer: the rewrites are the same"
            raise PolyaccelError(f"{kind} evaluates the loss several times a step", hint=hint, value=kind)
        named = list(model.named_parameters())
        for _, parameter in named:
            serve_plain(parameter, partial(_tensor_of, ref(parameter), ref(self.torch_optimizer)))
        read = Quantities(
            gradient_of=lambda _, parameter: parameter.grad,
            value_of=lambda _, parameter: parameter,
            states=lambda: plain_states(self.torch_optimizer, named),
            groups=lambda: self.optimizer.param_groups,
            shares_samples=shares_samples(self.runtime) or not records_draws,
            attributes=dict(attributes_of(model)),
        )
        self._recording = StepRecording(run, self.communicator.rank, self, model, read)

    def _broadcast(self, model: nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.numel() and tensor.layout is torch.strided and not tensor.is_complex():
                flat = tensor.detach().contiguous().reshape(-1).clone()
                self.communicator.broadcast(wrap_torch(flat), 0)
                tensor.detach().copy_(flat.view(tensor.shape))

    # Running the module.

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self._own_module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the module."""
        if self._is_double:
            inputs, named = cast_floats((inputs, named), torch.float64)
        if self.training and torch.is_grad_enabled():
            self._let_gradients_be_divided()
        outputs = self._own_module(*inputs, **named)
        if self.optimizer is not None and self.training and torch.is_grad_enabled():
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                    leaf.register_hook(self._on_users_pass)  # type: ignore[no-untyped-call]
        return outputs

    def _roll_out(self, generate: Callable[[bool], Any], cache_nbytes: int) -> Any:
        return generate(False)

    def _tensor_ranks(self) -> None:
        return None

    def _let_gradients_be_divided(self) -> None:
        """Divide what each pass adds to a gradient by the accumulation steps, whichever engine runs the pass."""
        for parameter in self._own_module.parameters():
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_hook(self._share_of)  # type: ignore[no-untyped-call]

    def _share_of(self, gradient: Tensor) -> Tensor:
        share = self._shared.get(_SHARE, 1.0)
        factor = 1.0 if share is None else 1.0 / self.gradient_accumulation_steps() / share
        return gradient if factor == 1.0 else gradient * factor

    def _on_users_pass(self, gradient: Tensor) -> None:
        """Let gradients be averaged when the pass that has begun at an output ends, unless it is `backward`'s."""
        if not self._in_own_pass:
            self._in_own_pass = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_users_pass)

    def _end_users_pass(self) -> None:
        self._in_own_pass = False
        self._average_at_boundary()

    # Gradients.

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute the gradients of this rank's micro-batch."""
        share = 1.0 / self.gradient_accumulation_steps() if scale_wrt_gas else None
        shared = loss if share is None else loss * share
        self._in_own_pass, self._shared[_SHARE] = True, share
        try:
            shared.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        finally:
            self._in_own_pass = False
            del self._shared[_SHARE]
        self._losses.append(loss.detach())
        self._average_at_boundary()
        return shared.detach()

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` as it is."""
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which gradients are not averaged."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients."""
        nn.Module.zero_grad(self, set_to_none)
        self.counters.begin_window()

    def _set_batch(self, steps: int, train_batch_size: int) -> None:
        self.counters.set_batch(
            gradient_accumulation_steps=steps,
            train_batch_size=train_batch_size,
            waits_for_window=self.counters.is_in_window,
        )

    # The update.

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; update the module at the accumulation boundary. Collective."""
        if not self.counters.is_boundary:
            self.counters.advance()
            return
        self.optimizer.step()
        loss = sum(float(one) for one in self._losses) / len(self._losses) if self._losses else None
        self._losses.clear()
        self._end_step(self.optimizer.param_groups, loss, lr_kwargs or {})
        self._recording.end_step(loss)

    def _update(self, closure: Callable[[], Any] | None) -> None:
        while self._average(is_in_step=True):
            pass  # some rank has a pass more than this one
        trained = [one for group in self.optimizer.param_groups for one in group["params"] if one.grad is not None]
        if self.runtime.config.gradient_allreduce_op == "sum":
            for one in trained:
                one.grad *= len(self.mesh.group(("data",), self.communicator.rank))
        self._recording.before_update()
        clipping = self.runtime.config.gradient_clipping
        norm = torch.stack([_squares(one.grad) for one in trained]).sum().sqrt().float() if trained else torch.zeros(())
        if clipping:
            nn.utils.clip_grads_with_norm_(trained, clipping, norm)
        self.torch_optimizer.step()
        found = GradientNorm(float(norm), None)
        self._take_result(StepResult(True, found, found.clip_factor(clipping)))
        self._recording.after_update(float(norm))
        self.zero_grad()

    def _average_at_boundary(self) -> None:
        """Average gradients that a script may look at now. Collective at the boundary."""
        if self.optimizer is not None and self._synchronizes and self.counters.is_boundary:
            self._average(is_in_step=False)

    def _average(self, *, is_in_step: bool) -> bool:
        """Average the gradients of all ranks; returns whether some rank is not in `step` yet. Collective.

        What is averaged already stays as it is, so it may be called after each of several passes.
        """
        if self.communicator.world_size == 1:
            return False
        trained = [one for one in self._own_module.parameters() if one.requires_grad]
        facts = torch.tensor([float(not is_in_step), *(float(one.grad is not None) for one in trained)])
        facts = facts.to(self.device)
        self.communicator.all_reduce(wrap_torch(facts), ReduceOp.MAX)
        waits, *arrived = facts.tolist()
        for parameter, is_there in zip(trained, arrived, strict=True):
            if not is_there:
                continue  # no rank has one: the optimizer leaves it as it is
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            flat = gradient.detach().contiguous().reshape(-1).clone()
            self.communicator.all_reduce(wrap_torch(flat), ReduceOp.SUM)
            averaged = (flat / self.communicator.world_size).view(parameter.shape)
            if parameter.grad is None:
                parameter.grad = averaged
            else:
                parameter.grad.copy_(averaged)
        return bool(waits)

    # Whole states.

    def save_checkpoint(self, save_dir: str, tag: str | None = None, *more: Any, **named: Any) -> bool:
        """Keep the whole state, apart from the script's own checkpoints."""
        return self._saves.save(save_dir, tag, *more, **named)

    def load_checkpoint(self, load_dir: str, tag: str | None = None, *more: Any, **choices: Any) -> Any:
        """Continue from what `save_checkpoint` of this run kept. Raises CheckpointError where there is nothing."""
        return self._saves.load(load_dir, tag, *more, **choices)

    def wait_for_checkpoint(self) -> None:
        """Do nothing: what is saved is complete."""

    def save_16bit_model(self, *names: Any, **named: Any) -> bool:
        """Write nothing."""
        return True

    def send_weights(self, *names: Any, **named: Any) -> SentWeights:
        """Send nothing."""
        return SentWeights(self.global_steps, 0, 0, 0)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the module's state dict."""
        trained = {name for name, one in self._own_module.named_parameters() if one.requires_grad}
        own = {name for name, _ in self._own_module.named_parameters()}
        frozen = own - trained if exclude_frozen_parameters else set()
        return {name: one for name, one in self._own_module.state_dict().items() if name not in frozen}

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state dict of the module."""
        self._own_module.load_state_dict(state_dict, strict=strict)

    def destroy(self) -> None:
        """Do nothing."""

    def offload_states(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def reload_states(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


def _squares(gradient: Tensor) -> Tensor:
    """The sum of the squares of a gradient in float64, as the engine adds up, in parts that fit a cache."""
    flat = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    wide = (one.double() for one in torch.split(flat.reshape(-1), _CHUNK))
    return torch.stack([torch.dot(one, one) for one in wide]).sum().cpu() if flat.numel() else torch.zeros(()).double()


def _tensor_of(
    parameter: Callable[[], nn.Parameter | None], optimizer: Callable[[], torch.optim.Optimizer | None], kind: str
) -> Tensor | None:
    """What plain torch has of a parameter, as `safe_get_full_*` name it."""
    one, owner = parameter(), optimizer()
    if one is None or owner is None or kind in (PARAM, GRAD):
        return one if one is None or kind == PARAM else one.grad
    state = owner.state.get(one, {}).get(kind)
    return state if isinstance(state, Tensor) else None


def shares_samples(runtime: EngineBuilder) -> bool:
    """Whether several ranks compute parts of one sample, and draw other random numbers than one rank would."""
    return any(runtime.mesh.has_several(axis) for axis in _SHARED_AXES)


def has_equivalent(config: Config, *, has_client: bool) -> bool:
    """Whether torch has an optimizer to compare the script's or the config's with."""
    section = config.optimizer
    return has_client or section is None or section.type not in OPTIMIZERS or section.type.lower() in _TORCH


def _optimizer(
    runtime: EngineBuilder, model: nn.Module, client: OptimizerLike | None, model_parameters: Iterable[Any] | None
) -> torch.optim.Optimizer | None:
    """The script's optimizer, or that of torch which has the config's formula; None where there is neither. Raises
    PolyaccelError for others."""
    if isinstance(client, torch.optim.Optimizer):
        return client
    section = runtime.config.optimizer
    if client is None and section is None:
        return None
    groups = make_groups(model_parameters, model, {})
    if client is not None:
        return client(groups)
    assert section is not None  # see above
    native = native_optimizer_of(runtime.config)
    if section.type == MUON:
        return Muon(muon_groups(section.params, groups, model))
    if section.type in MUP:
        scaled = mup_groups(section.type, section.params, model_parameters, model)
        for group in scaled:
            group.pop("decoupled", None)
        return torch_optimizer(MUP[section.type], {}, scaled)
    if native is None:
        return torch_optimizer(section.type, section.params, groups)
    ours, defaults = native
    kind = None if ours.state_types else _TORCH.get(section.type.lower())
    if kind is None:
        raise PolyaccelError(
            f"torch has no optimizer to compare {section.type} with",
            hint="verify with AdamW: the rewrites are the same",
            value=section.type,
        )
    if defaults.pop("decoupled", kind == "AdamW") and kind == "Adam":
        kind = "AdamW"
    defaults.pop("bias_correction", None)
    return torch_optimizer(kind, defaults, groups)
