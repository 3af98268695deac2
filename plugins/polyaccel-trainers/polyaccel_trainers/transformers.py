"""Transformers' `Trainer` over polyaccel, with a plugin or a `DistributedConfig`.

The Trainer makes its own `Accelerator` and has no registry, so it is a subclass, which gives it another one.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import trainer as home
from transformers.trainer import SCHEDULER_NAME

from polyaccel.errors import PolyaccelError
from polyaccel_trainers.accelerate import Accelerator, PolyaccelPlugin
from polyaccel_trainers.configs import TAG

_ELSEWHERE = ("tp_size", "pp_size", "dp_replicate_size")


def plugin_of(distributed_config: transformers.DistributedConfig) -> PolyaccelPlugin:
    """Return the plugin for what a `DistributedConfig` says: FSDP is stage 3, and experts may be spread.

    Args:
        distributed_config: Config of transformers. Do not give it to `from_pretrained` too.

    Returns:
        A plugin for `Trainer` and `Accelerator`.

    Raises:
        PolyaccelError: It names tensor or pipeline parallelism, or replicas.

    Example:
        ```python
        plugin = plugin_of(DistributedConfig(fsdp_size=8, fsdp_cpu_offload=True))
        ```
    """
    for name in _ELSEWHERE:
        if (getattr(distributed_config, name) or 1) > 1:
            value = getattr(distributed_config, name)
            hint = (
                "use polyaccel.initialize, whose loader deals samples to such ranks; Accelerate deals to each process"
            )
            raise PolyaccelError(f"DistributedConfig has {name} = {value}", hint=hint, value=value)
    zero: dict[str, Any] = {"stage": 3 if (distributed_config.fsdp_size or 1) > 1 else 0}
    if distributed_config.fsdp_cpu_offload:
        zero |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    config: dict[str, Any] = {"zero_optimization": zero}
    if distributed_config.fsdp_mixed_precision:
        config["bf16"] = {"enabled": True}
    if (distributed_config.ep_size or 1) > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": distributed_config.ep_size}
    return PolyaccelPlugin(config=config)


class Trainer(transformers.Trainer):  # type: ignore[misc]  # untyped
    """`transformers.Trainer` over an engine of polyaccel; it takes the same arguments.

    Args:
        *args: Arguments of `transformers.Trainer`.
        polyaccel_plugin: Stage and config. None is stage 2.
        **kwargs: Named arguments of `transformers.Trainer`.

    Example:
        ```python
        trainer = Trainer(model, arguments, train_dataset=data, polyaccel_plugin=PolyaccelPlugin(stage=3))
        trainer.train()
        ```
    """

    def __init__(self, *args: Any, polyaccel_plugin: PolyaccelPlugin | None = None, **kwargs: Any) -> None:
        self._polyaccel_plugin = polyaccel_plugin
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make an `Accelerator` of polyaccel."""
        own = home.Accelerator
        home.Accelerator = partial(Accelerator, polyaccel_plugin=self._polyaccel_plugin)
        try:
            super().create_accelerator_and_postprocess()
        finally:
            home.Accelerator = own

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save whole parameters, for `from_pretrained`. Collective."""
        engine = self.accelerator.engine
        if engine is None:
            super().save_model(output_dir, _internal_call)
            return
        self._save(output_dir, state_dict=self.accelerator.get_state_dict(engine))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.accelerator.engine.save_checkpoint(output_dir, tag=TAG)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.accelerator.engine.load_checkpoint(checkpoint, tag=TAG)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))
