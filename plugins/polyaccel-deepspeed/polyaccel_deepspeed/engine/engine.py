"""The engine under DeepSpeed's names: `TorchEngine`, and what else trainers and scripts ask of DeepSpeed's engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from logging import getLogger
from math import inf, isnan
from typing import Any

from torch.utils.data import DistributedSampler, IterableDataset

from polyaccel.engine.base import Engine
from polyaccel.errors import ConfigError, PolyaccelError, Problem, ShardingError
from polyaccel.torch.checkpoint.custom_loading import CustomLoading
from polyaccel.torch.curriculum_loader import CurriculumDataLoader
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.sharding.leaf_modules import get_leaf_modules, set_z3_leaf_module
from polyaccel.zero.update.optimizer_step import StepResult
from polyaccel.zero.update.optimizers import Group
from polyaccel_deepspeed.config import DeepSpeedConfig
from polyaccel_deepspeed.engine.adapters import FusesAdapters
from polyaccel_deepspeed.engine.attributes import Attributes
from polyaccel_deepspeed.engine.errors import deepspeeds_errors, unused_parameters
from polyaccel_deepspeed.engine.figures import GradNorm, ThroughputTimer
from polyaccel_deepspeed.engine.loader import DeepSpeedDataLoader
from polyaccel_deepspeed.engine.monitor import step_events
from polyaccel_deepspeed.engine.parameters import ParameterOffload
from polyaccel_deepspeed.engine.settings import Settings
from polyaccel_deepspeed.engine.unmanaged import CallerAccumulates
from polyaccel_deepspeed.engine.wrappers import wrap
from polyaccel_deepspeed.exchange.experts import with_stacks
from polyaccel_deepspeed.exchange.loading import universal_as_ours
from polyaccel_deepspeed.experts.layer import single_names, stacks_in_state_dicts, with_single_experts
from polyaccel_deepspeed.recovery import has_saves, write_recovery_script

log = getLogger("polyaccel.deepspeed")


def _settable_counter(name: str) -> Any:
    """A property that reads and sets one of the engine's counters."""

    def read(self: DeepSpeedEngine) -> int:
        count: int = getattr(self.counters, name)
        return count

    def write(self: DeepSpeedEngine, value: float) -> None:
        if int(value) != value or value < 0:
            raise PolyaccelError(f"engine.{name} = {value!r}", hint="set a whole number, 0 or more", value=value)
        setattr(self.counters, name, int(value))

    return property(read, write, doc=f"`{name}`, as `TorchEngine` counts it.")


class DeepSpeedEngine(CallerAccumulates, Attributes, Settings, FusesAdapters, TorchEngine):
    """An engine that `deepspeed.initialize` made. `config` is the raw config, as a dict."""

    collate_fn: Callable[[list[Any]], Any] | None = None
    """What `initialize` was given: loaders that the engine makes use it."""

    def adopt(self, raw_config: Mapping[str, Any], client: Any, collate_fn: Any) -> None:
        """Take over the config as its user wrote it, and show parameters and optimizer as DeepSpeed does. `client` and
        `collate_fn` are what `initialize` was given."""
        self.raw_config = raw_config
        self.config = dict(raw_config)  # type: ignore[assignment]  # clients read the raw dict here
        self.collate_fn, self.client_optimizer = collate_fn, client
        # There parameters have no gradients under ZeRO, and scripts that clip them by hand clip nothing.
        self._passes.hides_scaled_gradients = self.zero_optimization_stage() > 0
        # There an autocast around the engine ends at its forward on CUDA, and stays in force on other devices.
        self._autocast.keeps_outer = self.device.type != "cuda"
        if self.optimizer is not None:
            wrap(self, client, raw_config)
            self.optimizer.parameter_offload = ParameterOffload(self._own_module)

    @cached_property
    def _config(self) -> DeepSpeedConfig:
        """The config as DeepSpeed's object, which clients ask although its name begins with an underscore."""
        return DeepSpeedConfig(self.raw_config, world_size=self.world_size)

    @cached_property
    def tput_timer(self) -> ThroughputTimer:
        """How many samples a second are trained."""
        return ThroughputTimer(self.train_batch_size())

    # Loops begin an epoch, or continue after a restart, by setting the counters.
    micro_steps = _settable_counter("micro_steps")
    global_steps = _settable_counter("global_steps")
    global_samples = _settable_counter("global_samples")
    skipped_steps = _settable_counter("skipped_steps")

    def get_global_grad_norm(self) -> GradNorm | None:
        """The norm of the last step's gradients before clipping, as a float with the methods of a tensor.

        None before the first step; infinite after a step that was skipped for gradients that were not finite.
        """
        norm = super().get_global_grad_norm()
        if norm is None:
            return None
        return GradNorm(inf if isnan(norm) and not self.was_step_applied() else norm)

    def _take_result(self, result: StepResult) -> None:
        Engine._take_result(self, result)
        self.optimizer.overflow = not result.applied

    def _end_step(
        self, groups: Sequence[Group], loss: float | None, lr_kwargs: Mapping[str, Any], steps: int = 1
    ) -> None:
        super()._end_step(groups, loss, lr_kwargs, steps)
        if self._recorder.figures is not None:
            self.tput_timer.count(self._recorder.figures, self.gradient_accumulation_steps(), self.train_batch_size())
        if self.monitor.enabled and self.metrics is not None:
            scales = self.fp16_enabled()
            self.monitor.write_events(step_events(self.metrics, scales=scales, with_times=self.wall_clock_breakdown()))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `TorchEngine.zero_grad`. Raises ShardingError for a destroyed engine, which a Trainer holds on to."""
        if self._is_closed:
            raise ShardingError(
                "a destroyed engine cannot train: Accelerate's free_memory destroys it as Trainer.train() begins",
                hint="set trainer.model_wrapped = trainer.model before trainer.train(), or make another Trainer",
            )
        super().zero_grad(set_to_none)

    # The whole model.

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: polyaccel gathers them whatever the config sets."""
        return True

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Rank 0's whole state dict, on the host; None elsewhere. Collective."""
        entries = self._entries_of_writer(exclude_frozen=exclude_frozen_parameters)
        return entries if self.communicator.rank == 0 else None

    def _entries_of_writer(self, *, exclude_frozen: bool) -> dict[str, Any]:
        """As that of `TorchEngine`, with single experts."""
        names = self._single_names()
        with stacks_in_state_dicts():
            return with_single_experts(super()._entries_of_writer(exclude_frozen=exclude_frozen), names)

    def _single_names(self) -> dict[str, tuple[str, str]]:
        """`single_names` of the whole model. Collective."""
        return single_names(self.adapter.module)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        """`save_16bit_model` by its older name."""
        return self.save_16bit_model(save_dir, save_filename)

    def module_state_dict(  # type: ignore[override]  # DeepSpeed's first arguments are `nn.Module.state_dict`'s
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """As `TorchEngine.module_state_dict`, added to `destination` under names that begin with `prefix`."""
        names = self._single_names()
        with stacks_in_state_dicts():
            whole = with_single_experts(super().module_state_dict(exclude_frozen_parameters), names)
        found = {} if destination is None else destination
        found.update({f"{prefix}{name}": value for name, value in whole.items()})
        return found

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """As `TorchEngine.load_module_state_dict`, for a state dict or a dict that has one as `module`, which
        `custom_load_fn(src=, dst=)` may write into a copy of the module."""
        state = checkpoint.get("module")
        state = state if isinstance(state, Mapping) else checkpoint
        with stacks_in_state_dicts():
            if loading := CustomLoading.prepare(custom_load_fn, self.adapter, self.zero):
                self.adapter.adopt_changes()
                state = loading.state_dict(self.adapter, state)
        super().load_module_state_dict(with_stacks(state), strict)

    # Data.

    def deepspeed_io(  # type: ignore[override]  # with DeepSpeed's arguments
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader of this rank's micro-batches of `dataset`; a `data_sampler` chooses them where there is one.

        The routes "eval" and "predict" keep the order of the dataset. Ranks that share a batch have the same samples.
        """
        collate_fn = self.collate_fn if collate_fn is None else collate_fn
        sampling = self._module_settings.sampling
        if route == "train" and data_sampler is None and sampling is not None:
            if sampling.metrics and batch_size in (None, self.train_micro_batch_size_per_gpu()):
                return TorchEngine.deepspeed_io(
                    self, dataset, collate_fn=collate_fn, num_workers=num_local_io_workers or 0
                )
            num_local_io_workers = sampling.num_workers if num_local_io_workers is None else num_local_io_workers
        ranks = self.mesh.group(("data",), self.communicator.rank)
        place = ranks.index(self.communicator.rank)
        if data_sampler is None and route in ("eval", "predict") and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, len(ranks), place, shuffle=False)
        return DeepSpeedDataLoader(
            dataset,
            self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            pin_memory,
            self.local_rank,
            self.tput_timer if route == "train" else None,
            collate_fn,
            num_local_io_workers,
            data_sampler,
            len(ranks),
            place,
            self.dataloader_drop_last(),
        )

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], float]]) -> None:
        """Set functions of the step that give metrics' difficulties, of metrics whose schedule_type is "custom"."""
        self._curriculum_loader("set_custom_curriculum_learning_schedule").set_schedules(schedule_func_dict)

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any] | None) -> None:
        """Set what changes each batch by `{"current_difficulties": {metric: difficulty}}`."""
        self._curriculum_loader("set_data_post_process_func").set_post_process(post_process_func)

    def _curriculum_loader(self, name: str) -> CurriculumDataLoader:
        loader = self.training_dataloader
        if not isinstance(loader, CurriculumDataLoader):
            hint = "pass training_data to initialize, with data_efficiency.data_sampling.curriculum_learning"
            raise PolyaccelError(
                f"{name} needs a loader of samples by difficulty", hint=hint, value=type(loader).__name__
            )
        return loader

    # Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As `TorchEngine.save_checkpoint`; a tag may be a number. At stages 1 to 3 it writes `zero_to_fp32.py` too,
        which scripts look for and users run."""
        self.require_unfused("save_checkpoint")
        name = None if tag is None else str(tag)
        with deepspeeds_errors(save_dir):
            done = super().save_checkpoint(str(save_dir), name, client_state, save_latest, exclude_frozen_parameters)
        if self.zero_optimization() and self.communicator.rank == 0:
            write_recovery_script(self.runtime.storage(str(save_dir)))
        return done

    def _require_whole_optimizer_step(self) -> None:
        """Warn, in place of an error, of a save in an unfinished accumulation: the checkpoint is without its gradients,
        and a run that loads it begins the accumulation again. This run continues with them."""
        if self.zero.holds_gradients and self.communicator.rank == 0:
            done = self.micro_steps % self.gradient_accumulation_steps()
            log.warning(
                "save_checkpoint after %d of %d micro-batches of a step: their gradients are not in the checkpoint",
                done, self.gradient_accumulation_steps(),
            )  # fmt: skip

    def load_checkpoint(  # type: ignore[override]  # DeepSpeed's last argument is another one
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As `TorchEngine.load_checkpoint`; but a missing checkpoint gives a warning and (None, None).

        With `checkpoint.load_universal` it may be a universal one of DeepSpeed's.
        """
        name = None if tag is None else str(tag)
        options: dict[str, Any] = {
            "load_module_strict": load_module_strict,
            "load_optimizer_states": load_optimizer_states,
            "load_lr_scheduler_states": load_lr_scheduler_states,
            "load_module_only": load_module_only,
            "custom_load_fn": custom_load_fn,
        }
        if not self.load_universal_checkpoint():
            return self._load(str(load_dir), name, options)
        with universal_as_ours(self.communicator, str(load_dir), name) as (folder, name):
            return self._load(folder, name, options)

    def _load(
        self, load_dir: str, tag: str | None, options: Mapping[str, Any]
    ) -> tuple[str | None, dict[str, Any] | None]:
        if not self._is_there(load_dir, tag) and (tag is not None or not self.has_replica()):
            if self.communicator.rank == 0:
                log.warning("%s has no checkpoint %s: nothing was loaded", load_dir, tag or "")
            return None, None
        with stacks_in_state_dicts():
            return super().load_checkpoint(load_dir, tag, **options)

    def _is_there(self, load_dir: str, tag: str | None) -> bool:
        """Whether rank 0 sees anything of the checkpoint, whole or not. Collective.

        A folder of outputs may hold logs and other folders before the first save.
        """
        found = False
        if self.communicator.rank == 0:
            storage = self.runtime.storage(load_dir)
            found = has_saves(storage) if tag is None else str(tag) in storage.names()
        return bool(self.communicator.broadcast_object(found))

    def destroy(self) -> None:
        """As that of `TorchEngine`; the config's leaf modules stay marked, as in DeepSpeed."""
        leaves = [] if self._is_closed else get_leaf_modules(self.module)
        super().destroy()
        for module in leaves:
            set_z3_leaf_module(module, True)

    # Gradients and steps.

    def _apply_update(self, groups: Sequence[Group]) -> None:
        with unused_parameters():
            super()._apply_update(groups)

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Does nothing: each backward pass reduces its own gradients."""

    def buffered_allreduce_fallback(self, grads: Any = None, elements_per_buffer: int = 500_000_000) -> None:
        """Does nothing, like `allreduce_gradients`."""

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Backward passes inside accumulate on this rank; what they left is reduced once, when the block ends.

        Call `step` after it. Raises PolyaccelError where the caller counts micro-batches, and inside `no_sync`.
        """
        self.require_managed("coalesce_grad_reduction")
        self.require_synced("coalesce_grad_reduction is nested in no_sync, or in itself")
        with self.no_sync():
            yield
        self.zero.begin_backward(reduce=True)
        self.zero.reducer.end_backward()

    # The module.

    def collect_python_gc(self) -> int:
        """Let Python collect unreferenced objects. Return their number."""
        return gc.collect()

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        return isinstance(obj, IterableDataset)

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module by `torch.compile`. DeepCompile's `schedule` and compiled autograd are not available."""
        if schedule is not None or compiled_autograd_enabled:
            raise ConfigError(
                [Problem("schedule", schedule, "belongs to DeepCompile, which does not exist here", "leave it out")],
                source="compile",
            )
        super().compile(backend=backend, **(compile_kwargs or {}))
        self._is_compiled = True

    def get_compile_time(self) -> dict[str, float]:
        """Nothing: torch.compile compiles when the module is first run."""
        return {}

    _is_compiled = False

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._is_compiled
