"""Metrics of a dataset for curricula: computed in chunks by any number of workers, then merged into an index.

Files have DeepSpeed's names and format: `<folder>/<metric>/<metric>_sample_to_metric`, `_index_to_sample`,
`_index_to_metric`, `_index_to_sample_percentile_merged`, and `_metric_value` of sums.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyaccel.data.indexed_dataset import IndexedDataset, fitting_dtype, write_sequences
from polyaccel.errors import PolyaccelError

_GROUPS = 100
"""Groups of samples in a merged index."""


class DataAnalysis:
    """Metrics of each sample, and sums over all, as map and reduce.

    Workers share nothing but the folder. A chunk that is done is a file, so a map that was interrupted continues where
    it ended, with another number of workers too.

    Args:
        dataset: Samples by number, with a length.
        folder: Folder of the results, which is made.
        metrics: Functions of a sample that return an integer, by name.
        sums: Functions of a sample that return an array of integers, which is added up over all samples, by name.
        chunk: Samples of a chunk.

    Raises:
        PolyaccelError: The folder holds an analysis of other data, or a name is not fit for a file.

    Example:
        ```python
        analysis = DataAnalysis(dataset, "analysis", metrics={"seqlen": len})
        analysis.map(worker=rank, workers=world_size)
        comm.barrier()
        if rank == 0:
            analysis.reduce()
        ```
    """

    def __init__(
        self,
        dataset: Any,
        folder: str | Path,
        *,
        metrics: Mapping[str, Callable[[Any], int]] | None = None,
        sums: Mapping[str, Callable[[Any], ArrayLike]] | None = None,
        chunk: int = 1000,
    ) -> None:
        self.dataset, self.folder = dataset, Path(folder)
        self.metrics, self.sums = dict(metrics or {}), dict(sums or {})
        self.chunk, self.num_samples = chunk, len(dataset)
        names = [*self.metrics, *self.sums]
        bad = [name for name in names if not name or Path(name).name != name or names.count(name) > 1]
        if bad or not names or chunk < 1 or not self.num_samples:
            raise PolyaccelError(
                f"cannot analyse {self.num_samples} samples in chunks of {chunk} by metrics {names}",
                hint="give samples, a chunk of at least 1, and metrics by names that files can have, each once",
                value=bad or names,
            )
        self.num_chunks = -(-self.num_samples // chunk)
        for name in names:
            self._claim(name)

    def _claim(self, name: str) -> None:
        parts = self._parts(name)
        parts.mkdir(parents=True, exist_ok=True)
        wanted = {"samples": self.num_samples, "chunk": self.chunk, "kind": "metric" if name in self.metrics else "sum"}
        file = parts / "analysis.json"
        if not file.exists():
            _replace(file, lambda to: Path(to).write_text(json.dumps(wanted), encoding="utf-8"))
        if (found := json.loads(file.read_text(encoding="utf-8"))) != wanted:
            hint = "choose another folder, or delete this one to begin again"
            raise PolyaccelError(f"{file} is of another analysis: {found}", hint=hint, value=found)

    def done(self) -> int:
        """Return how many samples all metrics have."""
        chunks = [n for n in range(self.num_chunks) if all(self._file(name, n).exists() for name in self._names())]
        return sum(min(self.chunk, self.num_samples - number * self.chunk) for number in chunks)

    def map(self, *, worker: int = 0, workers: int = 1, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Compute this worker's chunks that are not done.

        Args:
            worker: This worker's number, from 0.
            workers: Number of workers.
            on_progress: Called after each chunk with the samples that this worker has done, and with all that it has.

        Raises:
            PolyaccelError: A metric does not return an integer, or a sum an array of integers.
        """
        if not 0 <= worker < workers:
            hint = "number workers from 0"
            raise PolyaccelError(f"worker {worker} of {workers} does not exist", hint=hint, value=worker)
        own = range(worker, self.num_chunks, workers)
        total = sum(len(self._samples(number)) for number in own)
        done = 0
        for number in own:
            missing = [name for name in self._names() if not self._file(name, number).exists()]
            if missing:
                self._compute(number, missing)
            done += len(self._samples(number))
            if on_progress is not None:
                on_progress(done, total)

    def reduce(self) -> None:
        """Merge all chunks into the files of the index.

        Raises:
            PolyaccelError: A chunk is missing.
        """
        for name in self._names():
            missing = [number for number in range(self.num_chunks) if not self._file(name, number).exists()]
            if missing:
                raise PolyaccelError(
                    f"{len(missing)} of {self.num_chunks} chunks of metric {name} are missing, first {missing[0]}",
                    hint="run map of every worker first",
                    value=missing[0],
                )
            parts = [np.load(self._file(name, number)) for number in range(self.num_chunks)]
            prefix = self.folder / name / name
            if name in self.sums:
                total = sum(parts[1:], parts[0])
                write_sequences(f"{prefix}_metric_value", [total], _fitting(total))
            else:
                _write_index(str(prefix), np.concatenate(parts))

    def _compute(self, number: int, names: list[str]) -> None:
        values: dict[str, Any] = {name: [] for name in names}
        for at in self._samples(number):
            sample = self.dataset[at]
            for name in names:
                if name in self.metrics:
                    values[name].append(_whole(name, at, self.metrics[name](sample)))
                else:
                    added = _wholes(name, at, self.sums[name](sample))
                    values[name] = added if isinstance(values[name], list) else values[name] + added
        for name in names:
            _replace(self._file(name, number), partial(np.save, arr=np.asarray(values[name], np.int64)))

    def _names(self) -> list[str]:
        return [*self.metrics, *self.sums]

    def _samples(self, number: int) -> range:
        return range(number * self.chunk, min((number + 1) * self.chunk, self.num_samples))

    def _parts(self, name: str) -> Path:
        return self.folder / name / "chunks"

    def _file(self, name: str, number: int) -> Path:
        return self._parts(name) / f"{number:08d}.npy"


def vocabulary_counts(vocabulary: int) -> Callable[[Any], NDArray[np.int64]]:
    """Return a sum for `DataAnalysis`: how often each token occurs.

    Args:
        vocabulary: Number of tokens.

    Returns:
        Function of a sample of tokens, which counts them, (vocabulary,).
    """
    return lambda tokens: np.bincount(np.asarray(tokens).reshape(-1), minlength=vocabulary)


def vocabulary_rarity(counts: ArrayLike) -> Callable[[Any], int]:
    """Return a metric for `DataAnalysis`: minus the sum of the logarithms of a sample's token frequencies.

    Args:
        counts: How often each token occurs in the data, (vocabulary,).

    Returns:
        Function of a sample of tokens, rounded to an integer. It raises PolyaccelError for a token without a count.
    """
    numbers = np.asarray(counts, float)
    with np.errstate(divide="ignore"):
        rarity = np.log(numbers.sum()) - np.log(numbers)
    return partial(_rarity_of, rarity)


def _rarity_of(rarity: NDArray[np.float64], tokens: Any) -> int:
    flat = np.asarray(tokens).reshape(-1)
    known = (flat >= 0) & (flat < len(rarity))
    if not known.all() or not np.isfinite(found := rarity[flat].sum()):
        wrong = int(flat[~known][0]) if not known.all() else int(flat[~np.isfinite(rarity[flat])][0])
        hint = "count all samples first, and leave ignored labels out"
        raise PolyaccelError(f"token {wrong} was not counted", hint=hint, value=wrong)
    return round(float(found))


def _write_index(prefix: str, values: NDArray[np.int64]) -> None:
    order = np.argsort(values, kind="stable")
    levels, begins = np.unique(values[order], return_index=True)
    groups = np.split(order, begins[1:])
    numbers = fitting_dtype(0, len(values) - 1)
    write_sequences(f"{prefix}_sample_to_metric", [[value] for value in values], _fitting(values))
    write_sequences(f"{prefix}_index_to_sample", groups, numbers)
    write_sequences(f"{prefix}_index_to_metric", [[level] for level in levels], _fitting(levels))
    each = max(1, len(groups) // _GROUPS)
    merged = [np.concatenate(groups[at : at + each]) for at in range(0, len(groups), each)]
    write_sequences(f"{prefix}_index_to_sample_percentile_merged", merged, numbers)
    if len(IndexedDataset(f"{prefix}_sample_to_metric")) != len(values):
        raise PolyaccelError(f"the index of {prefix} was not written whole", hint="look at the disk", value=prefix)


def _fitting(values: NDArray[Any]) -> np.dtype[Any]:
    return fitting_dtype(int(values.min()), int(values.max()))


def _whole(name: str, sample: int, value: Any) -> int:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "iu":
        hint = "return one integer a sample; round it, or multiply it first"
        raise PolyaccelError(f"metric {name} of sample {sample} is {value!r}", hint=hint, value=value)
    return int(array.reshape(()))


def _wholes(name: str, sample: int, value: Any) -> NDArray[np.int64]:
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or not array.size:
        hint = "return an array of integers, of one shape for all samples"
        raise PolyaccelError(f"sum {name} of sample {sample} is of {array.dtype}", hint=hint, value=name)
    return array.astype(np.int64).reshape(-1)


def _replace(file: Path, write: Callable[[str], Any]) -> None:
    unfinished = f"{file}.{uuid4().hex}.unfinished{file.suffix}"  # hosts and threads may write at once
    write(unfinished)
    os.replace(unfinished, file)
