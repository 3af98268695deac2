"""The axes along which a config lets ranks stand."""

from __future__ import annotations

import pytest

from polyaccel.config import Config, load_config, resolve_config
from polyaccel.config.meshes import mesh_of
from polyaccel.errors import ConfigError


def _resolved(tree, world_size):
    return resolve_config(load_config({"train_micro_batch_size_per_gpu": 3, **tree}), world_size=world_size)


@pytest.mark.parametrize(
    ("tree", "ranks", "axes", "batch"),
    [
        ({}, 4, {"data": 4}, 12),
        ({"tensor_parallel": {"autotp_size": 2}}, 4, {"data": 2, "tensor": 2}, 6),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, 6, {"data": 3, "tensor": 2}, 9),
        ({"mesh": {"tensor": 2, "data": 1}}, 2, {"data": 1, "tensor": 2}, 3),
        ({"sequence_parallel_size": 2, "mesh": {"tensor": 3}}, 12, {"data": 2, "sequence": 2, "tensor": 3}, 6),
        ({"mesh": {"sequence": 2}, "sequence_parallel_size": 2}, 2, {"data": 1, "sequence": 2}, 3),
        ({"tensor_parallel": {"autotp_size": 1}, "data_parallel_size": 2}, 2, {"data": 2}, 6),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_batches_are_counted_by_the_ranks_that_have_their_own(tree, ranks, axes, batch):
    config = _resolved(tree, ranks)
    assert {axis.name: axis.size for axis in mesh_of(config, ranks).axes} == axes
    assert config.train_batch_size == batch


@pytest.mark.parametrize(
    ("tree", "ranks", "key"),
    [
        (
            {"tensor_parallel": {"autotp_size": 3}},
            4,
            "tensor_parallel.autotp_size",
        ),
        ({"tensor_parallel": {"autotp_size": 2}}, 1, "tensor_parallel.autotp_size"),
        (
            {"sequence_parallel_size": 2, "mesh": {"tensor": 4}},
            12,
            ("mesh.tensor"),
        ),
        ({"mesh": {"tensor": 2}, "tensor_parallel": {"autotp_size": 4}}, 8, "tensor_parallel.autotp_size"),
        (
            {"mesh": {"tensor": 2, "data": 4}},
            4,
            "mesh.data",
        ),
        (
            {"mesh": {"tensor": 2}, "data_parallel_size": 4},
            4,
            "data_parallel_size",
        ),
        ({"mesh": {"data": 2}, "data_parallel_size": 4}, 4, "data_parallel_size"),
        ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, 4, "tensor_parallel.tp.tp_size"),
        (
            {"mesh": {"expert": 2}, "expert_parallel": {"enabled": True, "autoep_size": 4}},
            4,
            "expert_parallel.autoep_size",
        ),
    ],
    ids=str,
)
def test_a_mesh_that_does_not_fit_says_which_would(tree, ranks, key: str):
    with pytest.raises(ConfigError) as caught:
        _resolved(tree, ranks)
    assert caught.value.problems[0].key == key


def test_near_ranks_are_among_those_that_hold_the_same_blocks():
    zero = {"stage": 3, "zero_hpz_partition_size": 4}
    assert _resolved({"zero_optimization": zero, "mesh": {"sequence": 2}}, 4).train_batch_size == 6
    with pytest.raises(ConfigError) as caught:
        _resolved({"zero_optimization": zero, "mesh": {"tensor": 2}}, 4)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("zero_optimization.zero_hpz_partition_size", 4)
    ]


@pytest.mark.parametrize(
    ("tree", "axis"),
    [
        ({"pipeline": {"stages": 2}}, "pipe"),
        ({"data_parallel_size": 2}, "data"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, "expert"),
        ({"sequence_parallel_size": 2.0}, "sequence"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor"),
        ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}}, "mesh": {"tensor": 2}}, "tensor"),
    ],
    ids=str,
)
def test_every_spelling_of_a_size_is_that_of_mesh(tree, axis):
    made_by_hand = Config.model_validate({"train_batch_size": 8, **tree})
    for config in (_resolved(tree, 2), resolve_config(made_by_hand, world_size=2)):
        assert getattr(config.mesh, axis) == 2
        assert config.pipeline.stages == config.sequence_parallel_size == config.expert_parallel.autoep_size == 1
        assert (config.tensor_parallel.autotp_size, config.data_parallel_size) == (0, None)


def test_experts_that_are_off_state_no_size():
    config = _resolved({"expert_parallel": {"autoep_size": 2}}, 2)
    assert config.mesh.expert == 1
