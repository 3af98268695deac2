"""DeepSpeed's names of curricula and of the analysis of a dataset, over polyaccel's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import floor
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from polyaccel import comm
from polyaccel.config import load_config
from polyaccel.data import DataAnalysis
from polyaccel.data.curriculum import CurriculumOrder
from polyaccel.engine.policies.data_sampling import sampling_policy_of
from polyaccel.errors import CheckpointError, ConfigError, PolyaccelError, Problem

_CHUNK = 1000
_KEY = "data_efficiency.data_sampling.curriculum_learning"
_SINGLE, _SUM = "single_value_per_sample", "accumulate_value_over_samples"


class CurriculumScheduler:
    """The difficulty of each step, by DeepSpeed's formulas. `config` is one of a metric, or `curriculum_learning`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        numbers, kind = config.get("schedule_config", {}), config.get("schedule_type")
        needed = {
            "fixed_discrete": ("difficulty", "max_step"),
            "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
            "fixed_linear": ("total_curriculum_step", "difficulty_step"),
            "custom": (),
        }
        if kind not in needed:
            problem = Problem("schedule_type", kind, f"should be one of {sorted(needed)}")
            raise ConfigError([problem], source="CurriculumScheduler")
        missing = [key for key in ("min_difficulty", "max_difficulty") if key not in config]
        missing += [f"schedule_config.{key}" for key in needed[kind] if key not in numbers]
        if kind == "fixed_discrete" and not missing and len(numbers["difficulty"]) != len(numbers["max_step"]) + 1:
            missing = ["schedule_config.max_step"]
        if missing:
            problems = [Problem(key, None, f"is missing, or has another length, for {kind}") for key in missing]
            raise ConfigError(problems, source="CurriculumScheduler")
        self.state: dict[str, Any] = {
            "min_difficulty": config["min_difficulty"],
            "max_difficulty": config["max_difficulty"],
            "current_difficulty": config["min_difficulty"],
            "schedule_type": kind,
            "schedule": dict(numbers),
        }
        self.custom_get_difficulty: Callable[[int], Any] | None = None

    def get_current_difficulty(self) -> Any:
        """Return the difficulty under way."""
        return self.state["current_difficulty"]

    def set_current_difficulty(self, difficulty: Any) -> None:
        """Set the difficulty under way."""
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], Any]) -> None:
        """Set the function of the step that gives the difficulty of a "custom" schedule."""
        self.custom_get_difficulty = schedule_function

    def get_state(self) -> dict[str, Any]:
        """Return the state, which checkpoints keep."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a state."""
        self.state = state

    def get_difficulty(self, global_steps: int) -> Any:
        """Return the difficulty of step `global_steps`."""
        state, numbers = self.state, self.state["schedule"]
        if state["schedule_type"] == "custom":
            if self.custom_get_difficulty is None:
                hint = "call set_custom_get_difficulty"
                raise PolyaccelError("a custom schedule has no function", hint=hint, value=global_steps)
            return self.custom_get_difficulty(global_steps)
        if state["schedule_type"] == "fixed_discrete":
            return numbers["difficulty"][sum(global_steps > last for last in numbers["max_step"])]
        degree = numbers["root_degree"] if state["schedule_type"] == "fixed_root" else 1
        part = (global_steps / numbers["total_curriculum_step"]) ** (1.0 / degree)
        least, most = state["min_difficulty"], state["max_difficulty"]
        reached = floor(part * (most - least) + least)
        return min(reached - reached % numbers["difficulty_step"], most)

    def update_difficulty(self, global_steps: int) -> Any:
        """Go to step `global_steps`; returns its difficulty, which stays once it is the largest."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.state["current_difficulty"]


class DataAnalyzer:
    """Metrics of each sample of a dataset, as map and reduce, by `polyaccel.data.DataAnalysis`.

    Functions get a batch of one sample, made by `collate_fn`. A map that was interrupted continues where it ended.
    `num_threads`, `num_threads_reduce`, `specific_threads` and `batch_size` have no effect, and `metric_dtypes` only
    that integers are chosen: files have the narrowest type.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Any = None,
        custom_map_update: Any = None,
        custom_map_finalize: Any = None,
        custom_reduce: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        if any(one is not None for one in (custom_map_init, custom_map_update, custom_map_finalize, custom_reduce)):
            hint = "give metric_functions, or use polyaccel.data.DataAnalysis"
            raise PolyaccelError("own steps of map and reduce are not called", hint=hint, value="custom_map_init")
        if wrong := sorted(set(metric_types) - {_SINGLE, _SUM}):
            raise PolyaccelError(f"a metric has the type {wrong[0]!r}", hint=f"use {_SINGLE} or {_SUM}", value=wrong[0])
        samples = dataset if sample_indices is None else Subset(dataset, sample_indices)
        collate = default_collate if collate_fn is None else collate_fn
        rows = list(zip(metric_names, metric_functions, metric_types, strict=True))
        self.num_workers, self.worker_id = num_workers, worker_id
        self._analysis = DataAnalysis(
            samples,
            save_path,
            metrics={name: partial(_single, function, collate) for name, function, kind in rows if kind == _SINGLE},
            sums={name: partial(_summed, function, collate) for name, function, kind in rows if kind == _SUM},
            chunk=max(1, min(_CHUNK, -(-len(samples) // num_workers))),
        )

    def run_map(self) -> None:
        """Compute the metrics of this worker's samples."""
        self._analysis.map(worker=self.worker_id, workers=self.num_workers)

    def run_reduce(self) -> None:
        """Merge what all workers have computed into the files of the index."""
        self._analysis.reduce()

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Compute on every rank, and merge on the first one. Collective."""
        self.run_map()
        if not comm.is_initialized():
            self.run_reduce()
            return
        comm.barrier(group=comm_group)
        if self.worker_id == 0:
            self.run_reduce()
        comm.barrier(group=comm_group)


class DistributedDataAnalyzer(DataAnalyzer):
    """`DataAnalyzer` whose workers are the ranks. `device` has no effect."""

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: str = "cuda",
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        if comm.is_initialized():
            num_workers, worker_id = comm.get_world_size(group=comm_group), comm.get_rank(group=comm_group)
        super().__init__(
            dataset,
            num_workers=num_workers,
            worker_id=worker_id,
            metric_names=metric_names,
            metric_functions=metric_functions,
            metric_types=metric_types,
            save_path=save_path,
            collate_fn=collate_fn,
            sample_indices=sample_indices,
        )
        self._group = comm_group

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Compute on every rank, and merge on the first one. Collective."""
        super().run_map_reduce(self._group if comm_group is None else comm_group)


class DeepSpeedDataSampler:
    """Sample numbers of this rank's micro-batches, by difficulty: `polyaccel.data`'s order, which all ranks draw alone.

    `data_efficiency_config` is the section `data_efficiency`. A state continues at another number of ranks where what
    is left of its batch is whole micro-batches of theirs.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any = None,
        gradient_accumulation_steps: int = 1,
        global_rank: int = 0,
        drop_last: bool = True,
    ) -> None:
        config = load_config({"data_efficiency": dict(data_efficiency_config) | {"enabled": True}})
        policy = sampling_policy_of(config)
        if policy is None or not policy.metrics:
            expected = "has no curriculum, and this sampler is for one"
            hint = "enable data_sampling and its curriculum_learning"
            raise ConfigError([Problem(f"{_KEY}.enabled", False, expected, hint)])
        self.micro_batch_size, self.data_parallel_rank = micro_batch_size, data_parallel_rank
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.global_batch_size = self.micro_batch_times_data_parallel_size * gradient_accumulation_steps
        self.total_samples = one_epoch_total_samples * policy.epochs
        self.consumed_samples = 0
        self._custom, self.drop_last = policy.custom, drop_last
        self._order = CurriculumOrder(policy.metrics, one_epoch_total_samples, policy.seed)
        self._before, self._batch, self._offset = self._order.state_dict(), list[int](), 0

    @property
    def current_difficulties(self) -> dict[str, float]:
        """The difficulties under way, by metric."""
        return dict(self._order.difficulties)

    def __len__(self) -> int:
        return self.total_samples

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], float]]) -> None:
        """Set functions of the step that give the difficulty of metrics whose `schedule_type` is "custom"."""
        for name, function in schedule_func_dict.items():
            if name in self._custom:
                self._order.metrics[name] = replace(self._order.metrics[name], difficulty=function)

    def __iter__(self) -> Iterator[list[int]]:
        size, first = self.micro_batch_times_data_parallel_size, self.data_parallel_rank * self.micro_batch_size
        while self.consumed_samples + size <= self.total_samples:
            if self._offset == len(self._batch):
                self._before, self._offset = self._order.state_dict(), 0
                self._batch = self._order.next_batch(self.global_batch_size).tolist()
            part = self._batch[self._offset : self._offset + size]
            self._offset += len(part)
            self.consumed_samples += len(part)
            yield part[first : first + self.micro_batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the samples, as plain values."""
        under_way = {"size": len(self._batch), "offset": self._offset}
        return {"order": self._before, "consumed_samples": self.consumed_samples, **under_way}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a saved place. Raises CheckpointError for one of other data, or of DeepSpeed's own sampler."""
        if set(state_dict) != {"order", "consumed_samples", "size", "offset"}:
            hint = "begin with the first batch: draws of DeepSpeed's generator cannot be continued"
            raise CheckpointError(f"the state is not of this sampler: {sorted(state_dict)}", hint=hint, value=None)
        left, size = state_dict["size"] - state_dict["offset"], self.micro_batch_times_data_parallel_size
        if left % size:
            hint = "resume with a micro-batch of all ranks that divides it"
            raise CheckpointError(f"{left} samples are left of a batch, for {size} at a time", hint=hint, value=left)
        self._before = state_dict["order"]
        self._order = self._order.restored(self._before)
        self._batch = self._order.next_batch(state_dict["size"]).tolist() if state_dict["size"] else []
        self._offset, self.consumed_samples = state_dict["offset"], state_dict["consumed_samples"]


def _single(function: Callable[[Any], Any], collate: Callable[[list[Any]], Any], sample: Any) -> Any:
    return _whole(function(collate([sample]))).reshape(-1)[0].numpy()


def _summed(function: Callable[[Any], Any], collate: Callable[[list[Any]], Any], sample: Any) -> Any:
    return _whole(function(collate([sample]))).numpy()


def _whole(value: Any) -> Tensor:
    """Return whole numbers as such, also where a function counts in floats; others stay, and are refused."""
    found = torch.as_tensor(value)
    is_whole = found.is_floating_point() and bool((found == found.round()).all())
    return found.long() if is_whole else found
