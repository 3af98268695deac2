"""Pipelines by DeepSpeed's names: its topologies, and a script that trains over stages."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from pipeline_models import MICRO_BATCHES, batches, pipeline_config, plain_layers, trained
from torch import nn

from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.pipeline.table import PipelineError
from polyaccel.testkit.ranks.threads import run_threads

deepspeed = pytest.importorskip("deepspeed")
from deepspeed.moe.layer import MoE  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # noqa: E402
from deepspeed.runtime.pipe.engine import PipelineEngine  # noqa: E402
from deepspeed.runtime.pipe.topology import (  # noqa: E402
    PipeDataParallelTopology,
    PipelineParallelGrid,
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


def test_the_pipeline_of_the_readme_trains():
    text = (Path(deepspeed.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"## A pipeline\n\n```python\n(.*?)```", text, re.DOTALL)

    def run(communicator):
        names = {}
        exec(code, names)
        stages = names["engine"].num_stages
        names["engine"].destroy()
        return stages, names["losses"]

    one, other = run_threads(2, run)
    assert one == other
    stages, losses = one
    assert stages == 2
    assert losses[-1] < losses[0] / 4


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
    with pytest.raises(ShardingError) as caught:
        topology.get_rank(a=2, b=0)
    assert caught.value.value == {"a": 2, "b": 0}
    with pytest.raises(ShardingError) as caught:
        topology.get_rank(a=1)
    assert caught.value.value == {"a": 1}


def on_stages(run, stages, ranks=None, layers=plain_layers, **changes):
    """What `run(engine, communicator)` returns on each rank."""

    def body(communicator):
        model = PipelineModule(
            layers(), num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform", **changes
        )
        engine, *_ = deepspeed.initialize(model=model, config=pipeline_config(1))
        try:
            return run(engine, communicator)
        finally:
            engine.destroy()

    return run_threads(ranks or stages, body)


class Gives(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(8)
        self.layer, self.kind = nn.Linear(6, 5), kind

    def forward(self, x):
        h = self.layer(x)
        return {"pair": (h, 2 * h), "one": (h,), "nested": (h, (h, True)), "list": [h, 2 * h]}[self.kind]


class Takes(nn.Module):
    """Gets what `Gives` gives as its only argument, as under DeepSpeed."""

    def forward(self, value):
        return value[0] + (value[-1][0] if isinstance(value[-1], tuple) else value[-1])


@pytest.mark.parametrize("kind", ["pair", "one", "nested", "list"])
@pytest.mark.parametrize("interval", [0, 1])
def test_a_tuple_is_the_one_argument_of_the_next_layer(kind, interval):
    with torch.random.fork_rng():
        given = [Gives(kind), Takes()]
    source = list(batches(0, 0))
    losses = [nn.functional.mse_loss(given[1](given[0](x)), y).item() for x, y in source]

    def run(engine, communicator):
        return float(engine.train_batch(iter(source)))

    for stages in (1, 2):
        found = on_stages(run, stages, layers=lambda: deepcopy(given), activation_checkpoint_interval=interval)
        assert found == [pytest.approx(sum(losses) / MICRO_BATCHES, rel=1e-6)] * stages


@pytest.mark.parametrize("function", ["reentrant", "deepspeed"])
def test_a_function_of_the_script_s_own_recomputes_layers_that_pass_tuples(function):
    """Torch's reentrant checkpoint sees the gradients of its arguments alone."""
    own = partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    recompute = own if function == "reentrant" else deepspeed.checkpointing.checkpoint
    with torch.random.fork_rng():
        given = [nn.Linear(6, 6), Gives("pair"), Takes()]

    def run(engine, communicator):
        losses = [float(engine.train_batch(batches(step, 0))) for step in range(2)]
        return losses, engine.module_state_dict()

    def model(**changes):
        return on_stages(run, 1, layers=lambda: deepcopy(given), **changes)

    ((expected, states),) = model()
    ((losses, found),) = model(activation_checkpoint_interval=1, activation_checkpoint_func=recompute)
    assert losses == expected
    assert all(torch.equal(found[name], value) for name, value in states.items())


def test_the_loss_is_the_mean_of_all_ranks_and_logits_are_the_last():
    def run(engine, communicator):
        place = engine.grid.get_data_parallel_rank()
        data = list(batches(0, place))
        mean = float(engine.eval_batch(iter(data)))
        two = float(engine.eval_batch(iter(data), num_micro_batches=2))
        alone = engine.eval_batch(iter(data), bcast_loss=False)
        assert (alone is None) != engine.is_last_stage()
        found, logits = engine.eval_batch(iter(data), return_logits=True)
        assert float(found) == mean
        loss = engine.train_batch(iter(data))
        assert engine.agg_train_loss == loss
        assert float(engine.total_loss) == pytest.approx(float(engine.loss) * MICRO_BATCHES)
        return mean, two, float(loss), None if logits is None else logits.clone()

    layers = nn.Sequential(*plain_layers())
    each = [[nn.functional.mse_loss(layers(x), y).item() for x, y in batches(0, place)] for place in range(2)]
    mean, two = sum(map(sum, each)) / 2 / MICRO_BATCHES, sum(sum(one[:2]) for one in each) / 4
    found = on_stages(run, 2, 4)
    assert [one[:3] for one in found] == [(pytest.approx(mean), pytest.approx(two), pytest.approx(mean))] * 4
    for place, (*_, logits) in enumerate(found[2:]):
        torch.testing.assert_close(logits, layers(list(batches(0, place))[-1][0]))
    assert [one[3] for one in found[:2]] == [None, None]


def test_an_evaluation_of_other_micro_batches_is_between_two_settings():
    def run(engine, communicator):
        data = list(batches(0, 0))
        assert engine.micro_batches == MICRO_BATCHES
        engine.micro_batches = 1
        engine.first_output_send, engine.pipe_recv_buf = True, None
        one = engine.eval_batch(iter(data), compute_loss=True, reduce_output=None)
        assert len(one) == 1
        with pytest.raises(PolyaccelError) as refused:
            engine.train_batch(iter(data))
        assert refused.value.value == 1
        engine.micro_batches = MICRO_BATCHES
        engine.train_batch(iter(data))
        return float(engine.train_batch(iter(data)))  # and once more, from what was given before

    first, second = on_stages(run, 2)
    assert first == second


def test_data_is_what_deepspeed_takes_of_it():
    """The first two of a batch, lists as tuples, nothing in the middle, and an iterator that stays."""

    class First(nn.Module):
        def forward(self, x):
            assert type(x) is tuple
            return x[0] + x[1]

    def loss_fn(outputs, labels):
        assert type(labels) is tuple
        return nn.functional.mse_loss(outputs, labels[0]) * labels[1]

    def model():
        return [First(), nn.Identity(), *plain_layers()]

    def run(communicator):
        module = PipelineModule(model(), num_stages=3, loss_fn=loss_fn, partition_method="uniform")
        engine, *_ = deepspeed.initialize(model=module, config=pipeline_config(1))
        data = [([x, x], [y, torch.tensor(2.0)], "more") for x, y in [*batches(0, 0), *batches(1, 0)]]
        engine.set_has_attention_mask(True)
        if engine.is_first_stage() or engine.is_last_stage():
            engine.set_dataloader(data)
            assert engine.data_iterator is not None
        losses = [float(engine.train_batch()) for _ in range(2)]
        engine.destroy()
        return losses

    found = run_threads(3, run)
    layers = nn.Sequential(*plain_layers())
    expected = sum(2 * nn.functional.mse_loss(layers(2 * x), y).item() for x, y in batches(0, 0)) / MICRO_BATCHES
    assert found == [[pytest.approx(expected), found[0][1]]] * 3


def test_the_stages_of_a_pipeline_share_a_dataset():
    """Inputs are the first stage's and labels the last's, of one sample."""
    generator = torch.Generator().manual_seed(9)
    dataset = [(torch.randn(6, generator=generator), torch.randn(5, generator=generator)) for _ in range(64)]

    def run(stages, ranks):
        def body(communicator):
            model = PipelineModule(
                plain_layers(), num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform"
            )
            engine, *_ = deepspeed.initialize(model=model, config=pipeline_config(1), training_data=dataset)
            losses = [float(engine.train_batch()) for _ in range(3)]
            engine.destroy()
            return losses

        return run_threads(ranks, body)

    for data in (1, 2):
        (expected, *_) = run(1, data)
        assert run(2, 2 * data) == [pytest.approx(expected, rel=1e-6)] * 2 * data


NAMES = (
    "grid mpu is_pipe_parallel is_data_parallel is_model_parallel num_stages stage_id prev_stage next_stage "
    "micro_batches micro_batch_size batch_fn data_iterator has_attention_mask has_bool_tensors first_output_send "
    "pipe_recv_buf grad_layer meta_buffer total_loss agg_train_loss dp_group_loss agg_loss loss "
    "set_batch_fn set_dataloader set_dataiterator set_has_attention_mask reset_activation_shape train_batch eval_batch "
    "is_first_stage is_last_stage get_pipeline_parallel_rank get_additional_losses log_for_device tput_log "
    "module_state_dict load_module_state_dict save_checkpoint load_checkpoint get_global_grad_norm was_step_applied "
    "global_steps steps_per_print wall_clock_breakdown optimizer lr_scheduler train_batch_size global_rank "
    "gradient_accumulation_steps train_micro_batch_size_per_gpu dp_world_size mp_world_size is_pipe_partitioned "
    "is_grad_partitioned training_dataloader set_train_batch_size"
)
MODULE_NAMES = (
    "topology mpu num_pipeline_stages partitions stage_owner forward_funcs tied_modules tied_weight_attrs _grid _topo "
    "_layer_specs _num_layers _local_start _local_stop num_stages stage_id global_rank world_size local_rank loss_fn "
    "activation_checkpoint_interval activation_checkpoint_func set_checkpoint_interval get_additional_losses compile "
    "allreduce_tied_weight_gradients get_tied_weights_and_groups ckpt_prefix ckpt_layer_path ckpt_layer_path_list "
    "save_state_dict load_state_dir parts"
)


def test_every_name_that_public_loops_ask_for_is_there():
    def run(engine, communicator):
        absent = [name for name in NAMES.split() if not hasattr(engine, name)]
        return absent + [name for name in MODULE_NAMES.split() if not hasattr(engine.module, name)]

    assert on_stages(run, 2) == [[], []]


def tied_by_name():
    return [
        TiedLayerSpec("words", nn.Linear, 6, 6, tied_weight_attr="weight"),
        nn.functional.gelu,
        LayerSpec(nn.Linear, 6, 6),
        TiedLayerSpec("words", nn.Linear, 6, 6, forward_fn=lambda module, x: (x @ module.weight)[:, :5]),
    ]


def test_a_module_answers_for_its_layers():
    def run(engine, communicator):
        module, stage = engine.module, engine.stage_id
        assert module.partitions() == [0, 2, 4]
        assert (module._local_start, module._local_stop) == (2 * stage, 2 * stage + 2)
        assert [module.stage_owner(layer) for layer in range(4)] == [0, 0, 1, 1]
        with pytest.raises(PolyaccelError) as refused:
            module.stage_owner(4)
        assert refused.value.value == 4
        assert list(module.tied_weight_attrs) == ["words"]
        assert module.tied_modules.words.weight.shape == (6, 6)
        assert len(module.forward_funcs) == 2
        assert module.num_pipeline_stages() == 2
        module.set_checkpoint_interval(1)
        assert module.activation_checkpoint_interval == 1
        module.activation_checkpoint_interval = 0
        with pytest.raises(PolyaccelError) as refused:
            module.set_checkpoint_interval(-1)
        assert refused.value.value == -1
        for name in ("ckpt_prefix", "ckpt_layer_path", "ckpt_layer_path_list", "save_state_dict", "load_state_dir"):
            with pytest.raises(PolyaccelError) as refused:
                getattr(module, name)("folder", 0)
            assert refused.value.value == name
        engine.train_batch(batches(0, 0))
        return sorted(engine.module_state_dict())

    whole = ["2.bias", "2.weight", "tied_modules.words.bias", "tied_modules.words.weight"]
    assert on_stages(run, 2, layers=tied_by_name) == [whole, whole]


def test_a_grid_names_the_ranks_of_each_axis():
    def run(engine, communicator):
        grid, rank = engine.grid, communicator.rank
        stage, place = divmod(rank, 2)
        assert engine.mpu is grid is engine.module.mpu()
        assert (grid.get_pipe_parallel_rank(), grid.get_data_parallel_rank()) == (stage, place)
        assert (grid.get_pipe_parallel_world_size(), grid.get_data_parallel_world_size()) == (3, 2)
        assert (grid.get_slice_parallel_rank(), grid.get_tensor_model_parallel_world_size()) == (0, 1)
        assert grid.pp_group == [place, place + 2, place + 4]
        assert grid.get_data_parallel_group_ranks() == [2 * stage, 2 * stage + 1]
        assert grid.p2p_groups[rank] == [rank, (rank + 2) % 6]
        assert (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()) == (stage, 3)
        assert [grid.stage_to_global(at) for at in range(3)] == grid.pp_group
        assert grid.stage_to_global(1, data=1 - place) == 2 + 1 - place
        assert (grid.is_first_stage, grid.is_last_stage) == (stage == 0, stage == 2)
        assert (engine.is_pipe_parallel, engine.is_data_parallel, engine.is_model_parallel) == (True, True, False)
        with pytest.raises(PolyaccelError):  # ranks are threads, and torch has no groups of these
            grid.get_pipe_parallel_group()
        with pytest.raises(PipelineError) as refused:
            PipelineParallelGrid(PipeDataParallelTopology(num_pp=2, num_dp=2))
        assert refused.value.value == 4
        even = PipelineParallelGrid()
        assert (even.pipe_parallel_size, even.data_parallel_size) == (2, 3)
        return True

    assert on_stages(run, 3, 6) == [True] * 6


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drops", [True, False])
def test_experts_take_no_tokens(k, drops):
    torch.manual_seed(0)
    layer = MoE(6, nn.Linear(6, 6), 4, k=k, drop_tokens=drops)
    tokens = torch.zeros(2, 0, 6, requires_grad=True)
    out, loss, counts = layer(tokens)
    (out.sum() + loss).backward()
    assert (out.shape, loss.item(), counts.tolist()) == ((2, 0, 6), 0.0, [0] * 4)
    assert tokens.grad.shape == tokens.shape


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_consolidated_weights_are_those_of_all_stages(stages, tmp_path):
    def layers():
        return [*plain_layers()[:-1], plain_layers()[-1].requires_grad_(False)]

    def run(engine, communicator):
        whole = engine.module_state_dict()
        held = [engine._zero3_consolidated_16bit_state_dict(frozen) for frozen in (False, True)]
        assert engine.save_16bit_model(str(tmp_path), "whole.bin")
        assert engine.save_fp16_model(str(tmp_path), "old.bin")
        assert engine.save_16bit_model(str(tmp_path), "trained.bin", exclude_frozen_parameters=True)
        return whole, held

    (whole, (every, trained)), *others = on_stages(run, stages, layers=layers)
    assert [held for _, held in others] == [[None, None]] * (stages - 1)
    assert whole.keys() == nn.Sequential(*layers()).state_dict().keys()
    kept = {name for name, one in nn.Sequential(*layers()).named_parameters() if one.requires_grad}
    assert len(kept) == len(whole) - 2
    files = [torch.load(tmp_path / f"{name}.bin") for name in ("whole", "old", "trained")]
    for found, names in ((every, whole), (trained, kept), (files[0], whole), (files[1], whole), (files[2], kept)):
        assert found.keys() == set(names)
        assert all(torch.equal(found[name], whole[name]) for name in names)
