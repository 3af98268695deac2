"""Pipelines by DeepSpeed's names: its topologies, and a script that trains over stages."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from pipeline_models import MICRO_BATCHES, batches, pipeline_config, plain_layers, trained
from torch import nn

from polyaccel.errors import ShardingError
from polyaccel.testkit.ranks.threads import run_threads

deepspeed = pytest.importorskip("deepspeed")
from deepspeed.moe.layer import MoE  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # noqa: E402
from deepspeed.runtime.pipe.engine import PipelineEngine  # noqa: E402
from deepspeed.runtime.pipe.topology import (  # noqa: E402
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


def test_a_script_trains_over_the_stages_of_a_topology():
    def run(communicator):
        topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
        model = PipelineModule(
            plain_layers(), topology=topology, loss_fn=nn.functional.mse_loss, partition_method="uniform"
        )
        assert isinstance(model, deepspeed.PipelineModule)
        engine, *_ = deepspeed.initialize(model=model, config=pipeline_config(1))
        assert isinstance(engine, PipelineEngine)
        assert isinstance(engine, deepspeed.DeepSpeedEngine)
        place = topology.get_coord(communicator.rank).data
        losses = [float(engine.train_batch(data_iter=batches(step, place))) for step in range(3)]
        engine.destroy()
        return losses

    expected = trained(1, 2, pipeline_config(1)).losses
    means = [(one + other) / 2 for one, other in zip(expected[0], expected[1], strict=True)]
    assert run_threads(4, run) == [pytest.approx(means, rel=1e-6)] * 4


class Adding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mixture = MoE(width, nn.Linear(width, width), 4, ep_size=2, k=2, top2_2nd_expert_sampling=False)

    def forward(self, x):
        return x + self.mixture(x)[0]


def test_experts_of_one_stage_are_shared_there():
    torch.manual_seed(3)
    layers = [nn.Linear(6, 6), nn.Tanh(), Adding(6), nn.Linear(6, 6)]

    def run(stages):
        def body(communicator):
            specs = deepcopy(layers)
            model = PipelineModule(specs, num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")
            engine, *_ = deepspeed.initialize(model=model, config=pipeline_config(1))
            place = engine.mesh.group(("data",), communicator.rank).index(communicator.rank)
            inputs = torch.randn(3, MICRO_BATCHES, 4, 6, generator=torch.Generator().manual_seed(place))
            losses = [float(engine.train_batch(data_iter=iter([(x, x.flip(-1)) for x in step]))) for step in inputs]
            engine.destroy()
            return losses

        return run_threads(2 * stages, body)

    alone = run(1)
    assert [pytest.approx(losses, rel=1e-6) for losses in run(2)] == alone * 2


def test_specs_are_those_of_the_engine():
    layer = LayerSpec(nn.Linear, 3, 4).build()
    assert (layer.in_features, layer.out_features) == (3, 4)
    assert TiedLayerSpec("words", nn.Embedding, 4, 2).tied_weight_attr == ("weight",)


def test_a_topology_names_ranks_by_their_places():
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert (topology.get_dim("pipe"), topology.get_dim("data"), topology.get_dim("absent")) == (2, 3, 0)
    assert topology.world_size() == 12
    assert topology.get_rank(pipe=1, data=0, model=1) == 7
    assert topology.get_coord(7) == (1, 0, 1)
    assert topology.mapping[topology.get_coord(7)] == 7
    assert topology.get_rank_repr(7) == "model_01"
    assert topology.get_rank_repr(7, omit_axes=[]) == "pipe_01-data_00-model_01"
    assert topology.get_axis_comm_lists("pipe") == [[rank, rank + 6] for rank in range(6)]
    assert topology.get_axis_comm_lists("absent") == []
    assert topology.filter_match(pipe=0, model=1) == [1, 3, 5]
    assert topology.get_axis_list("data", 2) == [4, 5, 10, 11]


def test_places_that_do_not_exist_are_refused():
    topology = ProcessTopology(["a", "b"], [2, 2])
    with pytest.raises(ShardingError, match="outside mesh axis 'a' of 2"):
        topology.get_rank(a=2, b=0)
    with pytest.raises(ShardingError, match="does not name every mesh axis once"):
        topology.get_rank(a=1)
