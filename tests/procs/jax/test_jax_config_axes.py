"""Tensor, sequence and expert axes of a config in native mode: a mesh of JAX, and flax's names of dimensions on it."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")

import flax_axes_model as model
import jax

import polyaccel
from polyaccel.errors import ConfigError, PolyaccelError, ShardingError

pytestmark = pytest.mark.timeout(300)  # programs to compile, on a machine that may be slow and busy


CUTS = {
    "tensor": {"table": ("tensor", None), "query": (None, "tensor", None), "down": (None, "tensor", None)},
    "expert": {"up": ("expert", None, None), "table": (None, None)},
}


@pytest.mark.parametrize(
    ("processes", "stage", "mesh"),
    [
        (1, 3, {"tensor": 2, "sequence": 2}),
        (2, 2, {"expert": 2}),
        (1, 1, {"tensor": 2, "expert": 2}),
        (2, 1, {"tensor": 2, "sequence": 2}),
    ],
)
def test_names_of_linen_are_axes_of_the_config(at, processes, stage, mesh):
    losses, params = model.train_linen_plainly()
    for found in at(processes, model.train_linen, stage, mesh):
        np.testing.assert_allclose(found[0], losses, rtol=1e-6)
        jax.tree.map(lambda own, plain: np.testing.assert_allclose(own, plain, rtol=0, atol=1e-6), found[2], params)
        for axis in mesh.keys() & CUTS:
            for name, spec in CUTS[axis].items():
                assert all(own == one for own, one in zip(found[1][name], spec, strict=True) if one == axis)


def test_names_of_nnx_are_axes(at):
    ((ruled, placed, plain, is_cut),) = at(1, model.train_nnx)
    np.testing.assert_allclose(ruled, plain, rtol=1e-6)
    np.testing.assert_allclose(placed, plain, rtol=1e-6)
    assert is_cut == [True, True]


def refusals(communicator):
    """(kinds and values of errors): what would be a silent no-op, or belongs elsewhere."""
    params, x = {"w": np.ones((4, 4), np.float32)}, np.ones((8, 4), np.float32)
    boxed = {"w": model.nn.LogicallyPartitioned(params["w"], ("embed", "other"))}
    scanned = {"w": model.nn.LogicallyPartitioned(params["w"], ("mlp",))}

    def start(params, **changes):
        named = {name: changes.pop(name) for name in ("axis_rules", "param_specs") if name in changes}
        config = {**model.CONFIG, "optimizer": {"type": "Adam"}, **changes}
        engine = polyaccel.initialize(
            model=lambda params, batch, rng: ((batch @ params["w"]) ** 2).mean(), params=params, config=config, **named
        )
        engine.train_batch(x)

    found = []
    for given, changes in (
        (params, {"mesh": {"tensor": 2}}),  # nothing has names
        (boxed, {"mesh": {"tensor": 2}}),  # no rule
        (boxed, {"mesh": {"tensor": 2}, "axis_rules": {"other": None}}),  # no axis
        (scanned, {"mesh": {"tensor": 2}}),  # too few names
        (params, {"mesh": {"sequence": 2}}),  # no constraint
        (params, {"axis_rules": {"other": None}}),  # no names
        (params, {"mesh": {"tensor": 2}, "axis_rules": ["tensor"]}),
        (params, {"mesh": {"tensor": 3}}),
        (params, {"mesh": {"expert": 2}, "jax": {}}),
        (params, {"axis_rules": {"other": None}, "jax": {}}),
    ):
        with pytest.raises(PolyaccelError) as caught:
            start(given, **changes)
        error = caught.value
        found.append(error.problems[0].key if isinstance(error, ConfigError) else error.value)
        assert isinstance(error, ConfigError | ShardingError)
    return found


def test_no_axis_does_nothing(at):
    ((*found,),) = at(1, refusals)
    assert found == [
        *("tensor", ["other"], "tensor", "w", "sequence", "axis_rules", "tensor"),
        *("mesh.tensor", "mesh.expert", "jax.execution"),
    ]
