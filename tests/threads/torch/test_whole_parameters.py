"""Optimizers that look at whole parameters: each parameter on the rank that owns it, with plain torch's numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from own_optimizers import REFUSED, WHOLE, Net
from torch import nn

import polyaccel
from polyaccel.errors import ShardingError
from polyaccel.testkit.ranks.threads import run_threads

STEPS = 4

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.8 has no torch.optim.Muon")


class Odd(nn.Module):
    """Matrices of odd shapes, one of them tied and one frozen."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in ((7, 13), (13, 5), (5, 5), (5, 31), (31, 7)))
        self.again = nn.Linear(7, 13, bias=False)
        self.again.weight = self.inner[0].weight
        self.fixed = nn.Linear(13, 7, bias=False)
        self.fixed.weight.requires_grad_(False)

    def forward(self, x):
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return self.fixed(torch.tanh(self.again(x))).square().mean()


def data(step, rank, width):
    return torch.randn(3, width, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(world, stage, build, make, width, *, micro_batches=1, clip=0.0, **zero):
    """The weights after some steps, on every rank."""
    torch.manual_seed(0)
    models = [build()]  # here, for ranks that are threads have one generator
    models += [copy.deepcopy(models[0]) for _ in range(world - 1)]

    def go(communicator):
        model = models[communicator.rank]
        config = {
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": clip,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": 150,
                "stage3_param_persistence_threshold": 20,
                **zero,
            },
        }
        engine, *_ = polyaccel.initialize(model=model, optimizer=make(model), config=config)
        for step in range(STEPS):
            for micro in range(micro_batches):
                engine.backward(engine(data(step * micro_batches + micro, communicator.rank, width)))
                engine.step()
        found = engine.module_state_dict()
        engine.destroy()
        return {name: value.detach().clone() for name, value in found.items()}

    return run_threads(world, go)


def plain(world, build, make, width, *, micro_batches=1, clip=0.0):
    torch.manual_seed(0)
    model = build()
    optimizer = make(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            for rank in range(world):
                loss = model(data(step * micro_batches + micro, rank, width))
                (loss / (world * micro_batches)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


def compare(found, wanted, atol=1e-6):
    for weights in found:
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=atol)


def muon(model):
    return torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.1)


@pytest.mark.parametrize("name", sorted(WHOLE))
@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 3), (3, 2), (3, 1)])
def test_the_numbers_are_those_of_plain_torch(name, stage, world):
    found = trained(world, stage, Net, WHOLE[name], 6)
    compare(found, plain(world, Net, WHOLE[name], 6), 2e-6)


@needs_muon
@pytest.mark.parametrize(
    ("stage", "of", "world", "micro_batches"), [(1, 0, 3, 1), (2, 0, 2, 1), (3, 0, 3, 1), (3, 2, 2, 2)]
)
def test_muon_of_torch_has_the_bits_of_other_stages(stage, of, world, micro_batches):
    """Odd shapes, a tied and a frozen matrix, several buckets; sums of accumulation have their own order from 2 on."""
    wanted = trained(world, of, Odd, muon, 7, micro_batches=micro_batches, clip=0.5)[0]
    for weights in trained(world, stage, Odd, muon, 7, micro_batches=micro_batches, clip=0.5):
        assert {name for name, value in wanted.items() if not torch.equal(weights[name], value)} == set()


@needs_muon
def test_muon_of_torch_has_its_numbers_in_plain_torch():
    found = trained(2, 2, Odd, muon, 7)
    compare(found, plain(2, Odd, muon, 7), 2e-3)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_looks_at_other_parameters_is_refused(name):
    def go(_):
        model = Net()
        optimizer = REFUSED[name](model)
        before = copy.deepcopy(model.state_dict())
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2},
        }
        with pytest.raises(ShardingError) as caught:
            polyaccel.initialize(model=model, optimizer=optimizer, config=config)
        assert caught.value.value == type(optimizer).__name__
        assert '"stage": 0' in caught.value.hint
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())

    run_threads(2, go)


@needs_muon
@pytest.mark.parametrize("key", ["zero_quantized_gradients", "zero_quantized_weights"])
def test_traffic_in_codes_is_refused(key):
    with pytest.raises(ShardingError) as caught:
        trained(2, 3, Odd, muon, 7, **{key: True})
    assert "zero_quantized" in caught.value.hint


@pytest.mark.parametrize(("first", "second"), [((2, 1), (3, 3)), ((3, 2), (1, 2)), ((2, 3), (2, 0)), ((1, 0), (2, 2))])
@pytest.mark.parametrize("kind", ["Adafactor", pytest.param("Muon", marks=needs_muon)])
def test_states_go_along_to_another_size_and_stage(tmp_path, kind, first, second):
    """As if nothing had happened, in steps that see the same data on every rank."""
    make = muon if kind == "Muon" else lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2)

    def part(world, stage, steps, load, save):
        torch.manual_seed(0 if load is None else 1)
        models = [Odd() for _ in range(world)]

        def go(communicator):
            model = models[communicator.rank]
            config = {
                "train_micro_batch_size_per_gpu": 3,
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 150},
            }
            engine, *_ = polyaccel.initialize(model=model, optimizer=make(model), config=config)
            if load is not None:
                engine.load_checkpoint(load)
            for step in steps:
                engine.backward(engine(data(step, 0, 7)))
                engine.step()
            if save is not None:
                engine.save_checkpoint(save)
            found = {name: value.detach().clone() for name, value in engine.module_state_dict().items()}
            engine.destroy()
            return found

        return run_threads(world, go)[0]

    wanted = part(*first, range(5), None, None)
    part(*first, range(3), None, str(tmp_path))
    found = part(*second, range(3, 5), str(tmp_path), None)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
