"""Checkpoints of models that are cut over ranks: from any mesh to any other, bit by bit."""

from __future__ import annotations

from mesh_models import cut_parity_models, join, mesh_config
from pairwise import combinations
from parity_models import SMALL_BUCKET, assert_bitwise, grouped_engine, make_config, parity_loss, parity_model

from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state


def _config(stage):
    return make_config(stage, zero={"reduce_bucket_size": SMALL_BUCKET, "stage3_param_persistence_threshold": 4})


def _whole(model):
    """The value and the states of each parameter of this rank, whole over the ranks that hold the same."""
    found = {}
    for fqn, parameter in model.named_parameters():
        found[f"{fqn} param"] = safe_get_full_fp32_param(parameter)
        for name in ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
            found[f"{fqn} {name}"] = safe_get_full_optimizer_state(parameter, name)
    return {key: value.clone() for key, value in found.items() if value is not None}


def _models(ranks, tensor):
    return [parity_model() for _ in range(ranks)] if tensor == 1 else cut_parity_models(ranks)


def _engine(communicator, models, tensor, stage):
    model, place = models[communicator.rank], communicator.rank
    if tensor > 1:
        model, place = join(communicator, tensor, model)
    config = _config(stage) if tensor == 1 else mesh_config(_config(stage), tensor)
    engine = grouped_engine(model, config)
    return engine, model, place


@combinations(
    source=[(1, 2), (2, 2), (1, 3), (2, 1)],
    target=[(2, 2), (1, 3), (1, 1), (3, 1)],
    stages=[(0, 3), (1, 2), (3, 1), (2, 0)],
)
def test_a_checkpoint_of_one_mesh_is_loaded_by_another(source, target, stages, tmp_path):
    """There and back again: what the first mesh saved, the second loads and saves, and the first finds it unchanged."""

    def train_and_save(communicator, models):
        engine, model, place = _engine(communicator, models, source[1], stages[0])
        for step in range(2):
            engine.backward(parity_loss(engine, step, 0, place))
            engine.step()
        engine.save_checkpoint(str(tmp_path), "first")
        states = _whole(model)
        engine.destroy()
        return states

    def load_and_save(communicator, models):
        engine, _, _ = _engine(communicator, models, target[1], stages[1])
        engine.load_checkpoint(str(tmp_path), "first")
        engine.save_checkpoint(str(tmp_path), "second")
        engine.destroy()

    def load(communicator, models):
        engine, model, _ = _engine(communicator, models, source[1], stages[0])
        engine.load_checkpoint(str(tmp_path), "second")
        states = _whole(model)
        engine.destroy()
        return states

    def on(mesh, run):
        models = _models(mesh[0] * mesh[1], mesh[1])
        return run_threads(mesh[0] * mesh[1], lambda communicator: run(communicator, models))

    saved = on(source, train_and_save)
    on(target, load_and_save)
    for before, after in zip(saved, on(source, load), strict=True):
        assert_bitwise(after, before)
