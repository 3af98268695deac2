"""Micro-batches, and ranks' parts of a sequence, whose labels are all masked: numbers are those of plain torch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hf_models import VOCABULARY, tiny
from parity_models import assert_close, snapshot

import polyaccel
from polyaccel.comm.init.threads import run_threads

ACCUMULATION = 2
MASKED = [slice(6, None), slice(None, 8), slice(None), slice(0), slice(None, 5), slice(0)]
"""Of each micro-batch the tokens without a label: those of a rank, of all, of none, and others."""
RATE = 0.1


def micro_batches() -> list[dict[str, Any]]:
    """Rows of 12 tokens, masked as above."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for masked in MASKED:
        ids = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
        labels = ids.clone()
        labels[:, masked] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def train_plainly(model):
    """Losses of the untouched program, whose parameters stay finite after a mean over no tokens."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for place, batch in enumerate(micro_batches()):
        loss = model(**batch).loss
        losses.append(float(loss.detach()))
        (loss / ACCUMULATION).backward()
        if place % ACCUMULATION:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (1, {"tiled_compute": {"enabled": True}}),
        (2, {"tiled_compute": {"enabled": True}, "tensor_parallel": {"autotp_size": 2}}),
        (2, {"tiled_compute": {"enabled": True}, "sequence_parallel_size": 2}),
        (2, {"sequence_parallel_size": 2}),
        (2, {"sequence_parallel_size": 2, "sequence_parallel": {"method": "ring"}}),
    ],
    ids=["tiles", "tiles, tensor", "tiles, sequence", "ulysses", "ring"],
)
def test_labels_that_are_all_masked_count_as_in_torch(ranks, sections):
    start = tiny("llama", dtype=torch.float32).train()
    plain = deepcopy(start)
    expected = train_plainly(plain)
    assert [place for place, loss in enumerate(expected) if loss != loss] == [2]
    models = [deepcopy(start) for _ in range(ranks)]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": 1},
        **sections,
    }

    def run(communicator):
        engine, *_ = polyaccel.initialize(model=models[communicator.rank], config=config)
        losses = []
        for batch in micro_batches():
            loss = engine(**batch).loss
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        state = engine.module_state_dict()
        engine.destroy()
        return losses, state

    for losses, state in run_threads(ranks, run):
        assert losses == pytest.approx(expected, rel=1e-6, nan_ok=True)
        whole = snapshot(plain)
        assert_close({name: state[name] for name in whole}, whole, 1e-6)
