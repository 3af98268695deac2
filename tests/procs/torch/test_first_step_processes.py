"""Proofs at the first step in processes: over gloo and shared memory, with failures of one rank alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import polyaccel
from polyaccel.torch.pipeline import LayerSpec, PipelineModule
from polyaccel.torch.verify import copied_trainings
from polyaccel.torch.verify.first_step import FirstStepProof


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2, self.drop = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.fc2(nn.functional.gelu(self.fc1(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Block() for _ in range(2)]), nn.Linear(8, 5)
        self.dummy_inputs = {"x": torch.zeros(2, 8), "y": torch.zeros(2, dtype=torch.long)}

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), y)


class Layers(PipelineModule):
    """Two stages of layers that the script built itself."""

    def __init__(self):
        layers = [LayerSpec(Block) for _ in range(3)]
        super().__init__([*layers, LayerSpec(nn.Linear, 8, 5)], 2, loss_fn=nn.functional.cross_entropy)


class Grouped(Net):
    """A model that uses torch's groups while it runs."""

    def forward(self, x, y):
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(torch.zeros(1))
        return super().forward(x, y)


def train(communicator, choice, failing, kind, config):
    """Train two steps, and return the weights, what proofs came to, and counts of what a process holds."""
    os.environ["POLYACCEL_VERIFY"] = choice
    found, say, conclude = [], FirstStepProof._say, FirstStepProof._conclude
    record = copied_trainings.record_steps

    def fail(run, engine):
        if engine.communicator.rank == engine.communicator.world_size - 1:
            raise MemoryError
        record(run, engine)

    FirstStepProof._say = lambda self, engine, reason: found.append(reason)
    FirstStepProof._conclude = lambda self, engine, proof, seconds: found.append(proof.is_proven)
    copied_trainings.record_steps = fail if failing else record
    try:
        torch.manual_seed(0)
        base = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        engine, *_ = polyaccel.initialize(model=kind(), config={**base, **config})
        draw = torch.Generator().manual_seed(engine.mesh.coordinates(communicator.rank).get("data", 0))
        torch.manual_seed(1)
        for step in range(3):
            if step == 1:
                held = sorted(one.name for one in threading.enumerate()), len(list(Path("/proc/self/fd").iterdir()))
            batch = {"x": torch.randn(4, 8, generator=draw), "y": torch.randint(0, 5, (4,), generator=draw)}
            if kind is Layers or "pipe" in config.get("mesh", {}):
                engine.train_batch(iter([tuple(batch.values()) if kind is Layers else batch]))
                continue
            engine.backward(engine(**batch))
            engine.step()
        state = {name: one.clone() for name, one in engine.module_state_dict().items()}
        engine.destroy()
        return state, found, held, torch.get_rng_state()
    finally:
        FirstStepProof._say, FirstStepProof._conclude = say, conclude
        copied_trainings.record_steps = record
        os.environ["POLYACCEL_VERIFY"] = "off"


@pytest.mark.parametrize(
    ("backend", "kind", "config"),
    [
        ("gloo", Net, {"mesh": {"tensor": 2}}),
        ("gloo", Layers, {"zero_optimization": {"stage": 1}}),
        ("shm", Net, {"mesh": {"pipe": 2}}),
        ("shm", Net, {"activation_checkpointing": {"enabled": True}, "zero_optimization": {"stage": 3}}),
    ],
)
def test_a_proof_in_processes_leaves_no_trace_with_and_without_failures(rank_pool, backend, kind, config):
    pool = rank_pool(2, backend)
    pool.run(train, "off", False, kind, config)  # what a first training makes for good
    off = pool.run(train, "off", False, kind, config)
    proven = pool.run(train, "always", False, kind, config)
    failed = pool.run(train, "always", True, kind, config)
    assert [one[1] for one in proven] == [[True], [True]]
    assert all("MemoryError" in one[1][0] for one in failed)
    for ours in (proven, failed):
        for rank, (state, _, held, draws) in enumerate(ours):
            assert all(torch.equal(value, state[name]) for name, value in off[rank][0].items())
            assert held == off[rank][2]
            assert torch.equal(draws, off[rank][3])


def test_a_model_that_uses_groups_of_torch_is_not_proven(rank_pool):
    config = {"activation_checkpointing": {"enabled": True}}
    for _, found, _, _ in rank_pool(2, "gloo").run(train, "always", False, Grouped, config):
        assert len(found) == 1
        assert isinstance(found[0], str)
