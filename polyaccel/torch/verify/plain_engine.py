"""`PlainEngine`: an engine's calls on plain torch, for the runs that a verification compares with.

Every rank holds the whole module and an optimizer of torch, and whole gradients are averaged over all ranks. Ranks that
share one sample (along `tensor`, `sequence` or `pipe`) all compute it, so the average is that over the data ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.config import Config
from polyaccel.core.types import ReduceOp
from polyaccel.engine.policies.engines import native_optimizer_of
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import PolyaccelError
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.torch.api.optimizer import make_groups, torch_optimizer
from polyaccel.torch.data import RepeatingLoader, ShardedDataLoader, call_with, loss_of, to_device
from polyaccel.torch.verify.recording import StepRecording
from polyaccel.torch.verify.shadow import move_weights
from polyaccel.verify.variant import ActiveRun

_TORCH = {"adagrad": "Adagrad", "adam": "Adam", "adamax": "Adamax", "adamw": "AdamW", "sgd": "SGD"}
OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


class PlainEngine(nn.Module):
    """The engine of a plain run."""

    def __init__(
        self,
        run: ActiveRun,
        model: nn.Module,
        runtime: EngineBuilder,
        client: OptimizerLike | None,
        model_parameters: Iterable[Any] | None,
        *,
        records_draws: bool,
    ) -> None:
        super().__init__()
        self.runtime, self.communicator, self.mesh = runtime, runtime.communicator, runtime.mesh
        self.device = torch_device_of(runtime.accelerator)
        model.to(self.device)
        self._modules["module"] = model
        self._broadcast(model)
        move_weights(model, run.variant.moved)
        self.optimizer: Any = _optimizer(runtime, model, client, model_parameters)
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.global_steps = self.micro_steps = 0
        self._losses: list[float] = []
        self._norm: float | None = None
        self._own_data: Iterator[Any] | None = None
        self._recording = StepRecording(
            run,
            self.communicator.rank,
            model,
            gradient_of=lambda _, parameter: parameter.grad,
            value_of=lambda _, parameter: parameter,
            groups=lambda: self.optimizer.param_groups,
            records_draws=records_draws,
        )

    def _broadcast(self, model: nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.numel() and tensor.layout is torch.strided and not tensor.is_complex():
                flat = tensor.detach().contiguous().reshape(-1).clone()
                self.communicator.broadcast(wrap_torch(flat), 0)
                tensor.detach().copy_(flat.view(tensor.shape))

    # The calls of an engine.

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the module."""
        return self.module(*inputs, **named)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute the gradients of this rank's micro-batch."""
        shared = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        shared.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        self._losses.append(float(loss.detach()))
        return shared.detach()

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` as it is."""
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context without effect: gradients are averaged in `step` alone."""
        yield

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; update the module at the accumulation boundary. Collective."""
        self.micro_steps += 1
        if self.micro_steps % self.gradient_accumulation_steps():
            return
        self._average()
        self._recording.before_update()
        clipping = self.runtime.config.gradient_clipping
        trained = [one for group in self.optimizer.param_groups for one in group["params"] if one.grad is not None]
        grads = [one.grad.double() for one in trained if one.grad is not None]  # as the engine adds up
        norm = nn.utils.get_total_norm(grads).float() if grads else torch.tensor(0.0)
        if clipping:
            nn.utils.clip_grads_with_norm_(trained, clipping, norm)
        self.optimizer.step()
        self.global_steps += 1
        self._norm = float(norm)
        self._recording.after_update(self._norm)
        self.zero_grad()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._losses.clear()
        self._recording.end_step(loss)

    def _average(self) -> None:
        factor = 1.0
        if self.runtime.config.gradient_allreduce_op == "sum":
            factor = len(self.mesh.group(("data",), self.communicator.rank))
        trained = [one for one in self.module.parameters() if one.requires_grad]
        arrived = torch.tensor([float(one.grad is not None) for one in trained], device=self.device)
        self.communicator.all_reduce(wrap_torch(arrived), ReduceOp.MAX)
        for parameter, is_there in zip(trained, arrived.tolist(), strict=True):
            if not is_there:
                continue  # no rank has one: the optimizer leaves it as it is
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            flat = gradient.detach().contiguous().reshape(-1)
            self.communicator.all_reduce(wrap_torch(flat), ReduceOp.SUM)
            parameter.grad = (flat * (factor / self.communicator.world_size)).view(parameter.shape)

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """Run one optimizer step, with all its micro-batches. Collective."""
        self.train()
        losses = []
        for _ in range(self.gradient_accumulation_steps()):
            loss = loss_of(call_with(self, to_device(next(self._data(data_iter)), self.device)))
            self.backward(loss)
            losses.append(loss.detach())
            self.step()
        return torch.stack(losses).mean()

    def _data(self, data_iter: Any) -> Iterator[Any]:
        if data_iter is not None:
            return iter(data_iter) if not hasattr(data_iter, "__next__") else data_iter
        if self._own_data is None:
            self._own_data = iter(RepeatingLoader(self.training_dataloader))
        return self._own_data

    def deepspeed_io(
        self, dataset: Any, *, collate_fn: Callable[[list[Any]], Any] | None = None, num_workers: int = 0
    ) -> ShardedDataLoader[Any]:
        """Build the loader that the engine would build."""
        line = self.mesh.group(("data",), self.communicator.rank)
        own: dict[str, Any] = {"rank": line.index(self.communicator.rank), "world_size": len(line)}
        own |= {"drop_last": self.runtime.config.dataloader_drop_last, "num_workers": num_workers}
        size = self.train_micro_batch_size_per_gpu()
        return ShardedDataLoader(dataset, micro_batch_size=size, collate_fn=collate_fn, **own)

    # What scripts ask.

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of a step."""
        return self.runtime.config.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-batch."""
        return self.runtime.config.train_micro_batch_size_per_gpu

    def train_batch_size(self) -> int:
        """Return the samples of a step."""
        return self.runtime.config.train_batch_size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step` updates the module."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last update's gradients."""
        return self._norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of every optimizer group."""
        return [group["lr"] for group in self.optimizer.param_groups if "lr" in group]

    def destroy(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self.module, name)


def has_equivalent(config: Config, *, has_client: bool) -> bool:
    """Whether torch has an optimizer to compare the script's or the config's with."""
    section = config.optimizer
    return has_client or section is None or section.type not in OPTIMIZERS or section.type.lower() in _TORCH


def _optimizer(
    runtime: EngineBuilder, model: nn.Module, client: OptimizerLike | None, model_parameters: Iterable[Any] | None
) -> torch.optim.Optimizer:
    """The script's optimizer, or that of torch which has the config's formula. Raises PolyaccelError for others."""
    if isinstance(client, torch.optim.Optimizer):
        return client
    groups = make_groups(model_parameters, model, {})
    if client is not None:
        return client(groups)
    section = runtime.config.optimizer
    if section is None:
        raise PolyaccelError("a program without an optimizer was to be verified", hint='add "optimizer" to the config')
    native = native_optimizer_of(runtime.config)
    if native is None:
        return torch_optimizer(section.type, section.params, groups)
    _, defaults = native
    kind = _TORCH.get(section.type.lower())
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
