"""Optimizers of configs that papers after 2018 define: their formulas in float64, stages, resumption, averages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity_models import assert_bitwise, drawn_from, make_config, snapshot
from torch import nn

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads

STEPS = 5
CASES = {
    "ScheduleFreeAdamW": {"lr": 0.02, "betas": [0.9, 0.95], "weight_decay": 0.1, "warmup_steps": 3},
    "Sophia": {"lr": 0.01, "betas": [0.9, 0.95], "rho": 0.04, "bs": 200, "hessian_interval": 2},
    "CAME": {"lr": 0.01, "betas": [0.9, 0.99, 0.95], "weight_decay": 0.1},
    "Shampoo": {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01},
    "SOAP": {"lr": 0.01, "betas": [0.9, 0.95], "precondition_frequency": 2, "weight_decay": 0.1},
}


def built():
    with drawn_from(0):
        return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))


def loss_of(model, step):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float32)
    dtype = next(model.parameters()).dtype if isinstance(model, nn.Sequential) else torch.float32
    return (model(x.to(dtype)) - x.to(dtype)[:, :3].sin()).square().mean()


def engine_for(name, stage, **changes):
    zero = {"reduce_bucket_size": 50, "stage3_param_persistence_threshold": 0}
    optimizer = {"type": name, "params": CASES[name]}
    return polyaccel.initialize(model=built(), config=make_config(stage, zero=zero, optimizer=optimizer, **changes))[0]


def go(engine, begin, end):
    for step in range(begin, end):
        engine.backward(loss_of(engine, step))
        engine.step()


def schedule_free(s, p, grads, _):
    """x, y and z as in algorithm 1 of Defazio et al. 2024."""
    (beta1, beta2), x, z, v, total = s["betas"], p, p, np.zeros_like(p), 0.0
    for step in range(1, STEPS + 1):
        y = (1 - beta1) * z + beta1 * x
        g = grads(y)
        rate = s["lr"] * min(1, step / s["warmup_steps"])
        v = beta2 * v + (1 - beta2) * g**2
        z = z - rate * (g / (np.sqrt(v / (1 - beta2**step)) + 1e-8) + s["weight_decay"] * y)
        total += rate**2
        x = (1 - rate**2 / total) * x + rate**2 / total * z
    return (1 - beta1) * z + beta1 * x, x


def sophia(s, p, grads, _):
    m, h = np.zeros_like(p), np.zeros_like(p)
    for step in range(STEPS):
        g = grads(p)
        m = s["betas"][0] * m + (1 - s["betas"][0]) * g
        if step % s["hessian_interval"] == 0:
            h = s["betas"][1] * h + (1 - s["betas"][1]) * g**2
        ratio = np.minimum(np.abs(m) / (s["rho"] * s["bs"] * h + 1e-15), 1)
        p = p * (1 - s["lr"] * 0.1) - s["lr"] * np.sign(m) * ratio
    return p, p


def came(s, p, grads, is_matrix):
    b1, b2, b3 = s["betas"]
    m = np.zeros_like(p)
    rows, columns = [np.zeros(p.shape[0])] * 2, [np.zeros(p.shape[-1])] * 2
    whole = np.zeros_like(p)

    def rsqrt(at, squares, beta):
        rows[at] = beta * rows[at] + (1 - beta) * squares.mean(1)
        columns[at] = beta * columns[at] + (1 - beta) * squares.mean(0)
        return np.sqrt(rows[at].mean() / np.outer(rows[at], columns[at]))

    for _ in range(STEPS):
        g = grads(p)
        if is_matrix:
            u = g * rsqrt(0, g**2 + 1e-30, b2)
        else:
            whole = b2 * whole + (1 - b2) * (g**2 + 1e-30)
            u = g / np.sqrt(whole)
        u = u / max(1, np.sqrt(np.mean(u**2)))
        m = b1 * m + (1 - b1) * u
        step = m * rsqrt(1, (u - m) ** 2 + 1e-16, b3) if is_matrix else m
        p = p - s["lr"] * s["weight_decay"] * p - s["lr"] * step
    return p, p


def power(matrix, exponent):
    values, vectors = np.linalg.eigh(matrix)
    return vectors @ np.diag(values**exponent) @ vectors.T


def shampoo(s, p, grads, is_matrix):
    left, right, v = (1e-4 * np.eye(p.shape[0]), 1e-4 * np.eye(p.shape[-1]), np.full_like(p, 1e-4))
    average = np.zeros_like(p)
    for _ in range(STEPS):
        g = grads(p)
        if is_matrix:
            left, right = left + g @ g.T, right + g.T @ g
            step = power(left, -0.25) @ g @ power(right, -0.25)
        else:
            v = v + g**2
            step = g / np.sqrt(v)
        average = s["momentum"] * average + step
        p = p * (1 - s["lr"] * s["weight_decay"]) - s["lr"] * average
    return p, p


def soap(s, p, grads, is_matrix):
    (b1, b2), m, v = s["betas"], np.zeros_like(p), np.zeros_like(p)
    left = right = ql = qr = None
    count = 0
    for at in range(STEPS):
        g = grads(p)
        if at == 0 and not is_matrix:
            continue
        if at == 0:
            left, right = (1 - b2) * g @ g.T, (1 - b2) * g.T @ g
            ql, qr = (np.linalg.eigh(each + 1e-30 * np.eye(len(each)))[1][:, ::-1] for each in (left, right))
            continue
        count += 1
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (ql.T @ g @ qr if is_matrix else g) ** 2
        step = (ql.T @ m @ qr if is_matrix else m) / (np.sqrt(v) + 1e-8)
        step = (ql @ step @ qr.T if is_matrix else step) * np.sqrt(1 - b2**count) / (1 - b1**count)
        p = p * (1 - s["lr"] * s["weight_decay"]) - s["lr"] * step
        if is_matrix:
            left, right = b2 * left + (1 - b2) * g @ g.T, b2 * right + (1 - b2) * g.T @ g
            if count % s["precondition_frequency"] == 0:
                order = np.argsort(-np.diag(ql.T @ left @ ql))
                v, ql = v[order], np.linalg.qr(left @ ql[:, order])[0]
                order = np.argsort(-np.diag(qr.T @ right @ qr))
                v, qr = v[:, order], np.linalg.qr(right @ qr[:, order])[0]
    return p, p


FORMULAS = {"ScheduleFreeAdamW": schedule_free, "Sophia": sophia, "CAME": came, "Shampoo": shampoo, "SOAP": soap}
SHAPES = [(4, 7), (5, 5), (9,)]
CASES_OF_SHAPES = [(name, shape) for name in CASES for shape in SHAPES if name != "SOAP" or shape != (4, 7)]
"""SOAP's bases of a matrix that is not square begin with eigenvectors of one eigenvalue, zero, which are any."""


@pytest.mark.parametrize(("name", "shape"), CASES_OF_SHAPES)
def test_updates_are_the_authors_formula_in_float64(name, shape):
    """On a quadratic function with a random metric, of a matrix or a vector."""
    draw = np.random.default_rng(len(shape))
    start, metric = draw.normal(size=shape), draw.normal(size=(np.prod(shape), np.prod(shape)))
    metric = metric @ metric.T / np.prod(shape)
    wanted, averaged = FORMULAS[name](
        CASES[name], start, lambda p: (metric @ p.ravel()).reshape(shape), len(shape) == 2
    )

    class Quadratic(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.from_numpy(start))
            self.register_buffer("metric", torch.from_numpy(metric))

        def forward(self):
            return 0.5 * self.p.flatten() @ self.metric @ self.p.flatten()

    config = make_config(0, optimizer={"type": name, "params": CASES[name]})
    engine = polyaccel.initialize(model=Quadratic(), config=config)[0]
    for _ in range(STEPS):
        engine.backward(engine())
        engine.step()
    np.testing.assert_allclose(engine.module.p.detach().numpy(), wanted, rtol=2e-5, atol=2e-6)
    if name == "ScheduleFreeAdamW":
        with engine.averaged_weights():
            np.testing.assert_allclose(engine.module.p.detach().numpy(), averaged, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(engine.module.p.detach().numpy(), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_stages_have_the_same_bits_and_resume_at_another_world_size(name, tmp_path):
    """All ranks have one batch, so that the number of ranks does not change the gradients."""

    def train(communicator, stage, *, begins):
        engine = engine_for(name, stage)
        if begins:
            go(engine, 0, 3)
            engine.save_checkpoint(str(tmp_path / f"{stage}"))
        else:
            engine.load_checkpoint(str(tmp_path / "2"))
        go(engine, 3, STEPS)
        engine.destroy()
        return snapshot(engine.module)

    wanted = run_threads(2, lambda communicator: train(communicator, 0, begins=True))[0]
    for stage in (1, 2, 3):
        for found in run_threads(2, lambda communicator, stage=stage: train(communicator, stage, begins=True)):
            assert_bitwise(found, wanted)
    for found in run_threads(3, lambda communicator: train(communicator, 3, begins=False)):
        for fqn, value in found.items():
            torch.testing.assert_close(value, wanted[fqn], rtol=1e-4, atol=1e-5)


def test_a_schedule_with_a_schedule_free_optimizer_is_refused():
    with pytest.raises(ConfigError) as caught:
        engine_for("ScheduleFreeAdamW", 1, scheduler={"type": "WarmupLR", "params": {}})
    assert [problem.key for problem in caught.value.problems] == ["scheduler.type"]
