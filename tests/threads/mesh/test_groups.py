"""The groups along the axes of a mesh, and meshes that scripts bring along."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from mesh_models import CutParityModel, bounds, cut_parity_models, join, mesh_config
from parity_models import grouped_engine, make_config, parity_loss, parity_model, train_plainly

import polyaccel
from polyaccel.comm import groups
from polyaccel.core.mesh import Mesh, MeshAxis
from polyaccel.errors import CommError, ConfigError
from polyaccel.testkit.ranks.threads import run_threads


def test_groups_are_those_of_the_engine_s_mesh():
    models = cut_parity_models(4)

    def of_rank(communicator):
        before = groups.get_data_parallel_world_size(), groups.get_tensor_model_parallel_world_size()
        with pytest.raises(CommError) as caught:
            groups.get_tensor_model_parallel_group()
        assert "'tensor'" in str(caught.value)
        model, _ = join(communicator, 2, models[communicator.rank])
        engine, *_ = polyaccel.initialize(model=model, config=mesh_config(make_config(1), 2))
        found = (
            groups.get_data_parallel_group().ranks,
            groups.get_data_parallel_rank(),
            groups.get_model_parallel_group().ranks,
            groups.get_tensor_model_parallel_rank(),
            groups.get_sequence_parallel_world_size(),
            groups.get_sequence_data_parallel_group().ranks,
        )
        axes = [axis.name for axis in engine.mesh.axes]
        engine.destroy()
        return before, found, axes, groups.get_data_parallel_world_size()

    for rank, (before, found, axes, after) in enumerate(run_threads(4, of_rank)):
        column, row = ((0, 2), (1, 3))[rank % 2], ((0, 1), (2, 3))[rank // 2]
        assert before == (4, 1)
        assert found == (column, rank // 2, row, rank % 2, 1, column)
        assert (axes, after) == (["data", "tensor"], 4)


def test_groups_of_an_engine_stay_when_another_one_is_destroyed():
    """Each of three engines trains as it does alone, and the groups are those of the one made last."""
    models = [cut_parity_models(4) for _ in range(3)]

    def of_rank(communicator):
        def made(at):
            model, place = join(communicator, 2, models[at][communicator.rank])
            config = mesh_config(make_config(1), 2)
            return grouped_engine(model, config), place

        def norm_of(engine, place):
            engine.backward(parity_loss(engine, 0, 0, place))
            engine.step()
            group = groups.get_tensor_model_parallel_group()
            assert group.all_gather_object(communicator.rank) == [*group.ranks]
            return engine.get_global_grad_norm()

        (first, place), (second, _) = made(0), made(1)
        first.destroy()
        assert groups.get_tensor_model_parallel_world_size() == 2
        norms = [norm_of(second, place)]
        third, _ = made(2)
        third_group = groups.get_tensor_model_parallel_group()
        norms.append(norm_of(third, place))
        third.destroy()
        assert groups.get_tensor_model_parallel_group() is not third_group
        norms.append(norm_of(second, place))
        second.destroy()
        second.destroy()
        return norms, groups.get_tensor_model_parallel_world_size()

    plain = train_plainly(2, 1)
    for norms, after in run_threads(4, of_rank):
        assert norms[:2] == pytest.approx([plain.norms[0]] * 2, rel=1e-5)
        assert norms[2] != norms[0]
        assert after == 1


def test_a_script_that_shares_sequences_itself_states_its_mesh():
    """Two ranks share each batch: each computes the loss of its half, and all gradients have one mean."""
    models = [parity_model() for _ in range(4)]

    def of_rank(communicator):
        model = models[communicator.rank]
        engine = grouped_engine(model, make_config(2), mesh_param=(2, 2))
        place = engine.mesh.coordinates(communicator.rank)
        found = engine.train_batch_size()

        def halves(step, micro):
            from parity_models import batch

            half = place["sequence"]
            return [part[2 * half : 2 * half + 2] for part in batch(step, micro, place["data"])]

        for step in range(2):
            engine.backward(engine(*halves(step, 0)))
            engine.step()
        norm = engine.get_global_grad_norm()
        engine.destroy()
        return found, norm

    plain = train_plainly(2, 2)
    for found, norm in run_threads(4, of_rank):
        assert found == 8
        assert norm == pytest.approx(plain.norms[-1], rel=1e-5)


class _Mpu:
    """Megatron's functions, for two ranks that share tensors."""

    def get_model_parallel_world_size(self):
        return 2

    def get_data_parallel_world_size(self):
        return 1


class _MarkedModel(CutParityModel):
    """Cut by its author, in equal parts, with Megatron's marks on its parameters."""

    def mark(self, ranks):
        self.ranks = ranks
        with torch.no_grad():
            for parameter, dim in ((self.wide.weight, 0), (self.wide.bias, 0), (self.narrow.weight, 1)):
                half = parameter.shape[dim] // 2
                parameter.data = parameter.narrow(dim, ranks.rank * half, half).clone()
                parameter.tensor_model_parallel, parameter.partition_dim = True, dim
        return self


def test_marks_of_megatron_say_what_is_cut():
    def even():
        torch.manual_seed(3)
        model = _MarkedModel()
        model.wide, model.narrow = torch.nn.Linear(6, 32), torch.nn.Linear(32, 6)
        return model

    models, whole = [even() for _ in range(2)], even()
    whole.ranks = SimpleNamespace(all_reduce=lambda buffer: None)

    def of_rank(communicator):
        model = models[communicator.rank].mark(communicator.split([0, 1]))
        engine = grouped_engine(model, make_config(1), mpu=_Mpu())
        engine.backward(parity_loss(engine, 0, 0, 0))
        engine.step()
        state, norm = engine.module_state_dict(), engine.get_global_grad_norm()
        engine.destroy()
        return {name: value.clone() for name, value in state.items()}, norm

    plain = train_plainly(1, 1, build=lambda: deepcopy(whole))
    for state, norm in run_threads(2, of_rank):
        assert state["wide.weight"].shape == (32, 6)
        assert norm == pytest.approx(plain.norms[0], rel=1e-5)
        for name, value in plain.params.items():
            torch.testing.assert_close(state[name], value, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "config", "key"),
    [
        ({"mesh_param": (2, 2), "mpu": _Mpu()}, {}, "mesh_param"),
        ({"mesh_param": (2, "x")}, {}, "mesh_param"),
        (
            {"mpu": _Mpu()},
            {"tensor_parallel": {"autotp_size": 4}},
            "tensor_parallel.autotp_size",
        ),
        ({"mpu": SimpleNamespace(get_pipe_parallel_world_size=lambda: 2)}, {}, "mpu"),
        ({"mesh_param": (1, 3)}, {}, "mesh.sequence"),
    ],
    ids=["both", "no pair", "another size", "stages", "no divisor"],
)
def test_a_mesh_that_cannot_be_is_refused(arguments, config, key: str):
    models = [parity_model() for _ in range(2)]

    def of_rank(communicator):
        with pytest.raises(ConfigError) as caught:
            polyaccel.initialize(model=models[communicator.rank], config={**make_config(1), **config}, **arguments)
        assert caught.value.problems[0].key == key

    run_threads(2, of_rank)


def test_blocks_of_the_parity_model_are_uneven():
    """What these tests are about."""
    assert [high - low for low, high in (bounds(rank, 2) for rank in range(2))] == [16, 17]
    assert Mesh((MeshAxis("data", 1), MeshAxis("tensor", 2))).group(("tensor",), 1) == (0, 1)
