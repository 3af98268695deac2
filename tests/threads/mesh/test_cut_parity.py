"""A model that is cut over ranks along one axis of the mesh, under ZeRO over the other, against plain torch."""

from __future__ import annotations

import pytest
from mesh_models import bounds, train_on_a_mesh
from pairwise import combinations
from parity_models import SMALL_BUCKET, assert_bitwise, assert_close, make_config, train_plainly

STEPS = 3


@combinations(data=[1, 2, 3], tensor=[2, 3], stage=[0, 1, 2, 3], accumulation=[1, 2], clip=[0.0, 0.5])
def test_a_cut_model_trains_like_the_whole_one(data, tensor, stage, accumulation, clip):
    config = make_config(
        stage,
        accumulation=accumulation,
        gradient_clipping=clip,
        zero={"reduce_bucket_size": SMALL_BUCKET, "stage3_param_persistence_threshold": 4},
    )
    runs = train_on_a_mesh(data, tensor, config, STEPS)
    plain = train_plainly(data, STEPS, accumulation=accumulation, clip=clip)
    for rank, run in enumerate(runs):
        assert run.norms == pytest.approx(plain.norms, rel=1e-5)
        low, high = bounds(rank % tensor, tensor)
        wanted = {
            **plain.params,
            "wide.weight": plain.params["wide.weight"][low:high],
            "wide.bias": plain.params["wide.bias"][low:high],
            "narrow.weight": plain.params["narrow.weight"][:, low:high],
        }
        assert_close(run.params, wanted, 1e-5)
        assert_bitwise(run.params, runs[rank % tensor].params)
    assert runs[0].losses == pytest.approx(plain.losses, rel=1e-5)
