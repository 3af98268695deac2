"""The gradient noise scale against its formula in float64 of per-micro-batch gradients, at every stage."""

from __future__ import annotations

import pytest
import torch
from parity_models import drawn_from, make_config
from torch import nn

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads

SIZE = 4
STEPS = 3


def built():
    with drawn_from(3):
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def batch(step, micro, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    x = torch.randn(SIZE, 6, generator=generator)
    return x, x[:, :2].sin() + 3 + torch.randn(SIZE, 2, generator=generator)


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def config_of(stage, accumulation, decay, **changes):
    zero = {"reduce_bucket_size": 40, "stage3_param_persistence_threshold": 0}
    sgd = {"type": "SGD", "params": {"lr": 0.01}}
    changes = {"optimizer": sgd, "gradient_noise_scale": {"decay": decay}, **changes}
    return make_config(stage, accumulation=accumulation, zero=zero, **changes)


def measured(world, stage, accumulation, decay=0.0, **changes):
    def train(communicator):
        engine = polyaccel.initialize(model=built(), config=config_of(stage, accumulation, decay, **changes))[0]
        found = []
        for step in range(STEPS):
            for micro in range(accumulation):
                engine.backward(loss_of(engine, *batch(step, micro, communicator.rank)))
                engine.step()
            found.append(engine.metrics.gradient_noise_scale)
        return found

    runs = run_threads(world, train)
    assert all(run == runs[0] for run in runs)
    return runs[0]


def formula(world, accumulation, parts_of, decay=0.0):
    """By float64 gradients of micro-batches; `parts_of` makes them the squared norms of parts, and their number."""
    model = built().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    noise = signal = 0.0
    found = []
    for step in range(STEPS):
        grads = {}
        for rank in range(world):
            for micro in range(accumulation):
                loss = loss_of(model, *(part.double() for part in batch(step, micro, rank)))
                grads[rank, micro] = torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())])
        whole = torch.stack(list(grads.values())).mean(0)
        part, count = parts_of(grads)
        big = whole.square().sum()
        samples = world * accumulation * SIZE
        small = samples / count
        variance = (part - big) / (1 / small - 1 / samples)
        true = (samples * big - small * part) / (samples - small)
        noise, signal = decay * noise + (1 - decay) * variance, decay * signal + (1 - decay) * true
        found.append((noise / signal).item())
        at = 0
        for one in model.parameters():
            one.grad = whole[at : at + one.numel()].view(one.shape)
            at += one.numel()
        optimizer.step()
    return found


def of_micros(grads):
    return torch.stack([g.square().sum() for g in grads.values()]).mean(), len(grads)


def of_ranks(grads):
    ranks = sorted({rank for rank, _ in grads})
    means = [torch.stack([g for (of, _), g in grads.items() if of == rank]).mean(0) for rank in ranks]
    return torch.stack([g.square().sum() for g in means]).mean(), len(ranks)


def of_first(grads):
    return grads[0, 0].square().sum(), len(grads)


@pytest.mark.parametrize(
    ("world", "stage", "accumulation", "parts_of"),
    [
        (2, 0, 1, of_micros),
        (2, 1, 2, of_ranks),
        (2, 2, 2, of_micros),
        (3, 3, 1, of_micros),
        (1, 2, 3, of_micros),
        (1, 0, 3, of_first),
    ],
)
def test_the_noise_scale_is_its_formula_in_float64(world, stage, accumulation, parts_of):
    for decay in (0.0, 0.5):
        wanted = formula(world, accumulation, parts_of, decay)
        found = measured(world, stage, accumulation, decay)
        for ours, value in zip(found, wanted, strict=True):
            assert ours == (pytest.approx(value, rel=1e-3) if value > 0 else None)


def test_loss_scales_and_clipping_change_nothing():
    wanted = measured(2, 2, 2)
    assert measured(2, 2, 2, gradient_clipping=1e6) == pytest.approx(wanted, rel=1e-6)
    summed = measured(2, 2, 2, gradient_allreduce_op="sum", optimizer={"type": "SGD", "params": {"lr": 0.005}})
    assert summed == pytest.approx(wanted, rel=1e-3)


def test_it_is_none_with_one_part_and_refused_where_stages_share_samples():
    assert measured(1, 2, 1) == [None] * STEPS

    def build(communicator):
        config = config_of(1, 2, 0.9) | {"mesh": {"pipe": 2}}
        with pytest.raises(ConfigError) as caught:
            polyaccel.initialize(model=built(), config=config)
        assert [problem.key for problem in caught.value.problems] == ["gradient_noise_scale"]

    run_threads(2, build)
