"""Sampling by difficulty: the samples of each global batch, easy ones first (Li et al. 2022, arXiv 2212.03597).

[Note: Difficulty clusters]
When a difficulty rises, the samples that become eligible make a new cluster. A batch draws from each cluster in
proportion to its size, and goes through a cluster in a shuffled order before any of its samples comes again. Each
draw is a function of the seed and of numbers in the state: step, cluster, pass. So all ranks draw the same without
a message, and a state is a few integers that any number of ranks continues from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polyaccel.data.indexed_dataset import fitting_dtype
from polyaccel.errors import CheckpointError, PolyaccelError

_CHOICE, _CLUSTER, _BATCH = range(3)
"""What a random stream is for."""


class Arrays(Protocol):
    """Arrays one after another, such as a token file's sequences."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[NDArray[Any]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A measure of difficulty, and how much of it a step admits.

    `difficulty` gives the largest admitted difficulty of a step, counted from 1. `samples` are sample numbers in groups
    of one value each, the easiest first, and `values` these values. Both are None for a metric that only counts.
    With `percentile`, difficulties are parts of all samples, out of `most` parts.
    """

    difficulty: Callable[[int], float]
    samples: Arrays | None = None
    values: Arrays | None = None
    percentile: bool = False
    most: float = 100


@dataclass(slots=True)
class _Cluster:
    """Samples that became eligible together; `position` of them are drawn in pass `turn`."""

    samples: NDArray[Any]
    order: NDArray[Any]
    position: int = 0
    turn: int = 0


class CurriculumOrder:
    """Global batches of sample numbers by difficulty. See [Note: Difficulty clusters].

    `num_samples` are those of the dataset, and `metrics` are by name, equal on all ranks.
    """

    def __init__(self, metrics: Mapping[str, Metric], num_samples: int, seed: int) -> None:
        self.metrics, self.num_samples, self.seed = dict(metrics), num_samples, seed
        self.step = 0
        self.difficulties: dict[str, float] = {}
        self._history: list[dict[str, float]] = []
        self._clusters: list[_Cluster] = []
        self._admitted = {name: np.zeros(num_samples, bool) for name, one in metrics.items() if one.samples is not None}
        self._taken = np.zeros(num_samples, bool)
        for name, metric in self.metrics.items():
            _require_all_samples(name, metric, num_samples)

    def next_batch(self, size: int) -> NDArray[np.int64]:
        """Return the sample numbers of the next step, (size,)."""
        self.step += 1
        reached = {name: _number(metric.difficulty(self.step)) for name, metric in self.metrics.items()}
        if wrong := [name for name, one in reached.items() if one != one]:
            raise PolyaccelError(
                f"the difficulty of {wrong[0]} in step {self.step} is {reached[wrong[0]]}",
                hint="give a schedule of numbers",
                value=reached[wrong[0]],
            )
        if reached != self.difficulties:
            self._rise(reached)
        sizes = np.array([len(one.samples) for one in self._clusters], float)
        if not len(sizes):
            raise PolyaccelError(
                f"no sample is as easy as the curriculum asks in step {self.step}: {reached}",
                hint="raise min_difficulty, or look at index_to_metric_path for the values that there are",
                value=reached,
            )
        counts = self._random(_CHOICE, self.step).multinomial(size, sizes / sizes.sum())
        batch = np.concatenate([self._draw(number, int(count)) for number, count in enumerate(counts)])
        self._random(_BATCH, self.step).shuffle(batch)
        return batch.astype(np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values from which `restored` continues."""
        return {
            "step": self.step,
            "history": deepcopy(self._history),
            "positions": [one.position for one in self._clusters],
            "turns": [one.turn for one in self._clusters],
            "identity": self._identity(),
        }

    def restored(self, state: Mapping[str, Any]) -> CurriculumOrder:
        """Return an order that continues at a saved state. Raise CheckpointError where it is of other data."""
        if state.get("identity") != self._identity():
            raise CheckpointError(
                f"the saved curriculum does not fit: {state.get('identity')!r} is saved, this is {self._identity()!r}",
                hint="resume with the same data, metrics and seed",
                value=state.get("identity"),
            )
        found = CurriculumOrder(self.metrics, self.num_samples, self.seed)
        for reached in state["history"]:
            found._rise(dict(reached))
        if len(found._clusters) != len(state["positions"]):
            raise CheckpointError(
                f"the saved curriculum has {len(state['positions'])} clusters, these make {len(found._clusters)}",
                hint="resume with the metric files of the run that saved",
                value=len(found._clusters),
            )
        found.step = state["step"]
        for number, cluster in enumerate(found._clusters):
            cluster.position, cluster.turn = state["positions"][number], state["turns"][number]
            cluster.order = found._shuffled(number)
        return found

    def _identity(self) -> dict[str, Any]:
        return {"samples": self.num_samples, "seed": self.seed, "metrics": sorted(self.metrics)}

    def _random(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *numbers])

    def _shuffled(self, number: int) -> NDArray[Any]:
        cluster = self._clusters[number]
        return self._random(_CLUSTER, number, cluster.turn).permutation(cluster.samples)

    def _draw(self, number: int, count: int) -> NDArray[Any]:
        cluster, drawn = self._clusters[number], []
        while count:
            part = cluster.order[cluster.position : cluster.position + count]
            drawn.append(part)
            cluster.position += len(part)
            count -= len(part)
            if cluster.position == len(cluster.order):
                cluster.position, cluster.turn = 0, cluster.turn + 1
                cluster.order = self._shuffled(number)
        return np.concatenate([cluster.samples[:0], *drawn])

    def _rise(self, reached: dict[str, float]) -> None:
        before = self.difficulties
        self._history.append(reached)
        self.difficulties = reached
        for name, admitted in self._admitted.items():
            metric = self.metrics[name]
            admit = _by_percentile if metric.percentile else _by_value
            admit(metric, before.get(name), reached[name], admitted)
        fresh = ~self._taken
        for admitted in self._admitted.values():
            fresh &= admitted
        samples = np.flatnonzero(fresh).astype(fitting_dtype(0, max(0, self.num_samples - 1)))
        if len(samples):
            self._taken |= fresh
            self._clusters.append(_Cluster(samples, samples))
            self._clusters[-1].order = self._shuffled(len(self._clusters) - 1)


def _number(value: Any) -> float:
    """The plain number of a schedule's value, which checkpoints hold; a framework's scalars too."""
    return value if type(value) in (int, float) else float(value)


def _by_value(metric: Metric, before: float | None, now: float, admitted: NDArray[np.bool_]) -> None:
    assert metric.samples is not None
    assert metric.values is not None
    for samples, value in zip(metric.samples, metric.values, strict=True):
        if value[0] > now:
            break
        if before is None or value[0] > before:
            admitted[samples] = True


def _by_percentile(metric: Metric, before: float | None, now: float, admitted: NDArray[np.bool_]) -> None:
    assert metric.samples is not None
    total, at = len(admitted), 0
    start = int(total * (before or 0) / metric.most)
    stop = min(total, int(total * now / metric.most))
    for samples in metric.samples:
        admitted[samples[max(0, start - at) : max(0, stop - at)]] = True
        at += len(samples)
        if at >= stop:
            break


def _require_all_samples(name: str, metric: Metric, num_samples: int) -> None:
    """Raise PolyaccelError unless the groups have each sample once, from the easiest on."""
    if metric.samples is None:
        return
    seen = np.zeros(num_samples, bool)
    count = 0
    for samples in metric.samples:
        count += len(samples)
        if len(samples) and int(samples.max()) < num_samples:
            seen[samples] = True
    values = None if metric.values is None else [int(value[0]) for value in metric.values]
    rises = values is None or (len(values) == len(metric.samples) and values == sorted(set(values)))
    if count != num_samples or not seen.all() or not rises:
        raise PolyaccelError(
            f"the index of metric {name} does not have each of {num_samples} samples once, by rising values: {count}",
            hint="analyse this dataset again, and name the files of this metric",
            value=name,
        )
