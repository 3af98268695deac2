"""Lightning's Fabric over polyaccel: the strategy `"polyaccel"`, and `"polyaccel_stage_0"` to `"polyaccel_stage_3"`.

Importing this module registers the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.wrappers import _FabricOptimizer
from torch import Tensor, nn

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel_trainers.configs import TAG, engine_config

REST = "lightning.ckpt"
"""The file of what an engine does not save."""
STAGES = {"polyaccel": 2, **{f"polyaccel_stage_{stage}": stage for stage in range(4)}}
_PRECISIONS = {"32-true": "fp32", "bf16-mixed": "autocast", "bf16-true": "bf16"}


def precision_of(plugin: Any) -> tuple[str, str]:
    """Return the precision's name in Lightning, and in `engine_config`. Raises PolyaccelError for others."""
    name = str(getattr(plugin, "precision", "32-true"))
    if name not in _PRECISIONS:
        hint = f"use one of {', '.join(_PRECISIONS)}, or a section of the strategy's config"
        raise PolyaccelError(f"precision {name!r} is not supported", hint=hint, value=name)
    return name, _PRECISIONS[name]


class _EveryPass(_BackwardSyncControl):
    """Each pass reduces its gradients, so that no rank holds those of the whole model."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()


class PolyaccelStrategy(DDPStrategy):
    """A strategy of Fabric whose module is an engine of polyaccel. `setup` takes a module and one optimizer.

    Args:
        stage: Stage of ZeRO, 0 to 3, unless `config` has one.
        config: Config of polyaccel, a mapping or a JSON file, without batch sizes and accumulation.
        **kwargs: Arguments of `DDPStrategy`.

    Example:
        ```python
        import polyaccel_trainers.fabric
        fabric = Fabric(strategy="polyaccel_stage_3", devices=2)
        ```
    """

    def __init__(
        self, stage: int = 2, config: Mapping[str, Any] | str | PathLike[str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._stage, self._config = stage, config
        self._engine: TorchEngine | None = None
        self._backward_sync_control = _EveryPass()  # type: ignore[assignment]  # DDP's looks for DDP

    @property
    def engine(self) -> TorchEngine:
        """The engine. Raises PolyaccelError before `setup`."""
        if self._engine is None:
            raise PolyaccelError("there is no engine yet", hint="call fabric.setup(module, optimizer) first")
        return self._engine

    @property
    def precision(self) -> Precision:
        """A precision that changes nothing: the engine's config has it."""
        return Precision()

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        self._own_precision = "fp32" if precision is None else precision_of(precision)[1]

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[Any, list[Any], Any]:
        """Make an engine. Raises PolyaccelError for several optimizers."""
        if len(optimizers) != 1:
            hint = "call fabric.setup(module, optimizer)"
            raise PolyaccelError(f"setup was given {len(optimizers)} optimizers", hint=hint, value=len(optimizers))
        self._engine = self._initialize(module, optimizers[0])
        if scheduler is not None:
            scheduler.optimizer = self._engine.optimizer
        return self._engine, [self._engine.optimizer], scheduler

    def setup_module(self, module: nn.Module) -> Any:
        """Make an engine for evaluation."""
        self._engine = self._initialize(module, None)
        return self._engine

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Raise PolyaccelError: an engine needs both."""
        hint = "call fabric.setup(module, optimizer)"
        raise PolyaccelError("an optimizer was set up without its module", hint=hint, value=type(optimizer).__name__)

    def _initialize(self, module: nn.Module, optimizer: Any) -> TorchEngine:
        config = engine_config(self._config, self._stage, self._own_precision)
        engine: TorchEngine = polyaccel.initialize(model=module, optimizer=optimizer, config=config)[0]
        return engine

    def backward(self, tensor: Tensor, module: nn.Module | None = None, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, which add up until the update."""
        self.engine.backward(tensor, *args, scale_wrt_gas=False, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> None:
        """Update."""
        self.engine.step()

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return whole parameters. Collective."""
        return module.module_state_dict() if isinstance(module, TorchEngine) else super().get_module_state_dict(module)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002 - Fabric's name
    ) -> None:
        """Save a folder. Collective. Raises PolyaccelError for a filter, and for a state without the module."""
        if filter is not None:
            raise PolyaccelError("a checkpoint of an engine has no filter", hint="leave filter out", value=filter)
        engine = _engine_in(state)
        folder = Path(self.broadcast(path))
        rest = self._convert_stateful_objects_in_state(_without_engine(state, engine), filter={})
        if self.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            self.checkpoint_io.save_checkpoint(rest, folder / REST, storage_options=storage_options)
        engine.save_checkpoint(str(folder), tag=TAG)
        self.barrier()

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder of `save_checkpoint` into the objects of `state`. Collective."""
        engine = _engine_in(state or {})
        folder = Path(self.broadcast(path))
        engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=strict)
        saved: dict[str, Any] = self.checkpoint_io.load_checkpoint(folder / REST, weights_only=weights_only)
        wanted = _without_engine(state, engine)
        _validate_keys_for_strict_loading(wanted.keys(), saved.keys(), strict=strict)
        for name, one in wanted.items():
            if name in saved:
                value = saved.pop(name)
                if hasattr(one, "load_state_dict"):
                    one.load_state_dict(value)
                else:
                    state[name] = value
        return saved

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names."""
        for name, stage in STAGES.items():
            strategy_registry.register(name, cls, description=f"ZeRO stage {stage} of polyaccel", stage=stage)


def _engine_in(state: Mapping[str, Any]) -> TorchEngine:
    found = [part for one in state.values() if isinstance(one, nn.Module) for part in _layers_around(one)]
    if len(found) != 1:
        hint = 'give {"model": model} with the module of fabric.setup'
        raise PolyaccelError(f"the state has {len(found)} engines", hint=hint, value=len(found))
    return found[0]


def _layers_around(one: nn.Module) -> list[TorchEngine]:
    return [part for part in one.modules() if isinstance(part, TorchEngine)]


def _without_engine(state: Mapping[str, Any], engine: TorchEngine) -> dict[str, Any]:
    return {name: one for name, one in state.items() if not _is_of(one, engine)}


def _is_of(one: Any, engine: TorchEngine) -> bool:
    """Whether the engine saves it: its module, or its optimizer in Fabric's wrapper."""
    if isinstance(one, nn.Module):
        return engine in one.modules()
    inner = one.optimizer if isinstance(one, _FabricOptimizer) else one
    return inner is engine.optimizer


if "polyaccel" not in STRATEGY_REGISTRY:
    PolyaccelStrategy.register_strategies(STRATEGY_REGISTRY)
