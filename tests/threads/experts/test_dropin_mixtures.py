"""`deepspeed.moe.layer.MoE` over ranks that share experts trains what plain torch trains, at every stage."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import pytest
import torch
from dropin_mixtures import STEPS, batch, built, config_of

from polyaccel.comm.base import Communicator
from polyaccel.ops import matmul_autotune
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.sharding.tensor_shard import cuts_of

CASES = ["top 1 in order of nothing dropped", "top 2 without sampling", "top 3", "residual"]
"""Those that draw nothing: threads draw from one generator."""


@pytest.mark.parametrize(
    ("case", "ep_sizes", "ranks", "stage", "data_first"),
    [
        (CASES[0], (2, 2), 2, 3, False),
        (CASES[1], (2, 1), 4, 2, True),
        (CASES[2], (2, 4), 4, 1, False),
        (CASES[3], (2, 2), 2, 3, False),
    ],
)
def test_layers_of_experts_train_what_plain_torch_trains(
    case: str, ep_sizes: tuple[int, int], ranks: int, stage: int, data_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(matmul_autotune.VARIABLE, "off" if data_first else "on")
    model = built(case, ep_sizes)
    if case == "residual":
        for mixture in model.mixtures:
            mixture.deepspeed_moe.gate.use_rts = False
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    losses: list[list[float]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append([])
        for rank in range(ranks):
            loss, _ = plain(batch(step, rank))
            (loss / ranks).backward()
            losses[-1].append(loss.item())
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    config = {**config_of(stage), "use_data_before_expert_parallelism": data_first}

    def train(communicator: Communicator) -> tuple[list[float], dict[str, Any], Any]:
        mine = copies[communicator.rank]
        engine, *_ = deepspeed.initialize(model=mine, config=config, dist_init_required=False)
        found = []
        for step in range(STEPS):
            loss, _ = engine(batch(step, communicator.rank))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        first = {cut.block.runs[0] for cut in cuts_of(mine).values()}
        engine.destroy()
        return found, state, first

    of_ranks = run_threads(ranks, train)
    for rank, (found, state, _) in enumerate(of_ranks):
        assert found == pytest.approx([each[rank] for each in losses], rel=1e-5)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5)
    size = max(ep_sizes)
    blocks = [first for _, _, first in of_ranks]
    share = ranks // size if data_first else 1
    assert blocks == [{((rank // share % size * 4 // size, 4 // size),)} for rank in range(ranks)]
