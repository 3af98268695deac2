"""Streams of samples that every rank reads whole, and that a loader deals out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from polyaccel.errors import PolyaccelError


class WholeStream:
    """Samples in one order for all ranks, as `training_data`: the loader deals them to the ranks.

    So a position is the number of samples that all ranks have had, and continues at any number of ranks. Each rank
    reads the whole stream, and drops what belongs to others. A stream that shards itself over ranks does not fit.

    Examples are an `IterableDataset` of Hugging Face without `split_dataset_by_node`, and a `WebDataset` with
    `nodesplitter=lambda urls: urls`.

    Args:
        stream: Iterable that gives the same samples in the same order on every rank. Its `set_epoch` is called before
            each epoch if it has one.
        resumes_by_state: Resume by the `state_dict` and `load_state_dict` of `stream`, which must be exact. A shuffle
            buffer of Hugging Face is not. Otherwise samples that were seen are read again and dropped.

    Raises:
        PolyaccelError: `stream` is an iterator, which can be read once only, or has no state where one is asked for.

    Example:
        ```python
        data = load_dataset("json", data_files=files, streaming=True)["train"]
        engine, _, loader, _ = polyaccel.initialize(model=model, training_data=WholeStream(data), config=config)
        ```
    """

    def __init__(self, stream: Iterable[Any], *, resumes_by_state: bool = False) -> None:
        if not hasattr(stream, "__iter__") or isinstance(stream, Iterator):
            hint = "give an iterable that begins again with each iter()"
            raise PolyaccelError(f"a {type(stream).__name__} cannot be read epoch after epoch", hint=hint, value=stream)
        if resumes_by_state and not all(hasattr(stream, name) for name in ("state_dict", "load_state_dict")):
            hint = "leave resumes_by_state out: samples that were seen are then read again"
            raise PolyaccelError(f"a {type(stream).__name__} has no state", hint=hint, value=type(stream).__name__)
        self.stream, self.resumes_by_state = stream, resumes_by_state

    def __iter__(self) -> Iterator[Any]:
        """Begin the stream."""
        return iter(self.stream)
