"""Whole models of engines whose parameters are blocks: state dicts, files, and what is loaded from them."""

from __future__ import annotations

import pytest
import torch
from mesh_models import cut_parity_models, join, mesh_config
from parity_models import (
    SMALL_BUCKET,
    assert_bitwise,
    grouped_engine,
    make_config,
    parity_loss,
    parity_model,
    snapshot,
)

from polyaccel.testkit.ranks.threads import run_threads

TENSOR = 2


def _on_a_mesh(stage, run):
    models = cut_parity_models(2 * TENSOR)
    config = mesh_config(make_config(stage, zero={"reduce_bucket_size": SMALL_BUCKET}), TENSOR)

    def of_rank(communicator):
        model, place = join(communicator, TENSOR, models[communicator.rank])
        engine = grouped_engine(model, config)
        try:
            return run(engine, place)
        finally:
            engine.destroy()

    return run_threads(2 * TENSOR, of_rank)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_state_dict_has_whole_tensors_on_every_rank(stage):
    wanted = parity_model().state_dict()
    for state in _on_a_mesh(stage, lambda engine, place: engine.module_state_dict()):
        assert_bitwise(state, wanted)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_whole_state_dict_is_taken_over_block_by_block(stage):
    whole = {name: torch.rand_like(value) for name, value in parity_model().state_dict().items()}
    whole["head.weight"] = whole["embed.weight"]

    def load(engine, place):
        engine.load_module_state_dict(whole)
        engine.backward(parity_loss(engine, 0, 0, place))
        engine.zero_grad()
        return engine.module_state_dict()

    for state in _on_a_mesh(stage, load):
        assert_bitwise(state, whole)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_has_the_whole_model(stage, name, tmp_path):
    _on_a_mesh(stage, lambda engine, place: engine.save_16bit_model(str(tmp_path), name))
    if name.endswith("bin"):
        found = torch.load(tmp_path / name)
    else:
        from safetensors.torch import load_file

        found = load_file(tmp_path / name)
    assert_bitwise(found, snapshot(parity_model()) | {"head.weight": parity_model().embed.weight.detach()})
