"""Packed rows train as their documents one by one: losses and gradients in float64, on sequence ranks too."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import VOCABULARY, tiny
from parity_models import make_config
from torch.utils.data import default_collate

import polyaccel
from polyaccel.comm.init.threads import run_threads
from polyaccel.data import PackedDataset

CAPACITY = 20


def documents() -> list[Any]:
    numbers = np.random.default_rng(0)
    return [numbers.integers(3, VOCABULARY, size) for size in (7, 12, 20, 3, 1, 9, 26, 5)]


def summed(model: Any, ids: Any, labels: Any, **named: Any) -> torch.Tensor:
    """The sum of losses, in the logits' type; transformers' own casts to float32."""
    logits = model(ids, use_cache=False, **named).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def one_by_one(model: Any, data: PackedDataset) -> torch.Tensor:
    """The mean loss of all tokens, each document in a forward pass of its own."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for one in (one for row in data.rows for one in row if len(one) > 1):
        ids = torch.as_tensor(np.asarray(data.documents[one.document])[one.start : one.stop])[None]
        total = total + summed(model, ids, ids)
        count += len(one) - 1
    return total / count


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("masks", [False, True])
def test_losses_and_gradients_are_those_of_documents_alone(kind: str, masks: bool) -> None:
    data = PackedDataset(documents(), CAPACITY, masks=masks)
    model: Any = tiny(kind).train()
    alone = deepcopy(model)
    wanted = one_by_one(alone, data)
    wanted.backward()  # type: ignore[no-untyped-call]
    batch = default_collate([data[index] for index in range(len(data))])
    ids, labels = batch.pop("input_ids"), batch.pop("labels")
    loss = summed(model, ids, labels, **batch) / int((labels != -100).sum())
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    for found, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_sequence_ranks_separate_documents(method: str) -> None:
    data = PackedDataset(documents(), CAPACITY)
    start = tiny("llama", dtype=torch.float32).train()
    wanted = one_by_one(deepcopy(start), data).item()
    config = make_config(2) | {"sequence_parallel_size": 2, "sequence_parallel": {"method": method}}
    config["train_micro_batch_size_per_gpu"] = len(data)
    models = [deepcopy(start) for _ in range(2)]

    def run(communicator: Any) -> float:
        engine, *_ = polyaccel.initialize(model=models[communicator.rank], training_data=data, config=config)
        loss: float = engine(**next(iter(engine.training_dataloader)), use_cache=False).loss.item()
        engine.destroy()
        return loss

    assert run_threads(2, run) == pytest.approx([wanted] * 2, rel=1e-5)
