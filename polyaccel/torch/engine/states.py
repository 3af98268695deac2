"""The states of a torch engine: the layout of its parameters, and what it saves and loads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import ref

from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.load.name_map import NameMap
from polyaccel.checkpoint.save.protocol import SaveContents
from polyaccel.engine.base import Engine
from polyaccel.engine.replica_groups import find_saved
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import PolyaccelError
from polyaccel.torch.api.client_optimizer import ClientOptimizer
from polyaccel.torch.api.optimizer import ParamGroups
from polyaccel.torch.checkpoint.averaged import AveragesWeights
from polyaccel.torch.checkpoint.contents import TorchRun, contents_of
from polyaccel.torch.checkpoint.custom_loading import CustomLoad
from polyaccel.torch.checkpoint.load import LoadOptions, frozen_with_states, load_run
from polyaccel.torch.checkpoint.offload_states import OffloadedStates, OffloadsStates
from polyaccel.torch.checkpoint.unfreezing import is_due, migrate_optimizer_state
from polyaccel.torch.checkpoint.whole_model import HasWholeModel
from polyaccel.torch.rewrites import RewriteContext
from polyaccel.torch.settings import ModuleSettings
from polyaccel.torch.sharding.backward import BackwardRunner
from polyaccel.torch.sharding.module_adapter import TorchAdapter
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.update.optimizers import SliceOptimizer


class TorchStates(Engine, OffloadsStates, AveragesWeights, HasWholeModel):
    """Parameters, gradients and optimizer states of a torch module: laid out, saved, loaded, and offloaded."""

    zero: ZeroEngine
    runtime: EngineBuilder
    training_dataloader: Any
    _stage_runtime: EngineBuilder
    _rewrites: RewriteContext
    _module_settings: ModuleSettings
    _passes: BackwardRunner
    _own_data: Iterator[Any] | None = None

    @property
    @abstractmethod
    def _own_module(self) -> nn.Module:
        """The user's module, whose parameters may still arrive."""

    # Rewrites of the module. See `polyaccel.torch.rewrites`.

    def shard_parameters(self) -> tuple[str, ...]:
        """Lay out the parameters in buckets, for `ZeroShards`. Collective.

        Returns:
            Full names of the parameters.
        """
        self._lay_out(self._rewrites.slice_optimizer, self._rewrites.groups)
        return tuple(spec.fqn for spec in self.adapter.param_specs())

    def unshard_parameters(self) -> None:
        """Give the parameters memory of their own again. Collective where they are sharded."""
        self.adapter.release()
        self._passes.close()
        self.zero.close()

    def saved_tensor_hooks(self) -> saved_tensors_hooks | None:
        """Return hooks that save references in place of sharded parameters.

        Returns:
            The hooks, for a block that is recomputed; None without sharded parameters.
        """
        return self.adapter.sharding.saved_tensor_hooks()

    def _lay_out(
        self, slice_optimizer: SliceOptimizer | None, groups: ParamGroups, trained: Collection[str] = ()
    ) -> ZeroEngine:
        """Build the step of the module's parameters: those that require a gradient are trained, and `trained`."""
        self.adapter = TorchAdapter(
            self._own_module,
            [group["params"] for group in groups],
            self.accelerator,
            self.runtime.param_dtype,
            self._passes,
            along=self._stage_runtime.process_group_for,
            checks_contents=self._module_settings.checks_contents,
            sparse_gradients=self._module_settings.sparse_gradients,
            trained=trained,
        )
        resident = isinstance(slice_optimizer, ClientOptimizer)
        self.zero = self._stage_runtime.zero_step(self.adapter, slice_optimizer, groups, self.timer, resident=resident)
        self._offloaded = OffloadedStates(self.zero, self.adapter)
        self.adapter.engine_ref = ref(self)
        self.adapter.attach(self.zero)
        return self.zero

    def _train_unfrozen(self, resumed: Collection[str] = ()) -> None:
        """Lay out again if parameters were unfrozen, or are `resumed` with a checkpoint's states. Collective then."""
        if is_due(self.adapter, before := self.zero, resumed):
            if self.replica_group is not None:
                raise PolyaccelError(
                    "parameters were unfrozen, whose outer weights replica groups do not have",
                    hint="unfreeze them before polyaccel.initialize",
                )
            arguments = before.optimizer, self.optimizer.param_groups, {*before.steps, *resumed}
            migrate_optimizer_state(self.adapter, before, partial(self._lay_out, *arguments))

    # Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything needed to resume exactly, at any world size. Collective.

        With `checkpoint.async` it returns when this rank's part is copied; `wait_for_checkpoint` waits for the rest.

        Args:
            save_dir: Folder of checkpoints, or place in the storage that the config names.
            tag: Name of this checkpoint; None is `global_step` and the number of steps.
            client_state: Values of the script's own, which `load_checkpoint` returns.
            save_latest: Make this the checkpoint that a load without a tag takes.
            exclude_frozen_parameters: Leave out parameters that are not trained, such as the base model of adapters.

        Returns:
            True, as in DeepSpeed.

        Raises:
            CheckpointError: On every rank: this save failed, or the one before it, or an accumulation is unfinished.

        Example:
            ```python
            engine.save_checkpoint("checkpoints", client_state={"epoch": epoch})
            path, client_state = engine.load_checkpoint("checkpoints")
            ```
        """
        self.adapter.require_nothing_away()
        self.adapter.adopt_changes()
        contents = partial(self._contents, exclude_frozen=exclude_frozen_parameters)
        return self._save(save_dir, tag, client_state, save_latest, contents)

    def _contents(self, client_state: Mapping[str, Any], *, exclude_frozen: bool = False) -> SaveContents:
        allows_bytes = self._saver.policy.allows_bytes
        return contents_of(self._run(), client_state, allows_bytes=allows_bytes, exclude_frozen=exclude_frozen)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        name_map: NameMap | None = None,
        custom_load_fn: CustomLoad | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Resume from a checkpoint of any world size, stage and framework. Collective.

        Args:
            load_dir: Folder of checkpoints, or place in the storage that the config names.
            tag: Name of the checkpoint. None takes the latest, or a newer replica in memory; if it is not complete, the
                newest complete one, with a warning.
            load_module_strict: False leaves parameters as they are that the checkpoint lacks, or whose states it lacks.
            load_optimizer_states: False leaves the optimizer's states as they are.
            load_lr_scheduler_states: False leaves the learning-rate schedule as it is.
            load_module_only: Load parameters and buffers only.
            name_map: Saved names of parameters that have other names here: patterns, a function, or "flax".
            custom_load_fn: Called as `fn(src=state_dict, dst=module)`; writes the checkpoint's tensors into `dst`
                itself.

        Returns:
            (path of the checkpoint, client state).

        Raises:
            CheckpointError: On every rank and with nothing changed: it is missing or damaged, has another optimizer's
                states, or, with `load_module_strict`, lacks parameters or their states.
        """
        self.adapter.require_nothing_away()
        choices = load_optimizer_states, load_lr_scheduler_states, load_module_only
        wanted = LoadOptions.chosen(load_module_strict, *choices, name_map, custom_load_fn)

        def load(saved: CheckpointReader) -> tuple[str, dict[str, Any]]:
            resumed = frozen_with_states(self._run(), saved, name_map) if wanted.optimizer_states else ()
            self._train_unfrozen(resumed)
            return load_run(self._run(), saved, wanted)

        loaded = self._resume(
            find_saved(self.replica_group, load_dir, self.runtime.storage), tag, load, is_whole=wanted.is_whole
        )
        self._own_data = None  # its position has changed
        self.adapter.forget_changes()
        return loaded

    def _run(self) -> TorchRun:
        own = {"model_parallel_group": self.zero.model_parallel_group, "data": self.training_dataloader}
        return self._training_run(TorchRun, adapter=self.adapter, **own)
