"""One of three ranks at stage 3 under JAX. Rank 1 is killed in the middle of a program; the others print what they are
told, in one line, and end with code 7 when their input does. Run with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
POLYACCEL_COMM set."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

if os.environ["POLYACCEL_COMM"] == "shm":
    sys.modules["torch"] = None  # type: ignore[assignment]  # as in environments of JAX alone

import jax.numpy as jnp
import numpy as np

import polyaccel
from polyaccel import comm
from polyaccel.errors import CommError
from polyaccel.jax import unit

WIDTH, LAYERS = 64, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
    },
}


def block(layer: Any, hidden: Any) -> Any:
    return jnp.tanh(hidden @ layer["weight"])


def loss(params: Any, batch: Any, rng: Any) -> Any:
    for layer in params["layers"]:
        batch = unit(block)(layer, batch)
    return jnp.square(batch).mean()


def main() -> int:
    comm.init_distributed(timeout=timedelta(seconds=100))
    params = {"layers": [{"weight": np.eye(WIDTH, dtype=np.float32)} for _ in range(LAYERS)]}
    engine = polyaccel.initialize(model=loss, params=params, config=CONFIG)
    batch = np.ones((2, WIDTH), np.float32)
    engine.train_batch(batch)
    params_in_programs = engine._function._params
    reduce, reduced = params_in_programs.reduce, []

    def reduce_or_die(names: Any, *others: Any) -> None:
        reduced.append(names)
        if len(reduced) == 2:  # in the backward pass, between the gathers of two units
            os.kill(os.getpid(), signal.SIGKILL)
        reduce(names, *others)

    if engine.communicator.rank == 1:
        params_in_programs.reduce = reduce_or_die
    try:
        engine.train_batch(batch)
    except CommError as error:
        print(str(error).replace("\n", " "), flush=True)
        sys.stdin.read()  # until the others have been told too: nobody is to miss this rank
        return 7
    return 0


if __name__ == "__main__":
    sys.exit(main())
