"""Lightning's Trainer over polyaccel: the strategy `"polyaccel"`, and `"polyaccel_stage_0"` to `"polyaccel_stage_3"`.

Importing this module registers the names, and those of `polyaccel_trainers.fabric` too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel_trainers import fabric
from polyaccel_trainers.configs import TAG, engine_config
from polyaccel_trainers.fabric import REST, STAGES, precision_of

__all__ = ["PolyaccelPrecision", "PolyaccelStrategy", "fabric"]


class PolyaccelPrecision(Precision):
    """Backward passes and updates by the engine, in the precision that its config has."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision = precision

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, which add up until the update."""
        model.trainer.strategy.engine.backward(tensor, *args, scale_wrt_gas=False, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, which computes gradients, and update."""
        result = closure()
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            hint = "return a loss on every rank"
            raise PolyaccelError("training_step returned None, which skips a backward pass", hint=hint)
        model.trainer.strategy.engine.step()
        return result


class PolyaccelStrategy(DDPStrategy):
    """A strategy whose model is an engine of polyaccel.

    Args:
        stage: Stage of ZeRO, 0 to 3, unless `config` has one.
        config: Config of polyaccel, a mapping or a JSON file, without batch sizes and accumulation.
        exclude_frozen_parameters: Leave parameters that are not trained out of checkpoints.
        **kwargs: Arguments of `DDPStrategy`.

    Example:
        ```python
        import polyaccel_trainers.lightning
        trainer = Trainer(strategy="polyaccel_stage_3", devices=2)
        ```
    """

    def __init__(
        self,
        stage: int = 2,
        config: Mapping[str, Any] | str | PathLike[str] | None = None,
        exclude_frozen_parameters: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._forward_redirection = _ForwardRedirection()  # type: ignore[assignment]  # DDP's looks for DDP
        self._stage, self._config = stage, config
        self._exclude_frozen = exclude_frozen_parameters
        self._has_failed = False

    @property
    def engine(self) -> TorchEngine:
        """The engine. Raises PolyaccelError before `setup`."""
        if not isinstance(self.model, TorchEngine):
            raise PolyaccelError("there is no engine yet", hint="use it inside fit, validate, test or predict")
        return self.model

    @property
    def precision_plugin(self) -> Precision:
        """What computes gradients and updates."""
        found = self._precision_plugin
        return found if found is not None else PolyaccelPrecision("32-true")

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        is_other = plugin is not None and not isinstance(plugin, PolyaccelPrecision)
        self._precision_plugin = PolyaccelPrecision(precision_of(plugin)[0]) if is_other else plugin

    def setup(self, trainer: pl.Trainer) -> None:
        """Make the module an engine."""
        assert self.accelerator is not None  # the trainer has set both
        assert self.model is not None
        self.accelerator.setup(trainer)
        self._has_failed = False
        module = self.lightning_module
        assert module is not None  # as above
        optimizer = schedule = None
        self.optimizers, self.lr_scheduler_configs = [], []
        if trainer.state.fn == TrainerFn.FITTING:
            optimizers, schedules = _init_optimizers_and_lr_schedulers(module)
            if len(optimizers) > 1 or len(schedules) > 1:
                count = len(optimizers)
                hint = "return one optimizer and one schedule from configure_optimizers"
                raise PolyaccelError(f"the module has {count} optimizers", hint=hint, value=count)
            optimizer = optimizers[0] if optimizers else None
            schedule = schedules[0] if schedules else None
        made = engine_config(self._config, self._stage, precision_of(self.precision_plugin)[1])
        self.model = polyaccel.initialize(model=module, optimizer=optimizer, config=made)[0]
        if optimizer is not None:
            self.optimizers = [self.engine.optimizer]
            if schedule is not None:
                schedule.scheduler.optimizer = self.engine.optimizer
                self.lr_scheduler_configs = [schedule]
        self.setup_precision_plugin()
        self.barrier()

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Parameters of `configure_model` get no memory before they are sharded."""
        made = engine_config(self._config, self._stage, "fp32")
        with polyaccel.zero.Init() if made["zero_optimization"].get("stage") == 3 else nullcontext():
            yield

    # Checkpoints: the engine's own, and a file with the rest.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The engine loads its part."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The engine has restored it."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: the engine saves its parameters."""
        return {} if isinstance(self.model, TorchEngine) else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: the engine saves its states."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save a folder. Collective."""
        folder = Path(self.broadcast(filepath))
        if self.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            self.checkpoint_io.save_checkpoint(checkpoint, folder / REST, storage_options=storage_options)
        self.engine.save_checkpoint(str(folder), tag=TAG, exclude_frozen_parameters=self._exclude_frozen)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder of `save_checkpoint`. Collective."""
        folder = Path(self.broadcast(checkpoint_path))
        module = self.lightning_module
        assert module is not None  # it is set up
        self.engine.load_checkpoint(
            str(folder),
            tag=TAG,
            load_module_strict=module.strict_loading and not self._exclude_frozen,
            load_optimizer_states=bool(self.optimizers),
            load_module_only=not self.optimizers,
        )
        found: dict[str, Any] = self.checkpoint_io.load_checkpoint(folder / REST, weights_only=weights_only)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: the engine has loaded its parameters."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: the engine has loaded its states."""

    # Ends.

    def on_exception(self, exception: BaseException) -> None:
        """Remember it: other ranks may take no part any more."""
        self._has_failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Give the module its parameters back."""
        if isinstance(self.model, TorchEngine):
            engine, self.model = self.model, self.lightning_module
            if not self._has_failed:
                engine.destroy()
            self.optimizers = []
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names."""
        for name, stage in STAGES.items():
            strategy_registry.register(name, cls, description=f"ZeRO stage {stage} of polyaccel", stage=stage)


if "polyaccel" not in StrategyRegistry:
    PolyaccelStrategy.register_strategies(StrategyRegistry)
