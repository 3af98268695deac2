"""Which modules are unsharded together: what is found by default, what users choose, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import polyaccel
from polyaccel import utils, zero
from polyaccel.config import load_resolved
from polyaccel.core.block import Block as TensorBlock
from polyaccel.core.mesh import Mesh
from polyaccel.engine.policies.modules import module_rules_of
from polyaccel.engine.policies.steps import plan_for
from polyaccel.errors import ConfigError, ShardingError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.estimate.meta_shapes import shape_of_module
from polyaccel.torch.sharding.leaf_modules import fine_grained_modules, granularity
from polyaccel.torch.sharding.tensor_shard import TensorShard
from polyaccel.torch.sharding.units import find_units, units_of_parameters


class Block(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(experts))


class Model(nn.Module):
    def __init__(self, blocks: int = 3, experts: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(Block(experts) for _ in range(blocks))
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


LAYERS = ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2"]


def test_the_blocks_of_the_longest_list_are_the_units():
    model = Model()
    model.short = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
    assert list(find_units(model)) == LAYERS


def test_of_equally_long_lists_the_heavier_one_counts():
    model = Model(blocks=2)
    model.heavy = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    assert list(find_units(model)) == ["heavy.0", "heavy.1"]


def test_experts_are_a_matter_of_their_block_however_many():
    """Ranks use different experts; a block is gathered by all of them."""
    assert list(find_units(Model(experts=9))) == LAYERS


def test_a_list_of_unlike_parts_does_not_hide_the_list_inside():
    model = nn.Sequential(nn.Embedding(4, 2), Model(blocks=5), nn.Linear(2, 2))
    assert list(find_units(model)) == [f"1.encoder.layers.{index}" for index in range(5)]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Model(blocks=1), nn.Sequential(nn.ReLU(), nn.ReLU())])
def test_without_a_list_of_blocks_everything_is_the_root(model):
    units = find_units(model)
    assert units == {}
    assert set(units_of_parameters(model, units).values()) <= {""}


def test_blocks_without_parameters_are_no_units():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert list(find_units(model)) == ["0", "2"]


def test_parameters_belong_to_their_unit_and_shared_ones_to_the_root():
    model = Model()
    model.encoder.layers[2].linear.bias = model.encoder.layers[0].linear.bias
    model.encoder.layers[1].extra = model.embed
    owners = units_of_parameters(model, find_units(model))
    assert owners == {
        "embed.weight": "",
        "encoder.layers.0.linear.weight": LAYERS[0],
        "encoder.layers.0.linear.bias": "",
        "encoder.layers.1.linear.weight": LAYERS[1],
        "encoder.layers.1.linear.bias": LAYERS[1],
        "encoder.layers.2.linear.weight": LAYERS[2],
    }


def test_chosen_units_replace_the_default_and_the_outermost_counts():
    model = Model()
    layers = model.encoder.layers
    zero.set_units(model, [layers[1], layers[1].linear, model.head])
    assert list(find_units(model)) == ["encoder.layers.1", "head"]
    zero.set_units(model, [layers[0]])
    assert list(find_units(model)) == ["encoder.layers.0"]
    with pytest.raises(ShardingError) as caught:
        zero.set_units(model, [nn.Linear(2, 2)])
    assert caught.value.value == "Linear"


@pytest.mark.parametrize("choice", [nn.Embedding, "Embedding", "torch.nn.modules.sparse.Embedding", "embed"])
def test_leaves_are_found_by_class_and_by_name(choice):
    model = Model()
    assert zero.set_leaf_modules(model, [choice]) == [model.embed]
    assert list(find_units(model)) == [*LAYERS, "embed"]
    assert zero.unset_leaf_modules(model, [choice]) == [model.embed]
    assert list(find_units(model)) == LAYERS


def test_a_leaf_inside_a_unit_is_part_of_it_and_one_around_units_takes_their_place():
    model = Model()
    assert len(utils.set_z3_leaf_modules_by_suffix(model, ["linear"])) == 3
    assert list(find_units(model)) == LAYERS
    assert utils.set_z3_leaf_modules_by_name(model, ["encoder"]) == [model.encoder]
    assert list(find_units(model)) == ["encoder"]


def test_deepspeeds_names():
    model = Model()
    assert utils.set_z3_leaf_modules(model, [Block]) == list(model.encoder.layers)
    utils.set_z3_leaf_module(model.head, True)
    assert utils.get_z3_leaf_modules(model) == [*model.encoder.layers, model.head]
    assert utils.z3_leaf_module(model.head)
    assert not utils.z3_leaf_module(model.embed)
    assert utils.unset_z3_leaf_modules(model, [Block]) == list(model.encoder.layers)
    utils.set_z3_leaf_module(model.head, False)
    assert utils.get_z3_leaf_modules(model) == []
    with pytest.raises(ShardingError) as caught:
        utils.set_z3_leaf_modules(model, ["Attention"])
    assert caught.value.value == ["Attention"]
    assert utils.set_z3_leaf_modules(model, ["Attention"], raise_if_not_found=False) == []


def config_of(**zero):
    keys = {"stage": 3, "stage3_param_persistence_threshold": 0, **zero}
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}, "zero_optimization": keys}


def initialize(model: nn.Module, **zero):
    return polyaccel.initialize(model=model, config=config_of(**zero))[0]


@pytest.mark.parametrize("choice", [{"classes": ["Embedding"]}, {"names": ["embed"]}, {"name_suffixes": ["embed"]}])
def test_the_config_chooses_leaves(choice):
    def work(communicator):
        model = Model()
        del model.head
        engine = initialize(model, leaf_module=choice)
        assert {bucket.kind.unit for bucket in engine.zero.layout.buckets} == {*LAYERS, "embed"}
        with pytest.raises(ShardingError) as caught:
            zero.set_leaf_modules(model, ["head"])
        assert caught.value.value == "embed.weight"
        with pytest.raises(ShardingError) as caught:
            zero.set_units(model, [])
        assert caught.value.value == "embed.weight"

    run_threads(1, work)


def test_leaves_of_a_config_go_with_its_engine_and_those_that_were_set_stay():
    def work(communicator):
        model = uneven()
        zero.set_leaf_modules(model, ["head"])
        first = initialize(model, leaf_module={"names": ["embed"]})
        assert utils.get_z3_leaf_modules(model) == [model.embed, model.head]
        first.destroy()
        assert utils.get_z3_leaf_modules(model) == [model.head]

    run_threads(1, work)


def test_leaves_of_a_config_that_came_to_no_engine_are_not_the_next_ones():
    def refuse(parameters):
        raise ValueError("no such optimizer")

    def work(communicator):
        model = uneven()
        config = config_of(leaf_module={"names": ["encoder"]})
        with pytest.raises(ValueError) as caught:
            polyaccel.initialize(model=model, optimizer=refuse, config=config)
        assert str(caught.value) == "no such optimizer"
        engine = initialize(model, leaf_module={"names": ["embed"]})
        assert {bucket.kind.unit for bucket in engine.zero.layout.buckets} == {"", "embed", *LAYERS}

    run_threads(1, work)


@pytest.mark.parametrize("key", ["classes", "names", "name_suffixes"])
def test_a_choice_of_the_config_that_matches_nothing_is_an_error(key):
    def work(communicator):
        with pytest.raises(ConfigError) as caught:
            initialize(Model(), leaf_module={key: ["Missing"]})
        assert all(part in str(caught.value) for part in ("leaf_module", '"Missing"', key))

    run_threads(1, work)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.Linear(2, 2), None),  # is gathered as one anyway
        (lambda: nn.Sequential(nn.Linear(2, 2)), None),  # a container need not be called
        (lambda: Block(), 6 // 2),
        (lambda: Block(experts=3), 24 // 5),  # the list of experts does not count
    ],
)
def test_granularity_is_elements_for_each_module_with_parameters(make, expected):
    assert granularity(make()) == expected


def test_a_module_that_is_too_large_to_be_live_at_once_has_no_granularity():
    with torch.device("meta"):
        assert granularity(Model(blocks=1)) is not None
        large = Model(blocks=1)
        large.more = nn.Linear(10**5, 10**4)
    assert granularity(large) is None


def test_the_outermost_modules_within_the_threshold_are_leaves():
    model = Model(experts=3)
    model.coarse = nn.Module()
    model.coarse.first, model.coarse.second = nn.Linear(50, 50), nn.Linear(50, 50)
    finest = granularity(model.encoder.layers[0])
    assert list(fine_grained_modules(model, finest - 1)) == []
    assert list(fine_grained_modules(model, finest)) == [model.encoder]  # without parameters of its own
    assert list(fine_grained_modules(model, granularity(model))) == [model]
    assert granularity(model) < granularity(model.coarse)


def uneven() -> nn.Module:
    """A fine encoder beside a coarse layer."""
    model = Model()
    model.head = nn.Linear(40, 40)
    return model


@pytest.mark.parametrize(
    ("leaves", "units"),
    [
        ({}, {"", *LAYERS}),
        ({"leaf_module": {"names": ["embed"]}}, {"", "embed", *LAYERS}),
        ({"leaf_module": {"names": ["encoder"]}}, {"", "encoder"}),
        ({"stage3_module_granularity_threshold": 5}, {"", "encoder"}),
        ({"stage3_module_granularity_threshold": 1000}, {""}),
    ],
)
def test_the_plan_has_the_units_and_buckets_of_the_engine(leaves, units):
    config = config_of(**leaves)
    resolved = load_resolved(config, world_size=1)
    with torch.device("meta"):
        shape = shape_of_module(uneven(), "", module_rules_of(resolved))
    planned = plan_for(resolved, shape.specs, lambda: shape.units, Mesh.flat(1))
    assert {bucket.kind.unit for bucket in planned.buckets} == units

    def work(communicator):
        assert polyaccel.initialize(model=uneven(), config=config)[0].zero.layout == planned

    run_threads(1, work)


def test_a_leaf_that_the_model_lacks_stops_the_plan_too():
    resolved = load_resolved(config_of(leaf_module={"names": ["Missing"]}), world_size=1)
    with pytest.raises(ConfigError) as caught:
        shape_of_module(Model(), "", module_rules_of(resolved))
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("zero_optimization.leaf_module.names", "Missing")
    ]


@pytest.mark.parametrize(
    ("make", "told"),
    [(Model, "the finest module has a granularity of 2"), (lambda: nn.Linear(2, 2), "no module is made of modules")],
)
def test_a_threshold_that_is_too_low_for_the_model_is_told(make, told, caplog):
    resolved = load_resolved(config_of(stage3_module_granularity_threshold=1), world_size=1)
    shape_of_module(make(), "", module_rules_of(resolved))
    assert told in caplog.text


def test_units_are_unsharded_one_at_a_time():
    """The number of elements gathered at once follows the units that were chosen."""

    def work(communicator, choose):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        if choose:
            zero.set_units(model, [model])
        engine = initialize(model)
        with torch.no_grad():
            engine(torch.zeros(1, 16))
        return engine.zero.params.gathered.peak_numel

    (small, _), (large, _) = run_threads(2, work, False), run_threads(2, work, True)
    assert 272 <= small < 2 * 272 + 64
    assert large >= 4 * 272


def test_ranks_with_uneven_blocks_choose_the_same_list():
    """Two lists are equally long; the first has more parameters, and one rank holds a small block of each."""
    for rows in (5, 1):
        model = nn.Module()
        model.encoder = nn.ModuleList(nn.Linear(2, rows, bias=False) for _ in range(2))
        model.decoder = nn.ModuleList(nn.Linear(2, 3, bias=False) for _ in range(2))
        for one in model.encoder:
            one.parallel_cuts = {"weight": TensorShard(TensorBlock((6, 2), (((0, rows),), ((0, 2),))))}
        assert list(find_units(model)) == ["encoder.0", "encoder.1"]
