"""Tokens and operations of a step of JAX: those of a formula, loops included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import polyaccel
from polyaccel.jax.operations import operations_by_scope
from polyaccel.testkit.ranks.threads import run_threads

LAYERS, WIDTH, TOKENS = 3, 8, 5


def loss(params: Any, batch: Any, rng: Any) -> Any:
    def layer(x: Any, weight: Any) -> Any:
        with jax.named_scope("layer"):
            return jnp.tanh(x @ weight), None

    x, _ = jax.lax.scan(layer, params["embedding"][batch], params["layers"])
    with jax.named_scope("head"):
        return (x @ params["head"]).mean()


def parameters() -> dict[str, Any]:
    return {
        "embedding": jnp.ones((7, WIDTH)),
        "layers": jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH,
        "head": jnp.ones((WIDTH, 4)),
    }


def formula(samples: int) -> dict[str, int]:
    tokens = samples * TOKENS
    return {"layer": 2 * tokens * LAYERS * WIDTH * WIDTH, "head": 2 * tokens * WIDTH * 4}


def test_operations_are_counted_by_scope_and_loops_as_often_as_they_run() -> None:
    traced = jax.make_jaxpr(loss)(parameters(), jnp.zeros((2, TOKENS), int), None)
    assert operations_by_scope(traced) == formula(2)


def test_without_loops_xla_counts_the_same_products() -> None:
    """XLA adds one operation for each element of everything else."""

    def product(a: Any, b: Any, c: Any) -> Any:
        return jnp.einsum("bij,bjk->bik", a, b) @ c

    arguments = jnp.ones((3, 40, 50)), jnp.ones((3, 50, 60)), jnp.ones((60, 70))
    ours = operations_by_scope(jax.make_jaxpr(product)(*arguments)).total()
    assert ours == pytest.approx(jax.jit(product).lower(*arguments).compile().cost_analysis()["flops"], rel=0.01)
    image, kernel = jnp.ones((2, 8, 16, 16)), jnp.ones((12, 8, 3, 3))
    convolved = jax.make_jaxpr(lambda a, b: jax.lax.conv(a, b, (1, 1), "SAME"))(image, kernel)
    assert operations_by_scope(convolved).total() == 2 * (2 * 12 * 16 * 16) * 8 * 9


def test_work_is_that_of_the_formula(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
        "timers": {"throughput": {"enabled": True}},
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": str(tmp_path / "table.txt")},
    }

    def train(communicator: Any) -> Any:
        engine = polyaccel.initialize(model=loss, params=parameters(), config=config)
        for _ in range(2):
            engine.train_batch(jnp.zeros((4, TOKENS), int))
        metrics = engine.metrics
        engine.destroy()
        return metrics

    for metrics in run_threads(2, train):
        assert metrics.tokens_per_s * metrics.step_time_s == pytest.approx(2 * 4 * TOKENS)
        assert metrics.tflops * metrics.step_time_s * 1e12 == pytest.approx(3 * sum(formula(4).values()))
        assert metrics.model_flops_utilisation > 0
    table = (tmp_path / "table.txt").read_text()
    assert "parameters 280, MACs 2.24 K, FLOPs 4.48 K in the forward pass" in table
    rows = {line.split()[0]: line for line in table.splitlines() if " scope " in line}
    assert "3.84 K" in rows["layer"]
    assert " 640 " in rows["head"]
