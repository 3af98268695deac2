"""Mixtures whose experts are spread over ranks of several hosts train the same, whichever way their rows take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity_models import make_config
from pretended_hosts import Hosts, on_hosts, pass_on_up_to
from torch import Tensor, nn

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.comm.collective import Operation
from polyaccel.comm.default import set_thread_communicator
from polyaccel.comm.flight_recorder.record import FlightRecorder, RecordingCommunicator
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.experts import Mixture

WIDTH, STEPS = 12, 3
LAYOUTS: dict[str, Hosts] = {
    "2 x 2": ((0, 1), (2, 3)),
    "2 x 2, anyhow": ((0, 3), (2, 1)),
    "3 x 2": ((0, 1), (2, 3), (4, 5)),
}


class TwoMixtures(nn.Module):
    """Of seven experts, so that ranks have unequally many."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (Mixture(WIDTH, self.expert, 7, k=2) for _ in range(2))

    @staticmethod
    def expert() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.SiLU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(x + first.output)
        loss: Tensor = second.output.square().mean() + first.loss + second.loss
        return loss


def trained(hosts: Hosts) -> list[tuple[set[int], list[float], dict[str, bytes]]]:
    """Of each rank, how many ranks its all-to-alls of rows were among, its losses and its values."""
    ranks = sum(map(len, hosts))
    torch.manual_seed(1)
    models = [TwoMixtures() for _ in range(ranks)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())

    def train(comm: Communicator) -> Any:
        recorder = FlightRecorder()
        set_thread_communicator(on_hosts(RecordingCommunicator(comm, recorder, watch_s=None), hosts))
        config = make_config(
            1,
            optimizer={"type": "SGD", "params": {"lr": 0.1}},
            expert_parallel={"enabled": True, "autoep_size": ranks},
        )
        engine, *_ = polyaccel.initialize(model=models[comm.rank], config=config)
        losses = []
        for step in range(STEPS):
            seed = torch.Generator().manual_seed(10 * step + comm.rank)
            loss = engine(torch.randn(1 if step == 1 else 5 + comm.rank, WIDTH, generator=seed))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        values = {name: value.numpy().tobytes() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        rows = [one for one in recorder.entries if one.collective.operation is Operation.ALL_TO_ALL]
        return {len(entry.group) for entry in rows if "tokens" in entry.collective.label}, losses, values

    return run_threads(ranks, train)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_are_passed_on_have_the_bits_of_rows_that_go_directly(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = LAYOUTS[layout]
    pass_on_up_to(1 << 20, monkeypatch)
    passed_on = trained(hosts)
    pass_on_up_to(0, monkeypatch)
    directly = trained(hosts)
    assert [groups for groups, _, _ in passed_on] == [{len(hosts), len(hosts[0])}] * len(passed_on)
    assert [groups for groups, _, _ in directly] == [{len(passed_on)}] * len(passed_on)
    assert [rank[1:] for rank in passed_on] == [rank[1:] for rank in directly]
