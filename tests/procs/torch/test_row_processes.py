"""Gradients of embeddings that travel as rows between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity_models import Params, assert_bitwise, assert_close, make_config, train, train_plainly
from row_models import bags_loss, dense_bags, everyone, sparse_bags

from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.procs import RankPool

Pools = Callable[..., RankPool]
STEPS = 3


def train_here(communicator: Communicator, config: dict[str, Any]) -> Params:
    return train(communicator, sparse_bags(), config, STEPS, bags_loss, everyone).params


@pytest.mark.parametrize("stage", [0, 2])
def test_rows_train_as_plain_torch(rank_pool: Pools, stage: int) -> None:
    def adam(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)

    wanted = train_plainly(2, STEPS, make_optimizer=adam, build=dense_bags, loss_fn=bags_loss, groups=everyone)
    first, second = rank_pool(2).run(train_here, make_config(stage))
    assert_bitwise(first, second)
    assert_close(first, wanted.params)
