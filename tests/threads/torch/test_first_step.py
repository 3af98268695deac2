"""Proofs at the first step: right programs are proven once, wrong rewrites stop before the first update, and a proof
leaves no trace in the training."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import numpy as np
import pytest
import torch
from planted_change import plant
from proof_verdicts import pass_on_verdicts, prove_as_users_do
from torch import nn

import polyaccel
from polyaccel.comm.default import default_communicator
from polyaccel.comm.init.threads import run_threads
from polyaccel.errors import ConfigError, VerificationError
from polyaccel.torch.rewrites.cuts import TensorParallel
from polyaccel.torch.rewrites.engine import ActivationCheckpointing
from polyaccel.torch.verify.first_step import FirstStepProof
from polyaccel.torch.verify.untouched import Untouched

BASE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "gradient_clipping": 0.5,
}
RECOMPUTED = {"activation_checkpointing": {"enabled": True}}
_LOCK = threading.Lock()
"""Ranks that are threads share torch's generator while they make weights."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.fc2(self.act(self.fc1(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.first, self.norm, self.head = nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x, y=None):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits if y is None else nn.functional.cross_entropy(logits, y)


class Counted(Net):
    """A model whose state is a number among its attributes too."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, y=None):
        self.calls += 1
        return super().forward(x, y)


class Still(Net):
    """Without dropout, which ranks that are threads draw in any order."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.drop.p = 0.0


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    prove_as_users_do(monkeypatch, tmp_path)


@pytest.fixture
def verdicts(monkeypatch):
    """The proofs of all ranks, and the reasons for what was not proven."""
    found = []
    pass_on_verdicts(monkeypatch, FirstStepProof, found.append)
    return found


@pytest.fixture
def copies(monkeypatch):
    """Weak references to the models that proofs train."""
    found = []
    with_values = Untouched.with_values

    def note(self, *given):
        copied = with_values(self, *given)
        found.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(Untouched, "with_values", note)
    return found


def living(copies):
    gc.collect()
    return [one for one in copies if one() is not None]


def train(world=1, make_model=Net, *, optimizer=None, has_loss=True, steps=2, load="", save="", **config):
    """Train, and return the state of each rank."""

    def program(_):
        with _LOCK:
            torch.manual_seed(0)
            model = make_model()
            model.dummy_inputs = {"x": torch.zeros(2, 8), "y": torch.zeros(2, dtype=torch.long)}
        engine, *_ = polyaccel.initialize(model=model, optimizer=optimizer, config={**BASE, **config})
        if load:
            engine.load_checkpoint(load)
        data = engine.mesh.coordinates(default_communicator().rank)["data"]
        draw = torch.Generator().manual_seed(data)
        for _ in range(steps * BASE["gradient_accumulation_steps"]):
            x, y = torch.randn(4, 8, generator=draw), torch.randint(0, 5, (4,), generator=draw)
            if engine.mesh.has_several("pipe"):
                engine.train_batch(iter([{"x": x, "y": y}] * BASE["gradient_accumulation_steps"]))
                continue
            engine.backward(engine(x, y) if has_loss else nn.functional.cross_entropy(engine(x), y))
            engine.step()
        hooks = [len(one._forward_pre_hooks) + len(one._forward_hooks) for one in (engine, *engine.module.modules())]
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        if save:
            engine.save_checkpoint(save)
        state |= {"calls": torch.tensor(getattr(engine.module, "calls", 0)), "hooks": torch.tensor(hooks)}
        engine.destroy()
        return state

    return run_threads(world, program)


@pytest.mark.parametrize(
    ("world", "config"),
    [
        (1, RECOMPUTED),
        (2, {**RECOMPUTED, "zero_optimization": {"stage": 3}}),
        (2, {"mesh": {"tensor": 2}}),
        (2, {"mesh": {"pipe": 2}}),
    ],
)
def test_a_right_program_is_proven_and_the_next_run_is_not_compared(world, config, verdicts, copies):
    threads = set(threading.enumerate())
    train(world, **config)
    assert copies
    assert not living(copies)
    assert set(threading.enumerate()) <= threads
    assert len(verdicts) == world
    assert all(not isinstance(one, str) and one.is_proven and one.quantities > 30 for one in verdicts), verdicts
    train(world, **config)
    assert len(verdicts) == world


def test_a_model_without_its_loss_is_proven_by_its_outputs(verdicts):
    train(has_loss=False, **RECOMPUTED)
    assert verdicts[0].is_proven


def test_a_plain_engine_is_compared_only_always(verdicts):
    train()
    assert verdicts == []
    train(verify="always")
    train(verify="always")
    assert [one.is_proven for one in verdicts] == [True, True]


def test_a_resumed_run_is_not_compared_again(monkeypatch, tmp_path, verdicts):
    train(save=str(tmp_path / "saved"), **RECOMPUTED)
    train(load=str(tmp_path / "saved"), **RECOMPUTED)
    assert [one.is_proven for one in verdicts] == [True]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    train(load=str(tmp_path / "saved"), **RECOMPUTED)  # from the weights and states of the checkpoint
    assert [one.is_proven for one in verdicts] == [True, True]


def test_a_proof_leaves_no_trace(verdicts):
    def states(choice):
        random.seed(0)
        np.random.seed(0)
        (state,) = train(1, Counted, verify=choice, **RECOMPUTED)
        return state, torch.get_rng_state(), random.getstate(), np.random.get_state()

    off, on = states("off"), states("auto")
    assert verdicts[0].is_proven
    assert off[0].keys() == on[0].keys()
    for name, value in off[0].items():
        assert torch.equal(value, on[0][name]), name
    assert torch.equal(off[1], on[1])
    assert off[2] == on[2]
    np.testing.assert_equal(off[3], on[3])


def test_a_wrong_rewrite_stops_before_the_first_update(monkeypatch, verdicts):
    plant(monkeypatch, TensorParallel, lambda model: model.layers[1].fc2.bias.register_hook(lambda one: 2 * one))
    with pytest.raises(VerificationError) as error:
        train(2, mesh={"tensor": 2})
    assert error.value.value == "layers.1.fc2.bias"
    assert {one.blamed for one in verdicts} == {("tensor_parallel",)}


def test_a_state_that_recomputation_changes_twice_is_an_error(monkeypatch):
    def count(module, inputs, output):
        if module.training:
            module.num_batches_tracked += 1

    plant(monkeypatch, ActivationCheckpointing, lambda model: model.first.register_forward_hook(count))
    with pytest.raises(VerificationError) as error:
        train(**RECOMPUTED)
    assert error.value.value == "first.num_batches_tracked"


class Hooked(Net):
    def __init__(self):
        super().__init__()
        seen = []
        self.head.register_forward_hook(lambda module, inputs, output: seen.append(module))


class Locked(Net):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Noisy(Net):
    def forward(self, x, y=None):
        torch.seed()
        return super().forward(x + torch.randn_like(x), y)


@pytest.mark.parametrize("model", [Hooked, Locked, Noisy])
def test_what_cannot_be_proven_trains(model, verdicts):
    train(1, model, **RECOMPUTED)
    assert [one for one in verdicts if isinstance(one, str)]


def test_a_large_model_is_not_proven(monkeypatch, verdicts):
    monkeypatch.setattr("polyaccel.torch.verify.first_step._BYTES_OF_PARAMETER", 1 << 40)
    train(**RECOMPUTED)
    assert "parameters" in verdicts[0]


@pytest.mark.parametrize(("world", "config"), [(1, RECOMPUTED), (2, {"mesh": {"tensor": 2}})])
def test_a_rank_of_the_proof_that_fails_alone_leaves_no_trace(world, config, monkeypatch, verdicts, copies):
    """The others do not wait for it, and nothing of the copies is left."""

    def fail(_, engine):
        if engine.communicator.rank == world - 1:
            raise MemoryError

    off = train(world, Still, verify="off", **config)
    monkeypatch.setattr("polyaccel.torch.verify.copied_trainings.record_steps", fail)
    threads = set(threading.enumerate())
    on = train(world, Still, **config)
    assert len(verdicts) == world
    assert all("MemoryError" in one for one in verdicts)
    for rank in range(world):
        assert all(torch.equal(value, on[rank][name]) for name, value in off[rank].items())
    assert copies
    assert not living(copies)
    assert set(threading.enumerate()) <= threads


def test_an_unknown_word_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("POLYACCEL_VERIFY", "sometimes")
    with pytest.raises(ConfigError) as error:
        train(**RECOMPUTED)
    assert error.value.problems[0].value == "sometimes"
