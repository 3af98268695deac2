"""The loader of training data: shuffled, by difficulty, in batches by tokens, of a stream, or the script's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyaccel.data.streams import WholeStream
from polyaccel.engine.policies.data_sampling import SamplingPolicy
from polyaccel.errors import ConfigError, Problem
from polyaccel.torch.curriculum_loader import CurriculumDataLoader
from polyaccel.torch.data import ShardedDataLoader, is_own_loader
from polyaccel.torch.stream_loader import StreamDataLoader
from polyaccel.torch.token_batch_loader import TokenBatchLoader

TrainingLoader = ShardedDataLoader[Any] | CurriculumDataLoader | TokenBatchLoader | StreamDataLoader
"""Loaders that an engine builds."""
_SAMPLING = "data_efficiency.data_sampling"


def loader_of(engine: Any, data: Any, collate_fn: Callable[[list[Any]], Any] | None) -> Any:
    """Return the loader of `training_data` for `engine`: the script's own, or one that the engine builds.

    Raises ConfigError where something is asked for that a script's own loader does not follow.
    """
    if not is_own_loader(data):
        return engine.deepspeed_io(data, collate_fn=collate_fn)
    sampling: SamplingPolicy | None = engine._module_settings.sampling
    hint = "let the loader do it, or give its dataset"
    problems = []
    if collate_fn is not None:
        problems.append(Problem("collate_fn", collate_fn, "is not what a loader of your own uses", hint))
    if _chooses(sampling):
        problems.append(Problem(f"{_SAMPLING}.enabled", True, "does not reach a loader of your own", hint))
    if problems:
        raise ConfigError(problems, source="initialize")
    return data


def make_loader(
    sampling: SamplingPolicy | None, dataset: Any, *, accumulation: int, num_workers: int, drop_last: bool, **own: Any
) -> TrainingLoader:
    """Build the loader of `dataset` that `sampling` asks for; `own` are its rank, sizes and function of a batch."""
    own["num_workers"] = num_workers
    if sampling is not None:
        own |= {"pin_memory": sampling.pin_memory, "seed": sampling.seed}
        own["num_workers"] = num_workers or sampling.num_workers
    if isinstance(dataset, WholeStream):
        if _chooses(sampling):
            expected, hint = "needs samples by number, and training_data is a stream", "leave it out"
            raise ConfigError([Problem(f"{_SAMPLING}.enabled", True, expected, hint)], source="initialize")
        return StreamDataLoader(dataset, **own)
    if sampling is not None and sampling.metrics:
        own |= {"metrics": sampling.metrics, "epochs": sampling.epochs, "custom": sampling.custom}
        return CurriculumDataLoader(dataset, accumulation=accumulation, **own)
    if sampling is not None and (tokens := sampling.token_batches) is not None:
        own |= {"max_tokens": tokens.max_tokens, "least": tokens.least, "most": tokens.most}
        own |= {"order": tokens.order, "scaling": tokens.scaling, "lengths": tokens.lengths(dataset)}
        return TokenBatchLoader(dataset, accumulation=accumulation, **own)
    return ShardedDataLoader(dataset, drop_last=drop_last, **own)


def _chooses(sampling: SamplingPolicy | None) -> bool:
    return sampling is not None and (bool(sampling.metrics) or sampling.token_batches is not None)
