"""Accelerate over polyaccel: an `Accelerator` whose prepared model is an engine.

Accelerate has no registry of engines, so `Accelerator` is a subclass. Its ranks are Accelerate's own (`MULTI_CPU`,
`MULTI_GPU`), and loaders, schedulers, trackers and metrics are too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel_trainers.configs import TAG, engine_config

_PRECISIONS = {"no": "fp32", "bf16": "autocast"}


@dataclass
class PolyaccelPlugin:
    """How an `Accelerator` trains.

    Attributes:
        stage: Stage of ZeRO, 0 to 3, unless `config` has one.
        config: Config of polyaccel, a mapping or a JSON file, without batch sizes and accumulation.
    """

    stage: int = 2
    config: Mapping[str, Any] | str | PathLike[str] | None = None


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # untyped
    """`accelerate.Accelerator` over an engine of polyaccel; it takes the same arguments.

    `prepare` takes the model and its optimizer in one call. A model alone becomes an engine for evaluation.

    Args:
        *args: Arguments of `accelerate.Accelerator`.
        polyaccel_plugin: Stage and config. None is stage 2.
        **kwargs: Named arguments of `accelerate.Accelerator`.

    Raises:
        PolyaccelError: The mixed precision is neither "no" nor "bf16".

    Example:
        ```python
        accelerator = Accelerator(polyaccel_plugin=PolyaccelPlugin(stage=3))
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        ```
    """

    def __init__(self, *args: Any, polyaccel_plugin: PolyaccelPlugin | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.polyaccel_plugin = polyaccel_plugin or PolyaccelPlugin()
        self.engine: TorchEngine | None = None
        if self.mixed_precision not in _PRECISIONS:
            hint = 'use "bf16" or "no", or a section of the config of PolyaccelPlugin'
            raise PolyaccelError(
                f"mixed precision {self.mixed_precision!r} is not supported", hint=hint, value=self.mixed_precision
            )

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Make the model an engine, and prepare the rest as Accelerate does.

        Raises PolyaccelError for a second model or optimizer.
        """
        models = [one for one in args if isinstance(one, nn.Module) and not isinstance(one, TorchEngine)]
        optimizers = [one for one in args if _is_plain_optimizer(one)]
        if (
            len(models) > 1
            or len(optimizers) > 1
            or (models and self.engine is not None)
            or (optimizers and not models)
        ):
            hint = "call prepare once, with one model and its optimizer; use another Accelerator for another model"
            count = (len(models), len(optimizers))
            raise PolyaccelError(
                f"prepare was given {count[0]} models and {count[1]} optimizers", hint=hint, value=count
            )
        if not models:
            return super().prepare(*args, device_placement=device_placement)
        self.engine = self._initialize(models[0], optimizers[0] if optimizers else None)
        self._models.append(self.engine)
        wrapped = None
        if optimizers:
            wrapped = PolyaccelOptimizer(self.engine)
            self._optimizers.append(wrapped)
        placed = device_placement or [None] * len(args)
        others = [
            (one, place)
            for one, place in zip(args, placed, strict=True)
            if not any(one is taken for taken in (*models, *optimizers))
        ]
        for one, _ in others:
            if isinstance(one, torch.optim.lr_scheduler.LRScheduler) and optimizers:
                one.optimizer = self.engine.optimizer
        result = iter(())
        if others:
            found = super().prepare(*(one for one, _ in others), device_placement=[place for _, place in others])
            result = iter(found if len(others) > 1 else (found,))
        made = [
            self.engine if one is models[0] else wrapped if optimizers and one is optimizers[0] else next(result)
            for one in args
        ]
        return tuple(made) if len(made) > 1 else made[0]

    def _initialize(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> TorchEngine:
        plugin = self.polyaccel_plugin
        config = engine_config(plugin.config, plugin.stage, _PRECISIONS[self.mixed_precision])
        engine: TorchEngine = polyaccel.initialize(model=model, optimizer=optimizer, config=config)[0]
        return engine

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients; those of several passes add up until the optimizer steps."""
        self._required().backward(loss / self.gradient_accumulation_steps, scale_wrt_gas=False, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Each pass reduces its gradients, so that no rank holds those of the whole model."""
        yield

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip at every stage. Collective."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip at every stage."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the module inside of an engine."""
        inner = model.module if isinstance(model, TorchEngine) else model
        found: nn.Module = super().unwrap_model(inner, *args, **kwargs)
        return found

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return whole parameters, each in separate memory, as safetensors asks for. Collective."""
        if isinstance(model, TorchEngine):
            return {name: one.clone() for name, one in model.module_state_dict().items()}
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save everything: the engine in its own format, the rest as Accelerate does. Collective."""
        with self._without_engine():
            path: str = super().save_state(output_dir, safe_serialization, **kwargs)
        self._required().save_checkpoint(path, tag=TAG)
        return path

    def load_state(self, input_dir: str | None = None, **kwargs: Any) -> None:
        """Load what `save_state` saved, at any number of ranks and any stage. Collective."""
        if input_dir is None:
            input_dir = self._newest_state()
        self._required().load_checkpoint(input_dir, tag=TAG)
        with self._without_engine():
            super().load_state(input_dir, **kwargs)

    def free_memory(self, *objects: Any) -> Any:
        """Forget the engine too, which gives the module its parameters back."""
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None
        return super().free_memory(*objects)

    def _newest_state(self) -> str:
        folder = Path(self.project_dir or ".") / "checkpoints"
        found = [one for one in folder.glob("checkpoint_*") if one.name.rpartition("_")[2].isdecimal()]
        if not found:
            hint = "name a folder of save_state"
            raise PolyaccelError(f"no saved state is in {folder}", hint=hint, value=str(folder))
        return str(max(found, key=lambda one: int(one.name.rpartition("_")[2])))

    @contextmanager
    def _without_engine(self) -> Iterator[None]:
        held = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers = held

    def _required(self) -> TorchEngine:
        if self.engine is None:
            raise PolyaccelError("there is no engine yet", hint="call accelerator.prepare(model, optimizer) first")
        return self.engine


class PolyaccelOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # untyped
    """The optimizer of a prepared model: `step` updates when gradients are complete."""

    def __init__(self, engine: TorchEngine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self._engine = engine

    def step(self, closure: Any = None) -> None:
        """Update, unless more passes follow. Raises PolyaccelError for a closure."""
        if closure is not None:
            hint = "call accelerator.backward, and step without one"
            raise PolyaccelError("the optimizer of an engine was given a closure", hint=hint, value=closure)
        if self.gradient_state.sync_gradients:
            before = self._engine.skipped_steps
            self._engine.step()
            self._is_overflow = self._engine.skipped_steps > before


def _is_plain_optimizer(one: Any) -> bool:
    return isinstance(one, torch.optim.Optimizer) and not isinstance(one, AcceleratedOptimizer)
