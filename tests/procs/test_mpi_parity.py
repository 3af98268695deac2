"""Training over MPI gives the bits of training on threads, at every stage: both add in rank order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mpi_ranks import needs_mpi
from parity_models import SMALL_BUCKET, Config, Run, assert_bitwise, make_config, parity_model, train, train_on_threads

from polyaccel.comm.base import Communicator
from polyaccel.testkit.mpi import MpiRankPool

pytestmark = needs_mpi
STEPS = 2


def train_here(communicator: Communicator, config: Config) -> Run:
    return train(communicator, parity_model(), config, STEPS)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_every_stage_over_mpi_equals_threads_bitwise(
    mpi_pool: Callable[[int], MpiRankPool], world: int, stage: int
) -> None:
    zero = {"reduce_bucket_size": SMALL_BUCKET, "stage3_prefetch_bucket_size": SMALL_BUCKET}
    for changes in ({"gradient_clipping": 0.5, "accumulation": 3}, {"bf16": {"enabled": True}}):
        config = make_config(stage, zero=zero, **changes)
        expected = train_on_threads(world, config, STEPS)
        for rank, run in enumerate(mpi_pool(world).run(train_here, config)):
            assert_bitwise(run.params, expected.params)
            assert run.norms == expected.norms
            assert rank or run.losses == expected.losses
