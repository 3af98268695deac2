"""A script's own mesh: its specs and constraints hold, ZeRO cuts over the axes that are left, and numbers are those of
plain JAX and optax on one device."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax_mesh_model as model
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import polyaccel
from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.testkit.ranks.threads import run_threads

pytestmark = pytest.mark.timeout(300)  # programs to compile, on a machine that may be slow and busy
PATIENCE_S = 240.0


@pytest.mark.parametrize(
    ("processes", "stage", "name", "placed", "offloads"),
    [
        (1, 3, "adamw", False, True),
        (1, 2, "muon", True, False),
        (1, 0, "plateau", False, False),
        (2, 1, "adafactor", False, True),
        (2, 3, "clip", False, False),
    ],
)
def test_numbers_of_plain_jax(at, processes, stage, name, placed, offloads):
    losses, params = model.train_plain(name)
    for found in at(processes, model.train, stage, name, placed, offloads):
        np.testing.assert_allclose(found[0], losses, rtol=1e-6)
        jax.tree.map(lambda own, plain: np.testing.assert_allclose(own, plain, rtol=0, atol=1e-6), found[1], params)
        assert found[2] == (None, "tensor")
        assert not found[3]  # XLA's on CPUs is now and then wrong
        assert found[4] == {"pinned_host" if offloads else "device"}


def train_on_explicit_axes(communicator, is_placed):
    """(losses, parameters) of a script whose mesh has the types of axes that `jax.make_mesh` gives."""
    where, params = jax.make_mesh((2, 2), ("data", "tensor")), model.initial_params()
    assert set(where.axis_types) == {AxisType.Explicit}
    named = {"mesh": where, "param_specs": model.SPECS}
    if is_placed:
        places = jax.tree.map(
            lambda spec: NamedSharding(where, spec), model.SPECS, is_leaf=lambda one: isinstance(one, P)
        )
        params, named = jax.device_put(params, places), {}
    own = {"optimizer": model.transformation("adamw"), "config": model.make_config(3)}
    engine = polyaccel.initialize(model=model.loss_on(None), params=params, **named, **own)
    losses = [float(engine.train_batch(model.batch_of(step))) for step in range(model.STEPS)]
    spec = engine.params["first"]["kernel"].sharding.spec
    return losses, jax.tree.map(np.asarray, engine.params), tuple(spec)


@pytest.mark.parametrize("is_placed", [False, True])
def test_explicit_axes_train_as_automatic_ones(at, is_placed):
    losses, params = model.train_plain("adamw")
    ((found, own, spec),) = at(1, train_on_explicit_axes, is_placed)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    jax.tree.map(lambda one, plain: np.testing.assert_allclose(one, plain, rtol=0, atol=1e-6), own, params)
    assert spec == (None, "tensor")


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_checkpoint_goes_to_other_places(at, tmp_path, name):
    ((whole, *others),) = at(1, model.resume, str(tmp_path), name)
    for other in others:
        jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=0, atol=1e-6), whole, other)


@pytest.mark.parametrize("has_mesh", [False, True])
def test_units_gather_their_leaves(at, has_mesh):
    """Scanned layers, a unit, and a root that is used on both sides of them, at stage 3."""
    (plain,) = run_threads(1, lambda _: model.train_scanned_plainly(), timeout_s=PATIENCE_S)
    ((losses, evaluated, aux, params),) = at(1, model.train_scanned, has_mesh)
    np.testing.assert_allclose(losses, plain[0], rtol=1e-6)
    np.testing.assert_allclose(evaluated, plain[1], rtol=1e-6)
    np.testing.assert_allclose(aux, plain[2], rtol=0, atol=1e-6)
    jax.tree.map(lambda own, one: np.testing.assert_allclose(own, one, rtol=0, atol=1e-6), params, plain[3])


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_in_hand_lie_where_parameters_do(at, stage):
    losses, params = model.train_plainly_in_hand()
    ((found, whole),) = at(1, model.train_in_hand, stage)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    jax.tree.map(lambda own, plain: np.testing.assert_allclose(own, plain, rtol=0, atol=1e-6), whole, params)


def refusals(communicator):
    """The errors of meshes and specs that no program can have."""
    devices = np.array(jax.devices()).reshape(2, 2)
    where = model.mesh()
    named = [
        {"mesh": Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Manual,) * 2)},
        {"mesh": where, "param_specs": {"table": P("model")}},
        {"mesh": where, "param_specs": {"gain": P("tensor")}},
        {"mesh": where, "param_specs": {"table": P(None, None, "tensor")}},
        {"mesh": where, "param_specs": {"other": P("tensor")}},
        {"mesh": where, "param_specs": {"table": "tensor"}},
        {"mesh": where, "param_specs": {"table": P("data", "tensor")}},
        {"mesh": where, "batch_spec": P("data", "tensor")},
        {"mesh": "data"},
        {"param_specs": model.SPECS},
    ]
    found = []
    for given in named:
        with pytest.raises(ShardingError) as caught:
            polyaccel.initialize(
                model=model.loss_on(None), params=model.initial_params(), config=model.make_config(2), **given
            )
        found.append(bool(caught.value.hint))
    engine = model.start(2, "adamw")
    with pytest.raises(PolyaccelError) as caught:
        engine.train_batch(jax.tree.map(lambda leaf: leaf[:7], model.batch_of(0)))
    return found, caught.value.value


def test_what_no_program_can_have_is_refused(at):
    ((hints, samples),) = at(1, refusals)
    assert hints == [True] * 10
    assert samples == 7


def test_names_of_axes_in_flax_are_specs(at):
    pytest.importorskip("flax")
    import flax_mesh_model

    assert at(1, flax_mesh_model.both) == [(True, True)]
