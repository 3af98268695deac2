"""A model that is cut over ranks, on every backend that connects processes: the numbers of ranks that are threads."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from mesh_models import train_cut, train_on_a_mesh
from pairwise import combinations
from parity_models import SMALL_BUCKET, Run, assert_bitwise, make_config
from test_parity_backends import BACKENDS, Pools, pools

__all__ = ["pools"]  # the fixture

STEPS = 2


def config_of(stage: int) -> dict[str, Any]:
    zero = {"reduce_bucket_size": SMALL_BUCKET, "stage3_param_persistence_threshold": 4}
    return make_config(stage, gradient_clipping=0.5, zero=zero)


@cache
def on_threads(data: int, tensor: int, stage: int) -> list[Run]:
    return train_on_a_mesh(data, tensor, config_of(stage), STEPS)


@combinations(backend=BACKENDS, stage=[1, 3], mesh=[(1, 2), (2, 2)])
def test_every_backend_trains_a_cut_model_as_threads_do(
    pools: Pools, backend: str, stage: int, mesh: tuple[int, int]
) -> None:
    data, tensor = mesh
    found = pools(backend, data * tensor).run(train_cut, tensor, config_of(stage), STEPS)
    for run, expected in zip(found, on_threads(data, tensor, stage), strict=True):
        assert run.losses == pytest.approx(expected.losses, rel=1e-6)
        assert run.norms == pytest.approx(expected.norms, rel=1e-6)
        if backend != "ccl":  # whose library adds in an order of its own
            assert_bitwise(run.params, expected.params)
