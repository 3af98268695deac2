"""State on a script's own mesh: one for all devices, with the numbers of plain JAX on one."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax_mesh_state_model as model

from polyaccel.errors import PolyaccelError

pytestmark = pytest.mark.timeout(300)  # programs to compile, on a machine that may be slow and busy


@pytest.mark.parametrize(("processes", "stage"), [(1, 3), (2, 2)])
def test_numbers_of_plain_jax(at, tmp_path, processes, stage):
    losses, evaluated, params, state = model.plain()
    for found in at(processes, model.train, stage, str(tmp_path)):
        np.testing.assert_allclose(found[0], losses, rtol=1e-6)
        np.testing.assert_allclose(found[1], evaluated, rtol=1e-6)
        for own, plain in zip(found[2:4], (params, state), strict=True):
            jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=0, atol=1e-6), own, plain)
        assert found[3]["count"] == model.STEPS
        assert found[4] == {"mean": (), "seen": ("data",)}
        assert found[5]


def refusals(communicator):
    """The values of the errors of a state that no mesh has, and of one that is another."""
    found = []
    with pytest.raises(PolyaccelError) as caught:
        model.start(1, state_reduction=lambda name: "none" if name == "count" else "mean")
    found.append(caught.value.value)
    other = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    state = model.initial()[1]
    state["seen"] = jax.device_put(state["seen"], model.NamedSharding(other, model.P("all")))
    with pytest.raises(PolyaccelError) as caught:
        model.start(1, state=state)
    found.append(caught.value.value)
    return found


def test_a_state_of_ranks_is_refused(at):
    assert at(1, refusals) == [["count", "{'all': 4}"]]


@pytest.mark.parametrize(("processes", "stage", "is_wrong"), [(1, 2, True), (2, 3, False), (2, 1, True)])
def test_the_first_step_is_proven(at, processes, stage, is_wrong):
    first, *others = at(processes, model.prove, stage, is_wrong)
    said, blamed, losses = first
    if is_wrong:
        assert said == []
        assert {one[1] for one in (first, *others)} == {blamed}
        assert blamed in {"up", "down"}
    else:
        assert said == ["proven"]
        assert all(one[1] is None for one in (first, *others))
        np.testing.assert_allclose(losses, model.plain(2)[0], rtol=1e-6)
