"""What the planner takes an optimizer to keep: Muon's matrices have one state, all else has two."""

from __future__ import annotations

from polyaccel.config import load_config, resolve_config
from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.planner.forecast import layout_of, step_plan

SHAPES = {"embed.weight": (64, 32), "layer.weight": (32, 64), "layer.bias": (32,), "experts": (4, 16, 16)}


def test_muon_has_one_state_for_matrices_which_shards_do_not_cut() -> None:
    tree = {"train_batch_size": 2, "optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 2}}
    config = resolve_config(load_config(tree), world_size=2)
    specs = [ParamSpec(fqn, shape, DType.FLOAT32) for fqn, shape in SHAPES.items()]
    layout = layout_of(config, specs, {}, Mesh.flat(2))
    plan = step_plan(config, layout, is_remote=False)
    states = {
        slot.param.fqn: (sorted(each.states), each.bucket.kind.granule.kind)
        for each in plan.trained
        for slot in each.bucket.slots
    }
    moments = (["exp_avg", "exp_avg_sq"], "element")
    assert states == {
        "embed.weight": moments,
        "layer.bias": moments,
        "layer.weight": (["momentum_buffer"], "whole"),
        "experts": (["momentum_buffer"], "row"),
    }
