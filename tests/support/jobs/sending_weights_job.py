"""Ranks of a job that step and send their weights to the receiver `sys.argv[1]`, as often as `sys.argv[2]` says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from parity_models import batch, make_config, parity_model

import polyaccel

TIED = "head.weight"
"""What is sent under its other name."""


def main(address: str, count: str) -> None:
    zero = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 10}
    engine, *_ = polyaccel.initialize(model=parity_model(), config=make_config(3, zero=zero))
    rank, identities, sums = engine.communicator.rank, set(), []
    for number in range(int(count)):
        loss = engine(*batch(number, 0, rank))
        engine.backward(loss)
        engine.step()
        engine.send_weights(address, bucket_nbytes=512)
        state = engine.module_state_dict()
        sums.append(sum(state[name].double().sum().item() for name in state if name != TIED))
        identities.add(engine._weight_groups.identity([address.removeprefix("tcp://")], 60.0))
    if rank == 0:
        print("FOUND " + json.dumps([engine.communicator.world_size, len(identities), sums]), flush=True)
    engine.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
