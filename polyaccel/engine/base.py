"""The `Engine` that users of every frontend hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any, TypeVar

from polyaccel.accelerators.base import Accelerator
from polyaccel.checkpoint import CheckpointReader, Storage, open_checkpoint
from polyaccel.checkpoint.in_memory.replicas import Replicas
from polyaccel.checkpoint.save.protocol import SaveContents
from polyaccel.checkpoint.saver import Saver
from polyaccel.comm.base import Communicator
from polyaccel.config import ResolvedConfig
from polyaccel.core.mesh import Mesh
from polyaccel.engine.counters import StepCounters
from polyaccel.engine.loss_scale import LossScaler
from polyaccel.engine.progress import EngineSettings, RunProgress
from polyaccel.engine.rank_consistency import warn_of_uneven_batches
from polyaccel.engine.recording import StepRecorder
from polyaccel.engine.replica_groups import folder_of
from polyaccel.engine.resume import TrainingRun
from polyaccel.engine.rewrites import AppliedRewrite, BaseContext
from polyaccel.engine.update_results import UpdateResults
from polyaccel.errors import CheckpointError, PolyaccelError
from polyaccel.observability.alerts.watching import RunAlarms
from polyaccel.observability.metrics import ExpertFigures, MetricSink
from polyaccel.observability.stats import WorkCounter
from polyaccel.observability.timing import OUTSIDE, PhaseTimer
from polyaccel.observability.traces.recorder import RunTrace
from polyaccel.zero.outer_step import ReplicaGroup
from polyaccel.zero.update.optimizer_step import StepResult
from polyaccel.zero.update.optimizers import Group

log = getLogger(__name__)
Run = TypeVar("Run", bound=TrainingRun)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts of an engine that follow from its config alone. `config` is for users to read; no part reads it."""

    config: ResolvedConfig
    settings: EngineSettings
    accelerator: Accelerator
    communicator: Communicator
    mesh: Mesh
    loss_scaler: LossScaler
    monitor: MetricSink
    trace: RunTrace | None
    alarms: RunAlarms | None
    replica_group: ReplicaGroup | None
    about: Mapping[str, Any]
    """What checkpoints tell of the run: plain values."""


class Engine(RunProgress, ABC):
    """A model in training. Each framework's engine adds what its users expect."""

    config: ResolvedConfig
    _saver: Saver
    _replicas: Replicas | None
    client_state: dict[str, Any]
    """What replicas in memory have as `client_state`: that of the last save or load, unless a script sets another."""
    accelerator: Accelerator
    communicator: Communicator
    mesh: Mesh
    """The axes along which the ranks stand."""
    replica_group: ReplicaGroup | None
    """The group of this engine's ranks, one of several that train apart; None where all train together."""
    monitor: MetricSink
    """Takes the script's own metrics too: `engine.monitor.write_events([(tag, value, step)])`.
    """
    optimizer: Any = None
    lr_scheduler: Any = None
    """The schedule that moves the learning rates after each applied step."""
    lr_scale = 1.0
    """The factor on the learning rates in the last update, by its batch."""
    before_update: list[Callable[[], None]]
    """What is called before each update, on all ranks, with all gradients there."""
    after_step: list[Callable[[float | None], None]]
    """What is called at the end of each step, on all ranks, with this rank's mean loss."""
    after_update: list[Callable[[bool], None]]
    """What is called after each update, on all ranks, with whether parameters changed."""
    expert_figures: Callable[[], Mapping[str, ExpertFigures]] | None = None
    """What gives the figures of a step's experts, on all ranks; None where nothing records them."""
    timer: PhaseTimer
    _rewrites: BaseContext
    _results: UpdateResults
    _replicates_in_background = True
    """Whether buffers of pieces count their writes, and stay where they are while nothing is updated."""

    @abstractmethod
    def train_batch(self, data_iter: Any = None) -> Any:
        """Run one optimizer step, with all its micro-batches. Collective.

        Args:
            data_iter: Micro-batches of this rank. None takes the engine's own loader, if the framework has one.

        Returns:
            Scalar: the mean loss of this rank's micro-batches.
        """

    @abstractmethod
    def eval_batch(self, data_iter: Any) -> Any:
        """Compute the loss of one micro-batch, without gradients. Collective.

        Args:
            data_iter: Iterator whose next micro-batch is taken.

        Returns:
            Scalar loss.
        """

    @abstractmethod
    def step(self) -> None:
        """End a micro-batch: update the parameters at the accumulation boundary, only count elsewhere. Collective."""

    @abstractmethod
    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Write everything needed to resume exactly, at any world size, in JAX or in torch. Collective.

        With `checkpoint.async` it returns when this rank's part is copied; `wait_for_checkpoint` waits for the rest.

        Args:
            save_dir: Folder of checkpoints, or place in the storage that the config names.
            tag: Name of this checkpoint; None is `global_step` and the number of steps.
            client_state: Values of the script's own, which `load_checkpoint` returns.
            save_latest: Make this the checkpoint that a load without a tag takes.

        Returns:
            True, as in DeepSpeed.

        Raises:
            CheckpointError: On every rank: this save failed, or the one before it, or an accumulation is unfinished.
            PolyaccelError: An update failed halfway, or this process was forked.

        Example:
            ```python
            engine.save_checkpoint("checkpoints", client_state={"epoch": epoch})
            path, client_state = engine.load_checkpoint("checkpoints")
            ```
        """

    @abstractmethod
    def load_checkpoint(self, load_dir: str, tag: str | None = None) -> tuple[str, dict[str, Any]]:
        """Resume from a checkpoint of any world size. Collective.

        Args:
            load_dir: Folder of checkpoints, or place in the storage that the config names.
            tag: Name of the checkpoint; None takes the latest, or a newer replica in memory.

        Returns:
            (path of the checkpoint, client state).

        Raises:
            CheckpointError: On every rank and with nothing changed: it is missing, damaged or of another model.
        """

    @property
    def rewrites(self) -> tuple[AppliedRewrite, ...]:
        """What was changed of the user's model, in the order in which it was applied; empty after `destroy`."""
        return tuple(self._rewrites.applied)

    @abstractmethod
    def destroy(self) -> None:
        """Release memory, hooks and connections. The model stays usable."""

    def _compose(self, parts: EngineParts) -> None:
        """Set all of the above but `zero`."""
        self.config = parts.config
        self._settings = parts.settings
        self.accelerator = parts.accelerator
        self.communicator = parts.communicator
        self.mesh = parts.mesh
        self.replica_group = parts.replica_group
        self.monitor = parts.monitor
        self._saver = Saver(parts.communicator, parts.settings.saving, parts.about)
        replica = parts.settings.saving.replica
        self._replicas = None if replica is None else Replicas(parts.communicator, replica, parts.about)
        self.client_state = {}
        self.before_update, self.after_update, self.after_step = [], [], []
        self.loss_scaler = parts.loss_scaler
        self._results = UpdateResults(parts.loss_scaler, speaks=parts.communicator.rank == 0)
        self.counters = StepCounters(
            gradient_accumulation_steps=parts.settings.accumulation_steps,
            train_batch_size=parts.settings.train_batch_size,
        )
        self._recorder = StepRecorder(
            parts.accelerator,
            parts.communicator,
            reporting=parts.settings.reporting,
            work=self._work_counter(parts.settings),
            monitor=parts.monitor,
            trace=parts.trace,
            alarms=parts.alarms,
        )
        self._recorder.memory = lambda: self.zero.memory
        self.timer = self._recorder.timer
        warn_of_uneven_batches(parts.communicator, parts.settings.micro_batch_size)
        if parts.alarms is not None:
            parts.alarms.attach(self.timer, lambda: self.zero.params)

    @staticmethod
    def _work_counter(settings: EngineSettings) -> WorkCounter:
        micro_batches = settings.micro_batch_size * settings.accumulation_steps
        streams = settings.train_batch_size // micro_batches
        return WorkCounter(enabled=settings.counts_work, streams_of_batches=streams)

    def wait_for_checkpoint(self) -> None:
        """Wait until the last `save_checkpoint` is complete and durable. Collective.

        Raises:
            CheckpointError: On every rank: the save failed on any of them.
        """
        self._saver.wait()

    def has_replica(self) -> bool:
        """Return whether an earlier start of this job left a replica in memory. Collective.

        `load_checkpoint` without a tag resumes from it if it is newer than the checkpoints.
        """
        return self._replicas is not None and self._replicas.has_survivor()

    @abstractmethod
    def _contents(self, client_state: Mapping[str, Any]) -> SaveContents:
        """What this rank saves of the state as it is now. Collective."""

    def _replicate(self) -> None:
        """Copy the state after a step to where it survives this process, if the config says so. Collective."""
        if self._replicas is not None:
            self._results.settle()
            culprit = (
                ""
                if self._result is None or not self._results.has_applied_not_finite
                else self._result.first_nonfinite_param or "?"
            )
            self._replicas.replicate(
                self.global_steps,
                lambda: self._contents(self.client_state),
                in_background=self._replicates_in_background,
                culprit=culprit,
            )

    def _settle_replica(self) -> None:
        """Wait until a copy that is under way has ended: then states may be written."""
        if self._replicas is not None:
            self._replicas.settle()

    def _save(
        self,
        save_dir: str,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        save_latest: bool,
        contents: Callable[[Mapping[str, Any]], SaveContents],
    ) -> bool:
        """Save what `contents` returns for the client state; without a `tag` under the number of the step."""
        self._require_whole_optimizer_step()
        self._results.settle()
        state = self._state_to_save(client_state)
        with self.timer(OUTSIDE):
            tag = tag or f"global_step{self.global_steps}"
            save_dir = folder_of(self.replica_group, save_dir)
            self._saver.save(save_dir, tag, contents(state), save_latest=save_latest)
        return True

    def _training_run(self, kind: Callable[..., Run], **own: Any) -> Run:
        """Return the parts that a checkpoint holds, as they are now: a `kind` with fields of its `own`."""
        optimizer = self.zero.optimizer
        return kind(
            zero=self.zero,
            accelerator=self.accelerator,
            communicator=self.communicator,
            counters=self.counters,
            loss_scaler=self.loss_scaler,
            groups=None if optimizer is None else self.optimizer.param_groups,
            optimizer_kind=None if optimizer is None else optimizer.kind,
            schedule=self.lr_scheduler,
            loading_nbytes=self._saver.policy.staging_nbytes,
            **own,
        )

    def _state_to_save(self, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what a save holds as client state, once states may be read."""
        self._settle_replica()
        if client_state is None:
            return {}
        # A save refuses all but mappings.
        self.client_state = dict(client_state) if isinstance(client_state, Mapping) else {}
        return client_state  # type: ignore[return-value]

    def _resume(
        self,
        storage: Storage,
        tag: str | None,
        load: Callable[[CheckpointReader], tuple[str, dict[str, Any]]],
        *,
        is_whole: bool,
    ) -> tuple[str, dict[str, Any]]:
        """`load` the checkpoint `tag` of `storage`, or the newest, which may be a replica where `is_whole` says that
        all of it is loaded. Collective. Returns what `load` does."""

        def open_saved() -> CheckpointReader:
            return open_checkpoint(storage, tag, communicator=self.communicator, fallback=True)

        with self.timer(OUTSIDE):
            self._saver.wait()
            self._settle_replica()
            if self._replicas is None or tag is not None or not is_whole:
                loaded = load(open_saved())
                if self._replicas is not None:
                    self._replicas.forget()
            else:
                loaded = self._replicas.resume(storage, open_saved, load)
        self.client_state = dict(loaded[1])
        self._results.forget()
        return loaded

    def _close_saving(self) -> None:
        """Wait for this rank's part of a save that is under way, and release what saves and replicas hold. Raises
        CheckpointError if the save failed."""
        self._results.settle()
        if self._replicas is not None:
            self._replicas.close()
        self._saver.close()

    # What must be before a call.

    def _require_optimizer(self) -> None:
        if self.zero.optimizer is None:
            hint = 'pass one to initialize, or add "optimizer" to the config'
            raise PolyaccelError("this engine has no optimizer", hint=hint)

    def _require_whole_optimizer_step(self) -> None:
        if self.zero.holds_gradients:
            raise CheckpointError(
                "gradients of an unfinished optimizer step would be lost",
                hint="save right after engine.step() at an accumulation boundary, or call engine.zero_grad() first",
            )

    # The end of a step.

    def _apply_update(self, groups: Sequence[Group]) -> None:
        """Update the parameters; the loss scale follows."""
        if self._recorder.alarms is not None:
            self._recorder.alarms.before_update(self.global_steps + 1)
        for call in self.before_update:
            call()
        with self._recorder.timer("update"):
            result = self.zero.update(groups, self._gradient_scale)
        self._take_result(result)

    @property
    def _gradient_scale(self) -> float:
        """The factor that accumulated gradients hold, which the update divides by."""
        return self.loss_scaler.loss_scale

    def _take_result(self, result: StepResult) -> None:
        """Keep what an update did; the loss scale follows."""
        self._result = result
        self._results.add(self.global_steps + 1, result)
        for follow in self.after_update:
            follow(result.applied)

    def _end_step(
        self, groups: Sequence[Group], loss: float | None, lr_kwargs: Mapping[str, Any], steps: int = 1
    ) -> None:
        """Count the step whose update was the last, move the learning-rate schedule, make the figures, which are of so
        many `steps`."""
        result = self._result
        assert result is not None  # set by the update
        self.counters.advance(skipped=not result.applied)
        lr = tuple(rate * self.lr_scale for rate in learning_rates(groups))
        if result.applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        experts = {} if self.expert_figures is None else self.expert_figures()
        scale = self.loss_scaler.loss_scale
        self._recorder.record(result, self.counters, loss=loss, lr=lr, loss_scale=scale, experts=experts, steps=steps)
        self._saver.poll()
        self._replicate()
        for call in self.after_step:
            call(loss)


def learning_rates(groups: Sequence[Group]) -> tuple[float, ...]:
    """Return the learning rate of each optimizer group that has one; optimizers such as Adafactor compute their own.

    Args:
        groups: Optimizer groups, some of whose `lr` may be None.

    Returns:
        Learning rates in the order of the groups.
    """
    return tuple(float(group["lr"]) for group in groups if group.get("lr") is not None)
