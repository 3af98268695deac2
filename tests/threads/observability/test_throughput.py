"""Tokens and operations of a step: those of a formula, on every rank, with and without what is computed again."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import polyaccel
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.profiling.operations import CountingMode
from polyaccel.utils import see_memory_usage

VOCAB, WIDTH, TOKENS = 32, 16, 6
OPERATIONS = 2 * (2 * TOKENS) * (WIDTH * WIDTH + WIDTH * VOCAB)
"""Of a forward pass of two sequences: a multiplication and an addition for each weight and token."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.middle(self.embedding(input_ids)).tanh())
        return nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())


def test_work_is_that_of_the_formula(caplog):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "timers": {"throughput": {"enabled": True, "synchronized": True}},
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "steps_per_print": 1,
    }

    def train(communicator):
        torch.manual_seed(0)
        engine, *_ = polyaccel.initialize(model=Model(), config=config)
        batches = [torch.randint(VOCAB, (2, TOKENS)) for _ in range(4)]
        for at, each in enumerate(batches):
            engine.eval()
            with torch.no_grad():
                engine(each)  # is no work of a step
            engine.train()
            engine.backward(engine(input_ids=each) if at % 2 else engine(each))
            engine.step()
        metrics = engine.metrics
        engine.destroy()
        return metrics

    with caplog.at_level(logging.INFO, "polyaccel"):
        found = run_threads(2, train)
    for metrics in found:
        assert metrics.tokens_per_s * metrics.step_time_s == pytest.approx(2 * 2 * 2 * TOKENS)  # of both ranks
        assert metrics.tflops * metrics.step_time_s * 1e12 == pytest.approx(3 * 2 * OPERATIONS)  # of each
        assert 0 < metrics.model_flops_utilisation < 1
        assert sum(metrics.phase_s.values()) == pytest.approx(metrics.step_time_s)
        assert metrics.device_phase_s == {}
    lines = [record.getMessage() for record in caplog.records]
    assert any("tokens/s" in line and "TFLOPS a rank" in line and "of a large product" in line for line in lines)
    (planned, *_) = [line for line in lines if line.startswith("  of that, by the plan: parameters ")]
    assert "optimizer states" in planned
    assert sum(line.startswith("  memory: device ") for line in lines) == 2  # of each step, on rank 0


def test_attention_and_products_of_the_host_are_counted():
    """torch has no formula for its attention on CPUs, nor for oneDNN's products."""
    heads = [torch.rand(2, 4, 8, 16) for _ in range(3)]
    with CountingMode() as counted:
        nn.functional.scaled_dot_product_attention(*heads)
    assert counted.total == 2 * 2 * (2 * 4) * 8 * 8 * 16
    with CountingMode() as counted:
        torch.ops.mkldnn._linear_pointwise.default(torch.rand(3, 5, 8), torch.rand(4, 8), None, "none", [], "")
    assert counted.total == 2 * 15 * 8 * 4


def test_memory_is_said_where_it_is_asked_for(caplog):
    def ask(communicator):
        see_memory_usage("quietly")
        see_memory_usage("after the model", force=True)

    with caplog.at_level(logging.INFO, "polyaccel"):
        run_threads(2, ask)
    (line,) = [text for record in caplog.records if "accelerator" not in (text := record.getMessage())]
    assert line.startswith("after the model: device ")
    assert " in use, " in line
