"""`StageMicroBatches`: the first micro-batches of a pipeline's layers, of which the first stage has the inputs and the
last the labels."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from weakref import ref

import torch

from polyaccel.torch.engine.pipeline_engine import PipelineEngine
from polyaccel.torch.verify.batches import MicroBatch

_MOST = 2


class StageMicroBatches:
    """The first micro-batches that this rank takes of a training, until `gathered`."""

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = ref(engine)
        self._taken: list[MicroBatch] = []
        engine._batches.watch = self._take

    def _take(self, pair: tuple[Any, Any]) -> None:
        engine = self._engine()
        if engine is not None and engine.training and torch.is_grad_enabled() and len(self._taken) < _MOST:
            with suppress(Exception):  # of a class of the user's: then there is no batch
                self._taken.append(MicroBatch.from_arguments(pair, {}))

    def gathered(self, engine: PipelineEngine, wanted: Iterable[int]) -> dict[int, tuple[MicroBatch, MicroBatch]]:
        """Stop, and return two micro-batches of each rank of `wanted`, which are of the first stage, on rank 0.

        None are returned where they cannot be sent. Collective.
        """
        engine._batches.watch = None
        ranks, mesh = engine.communicator, engine.mesh
        ends = {rank: mesh.rank_at(_place(mesh.coordinates(rank), engine._placement[-1])) for rank in wanted}
        sent = ranks.gather_object(self._packed() if ranks.rank in {*ends, *ends.values()} else b"")
        self._taken.clear()
        if sent is None:
            return {}
        found = {}
        for first, end in ends.items():
            inputs, labels = _unpacked(sent[first]), _unpacked(sent[end])
            pairs = [(one[0], other[1]) for one, other in zip(inputs, labels, strict=False)]
            if not pairs:
                return {}
            both = [MicroBatch(pair, {}).in_float32() for pair in pairs]
            found[first] = both[0], both[-1]
        return found

    def _packed(self) -> bytes:
        """What this rank has taken, for `torch.load`; nothing where a class of the user's cannot be sent."""
        file = io.BytesIO()
        try:
            torch.save([one.on_host().inputs for one in self._taken], file)
        except Exception:  # of that class
            return b""
        return file.getvalue()


def _place(coordinates: Mapping[str, int], stage: int) -> dict[str, int]:
    return {axis: stage if axis == "pipe" else at for axis, at in coordinates.items()}


def _unpacked(data: bytes) -> list[Any]:
    """What `_packed` sent; nothing where it is of classes that are not plain."""
    if not data:
        return []
    with suppress(Exception):
        pairs: list[Any] = torch.load(io.BytesIO(data), weights_only=True)
        return pairs
    return []
