"""`mesh.capacity`: parts in proportion, with the bits of equal parts; checkpoints, Muon, JAX, the planner, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import polyaccel
from polyaccel.config.load import load_config
from polyaccel.config.resolve import resolve_config
from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.planner.forecast import layout_of
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.utils import safe_get_local_fp32_param

STEPS = 3
WIDTH = 48


def model_of_seed():
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float32) for _ in range(3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def engine_of(stage, capacity, **sections):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 10},
        "mesh": {} if capacity is None else {"capacity": capacity},
    }
    return polyaccel.initialize(model=model_of_seed(), config=config | sections)[0]


def train(engine, first, last, rank, world):
    for at in range(first, last):
        whole = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(at))
        part = whole[rank * 12 // world : (rank + 1) * 12 // world]
        engine.backward(engine(part.to(next(engine.parameters()).dtype)).square().mean())
        engine.step()


def weights_of(engine):
    return {name: value.detach().clone() for name, value in engine.module_state_dict().items()}


def states_numel(engine):
    """How many elements of master weights this rank has."""
    return sum(safe_get_local_fp32_param(one).numel() for one in engine.module.parameters())


def trained(world, stage, capacity, **sections):
    def go(communicator):
        engine = engine_of(stage, capacity, **sections)
        train(engine, 0, STEPS, communicator.rank, world)
        found = weights_of(engine), states_numel(engine)
        engine.destroy()
        return found

    return run_threads(world, go)


@pytest.mark.parametrize(
    ("stage", "capacity", "sections"),
    [
        (1, [1, 0.5], {}),
        (2, [1, 0.5], {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "state_bits": 8}}}),
        (2, [1, 3, 2], {"gradient_accumulation_steps": 2}),
        (3, [1, 0.5], {"ema": {"decay": 0.9}}),
        (3, [0.5, 2, 1], {"bf16": {"enabled": True}}),
    ],
    ids=str,
)
def test_unequal_parts_have_the_bits_of_equal_ones(stage, capacity, sections):
    world = len(capacity)
    equal, unequal = trained(world, stage, None, **sections), trained(world, stage, capacity, **sections)
    for (wanted, _), (found, _) in zip(equal, unequal, strict=True):
        assert {name for name, value in wanted.items() if not torch.equal(found[name], value)} == set()
    if "optimizer" not in sections and stage < 3:
        whole = 3 * WIDTH * (WIDTH + 1)
        for (_, numel), share in zip(unequal, capacity, strict=True):
            assert abs(numel / whole - share / sum(capacity)) < 0.03


@pytest.mark.parametrize(
    ("first", "second"),
    [((2, 2, [1, 0.5]), (3, 1, [1, 2, 3])), ((2, 3, [1, 4]), (1, 0, None)), ((1, 2, None), (2, 3, [3, 1]))],
    ids=str,
)
def test_checkpoints_resume_with_other_capacities(tmp_path, first, second):
    def begin(communicator):
        world, stage, capacity = first
        engine = engine_of(stage, capacity)
        train(engine, 0, 2, communicator.rank, world)
        engine.save_checkpoint(str(tmp_path))
        train(engine, 2, STEPS, communicator.rank, world)
        found = weights_of(engine)
        engine.destroy()
        return found

    def resume(communicator):
        world, stage, capacity = second
        engine = engine_of(stage, capacity)
        engine.load_checkpoint(str(tmp_path))
        train(engine, 2, STEPS, communicator.rank, world)
        found = weights_of(engine)
        engine.destroy()
        return found

    wanted = run_threads(first[0], begin)[0]
    for found in run_threads(second[0], resume):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_muon_s_matrices_go_to_ranks_by_their_capacities():
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.01}}}
    equal, unequal = trained(2, 2, None, **muon), trained(2, 2, [1, 9], **muon)
    for (wanted, _), (found, _) in zip(equal, unequal, strict=True):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_the_planner_has_the_layout_of_the_engine():
    specs = [ParamSpec(f"p{at}", (64, 64), DType.FLOAT32, 0, True) for at in range(3)]
    tree = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    config = resolve_config(load_config(tree | {"mesh": {"capacity": [1, 2]}}), world_size=2)
    (bucket,) = layout_of(config, specs, {}, Mesh.flat(2)).buckets
    assert bucket.counts == (4096, 8192)
    (bucket,) = layout_of(
        resolve_config(load_config(tree | {"mesh": {"capacity": [2, 2]}}), world_size=2), specs, {}, Mesh.flat(2)
    ).buckets
    assert bucket.counts is None


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"mesh": {"capacity": [1]}}, "mesh.capacity"),
        ({"mesh": {"capacity": [1, 1, 1]}}, "mesh.capacity"),
        ({"mesh": {"capacity": [1, 0]}}, "mesh.capacity[1]"),
        ({"mesh": {"capacity": [1, -2]}}, "mesh.capacity[1]"),
        ({"mesh": {"capacity": [1, "much"]}}, "mesh.capacity[1]"),
        ({"mesh": {"capacity": 2}}, "mesh.capacity"),
        ({"mesh": {"capacity": [1, 2], "pipe": 2}}, "mesh.capacity"),
        (
            {
                "mesh": {"capacity": [1, 2]},
                "zero_optimization": {"stage": 3, "zero_quantized_weights": True},
            },
            "mesh.capacity",
        ),
    ],
    ids=str,
)
def test_wrong_capacities_are_named(sections, key):
    with pytest.raises(ConfigError) as caught:
        resolve_config(load_config({"train_batch_size": 4, **sections}), world_size=2)
    assert key in {problem.key for problem in caught.value.problems}


def test_ranks_with_different_capacities_are_told():
    def go(communicator):
        with pytest.raises(PolyaccelError):
            engine_of(2, [1, 2 + communicator.rank])

    run_threads(2, go)
