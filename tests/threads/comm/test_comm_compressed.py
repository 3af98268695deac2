"""One bit an element, with error feedback: the same bits everywhere, errors that do not add up, and it converges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from polyaccel.comm import CompressedAllReduce
from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.errors import ShardingError
from polyaccel.testkit.ranks.threads import run_threads


@pytest.mark.parametrize("numel", [0, 5, 10_007])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_errors_of_a_quantity_do_not_add_up(world: int, numel: int) -> None:
    """The mean over 200 calls is near the exact average, one call's result is not; all ranks have the same bits."""

    def body(comm: Communicator) -> bytes:
        average = CompressedAllReduce(numel)
        mine = [np.random.default_rng(rank).uniform(-1, 1, numel).astype(np.float32) for rank in range(world)]
        total = np.zeros(numel)
        for _ in range(200):
            tensor = torch.from_numpy(mine[comm.rank].copy())
            average(tensor)
            total += tensor.numpy()
        off = np.linalg.norm(total / 200 - np.mean(mine, axis=0))
        assert off <= 0.05 * np.linalg.norm(np.mean(mine, axis=0))
        if world > 1 and numel > 5:
            assert not np.allclose(tensor.numpy(), np.mean(mine, axis=0), atol=0.2)
        return tensor.numpy().tobytes()

    results = run_threads(world, body)
    assert all(one == results[0] for one in results)


@pytest.mark.parametrize("world", [2, 4])
def test_momentum_descent_converges_as_with_exact_averages(world: int) -> None:
    """Least squares, each rank with data of its own: the last loss within a tenth of the way from the best possible."""

    def loss_after(comm: Communicator, average: Any) -> tuple[float, float]:
        generator = np.random.default_rng(7)
        data = generator.standard_normal((world, 64, 300)).astype(np.float32)
        goal = generator.standard_normal(300).astype(np.float32)
        weights, momentum = np.zeros(300, np.float32), torch.zeros(300)
        first = float(np.mean((data @ (weights - goal)) ** 2))
        for _ in range(400):
            gradient = data[comm.rank].T @ (data[comm.rank] @ (weights - goal)) / 64
            momentum.mul_(0.9).add_(torch.from_numpy(gradient), alpha=0.1)
            average(momentum)
            weights = weights - 0.05 * momentum.numpy()
        return first, float(np.mean((data @ (weights - goal)) ** 2))

    def body(comm: Communicator) -> tuple[tuple[float, float], tuple[float, float]]:
        def exact(tensor: torch.Tensor) -> None:
            comm.all_reduce(comm.accelerator.wrap(tensor))
            tensor.div_(world)

        return loss_after(comm, exact), loss_after(comm, CompressedAllReduce(300))

    for (first, exact), (_, compressed) in run_threads(world, body):
        assert exact < 0.05 * first
        assert compressed < exact + 0.05 * first


def test_it_sends_a_thirtieth_of_the_bytes() -> None:
    def body(comm: Communicator) -> int:
        recording = RecordingCommunicator(comm, watch_s=None)
        CompressedAllReduce(1 << 16, recording)(torch.ones(1 << 16))
        return sum(
            entry.collective.numel // 2 * entry.collective.dtype.itemsize for entry in recording.recorder.entries
        )

    assert run_threads(2, body) == [2 * ((1 << 15) // 8 + 4 * 32)] * 2


def test_another_size_is_refused_and_what_is_not_finite_is_shown() -> None:
    def body(comm: Communicator) -> None:
        average = CompressedAllReduce(3000)
        with pytest.raises(ShardingError) as caught:
            average(torch.ones(4))
        assert caught.value.value == 4
        assert "3000" in str(caught.value)
        tensor = torch.ones(3000)
        tensor[0] = torch.inf if comm.rank else 1.0
        average(tensor)
        assert tensor[0].isnan()
        assert tensor[-1] == 1.0
        again = torch.ones(3000)
        average(again)
        assert again.isfinite().all()

    run_threads(2, body)
