"""Rewrites of a user's model: one list in order, what each changed, and a model that is given back as it was."""

from __future__ import annotations

import pytest
import torch
from hf_models import VOCABULARY, tiny
from parity_models import SMALL_BUCKET, make_config, on_threads
from torch import nn

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.torch.rewrites import REWRITES


def state_of(model: nn.Module) -> dict[str, object]:
    """What wraps the modules of `model`: classes, attributes and hooks, by full name."""
    return {
        name: (type(one), sorted(vars(one)), len(one._forward_hooks), len(one._forward_pre_hooks))
        for name, one in model.named_modules()
    }


def test_names_are_sections_of_the_config() -> None:
    names = [one.name for one in REWRITES]
    assert names.index("tensor_parallel") < names.index("expert_parallel") < names.index("device")
    assert names.index("sequence_parallel") < names.index("tiled_compute") < names.index("zero_optimization")
    assert names[-3:] == ["activation_checkpointing", "progressive_layer_drop", "generation"]
    assert [one.needs_engine for one in REWRITES] == sorted(one.needs_engine for one in REWRITES)


def test_each_rewrite_states_what_it_changed() -> None:
    def run(communicator, model):
        config = make_config(3, zero={"reduce_bucket_size": SMALL_BUCKET}) | {
            "tensor_parallel": {"autotp_size": 2},
            "tiled_compute": {"enabled": True, "loss_tokens": 4, "mlp_tokens": 4},
            "activation_checkpointing": {"enabled": True},
        }
        before = state_of(model)
        engine, *_ = polyaccel.initialize(model=model, config=config)
        applied = engine.rewrites
        ids = torch.arange(12).reshape(1, 12) % VOCABULARY
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.destroy()
        return applied, engine.rewrites, before, state_of(model)

    for applied, left, before, after in on_threads(2, run, lambda: tiny("llama", dtype=torch.float32)):
        found = {one.name: one for one in applied}
        assert [one.name for one in REWRITES if one.name in found] == [one.name for one in applied]
        assert {"tensor_parallel", "tiled_compute", "zero_optimization", "activation_checkpointing"} <= set(found)
        cut = found["tensor_parallel"]
        assert "model.layers.0.self_attn.q_proj.weight" in cut.parameters
        assert "model.layers.0.mlp" in found["tiled_compute"].modules
        assert found["activation_checkpointing"].modules == ("model.layers.0", "model.layers.1")
        assert "model.norm.weight" in found["zero_optimization"].parameters
        assert left == ()
        differing = {name for name in before if before[name] != after[name]}
        assert differing <= {"", *cut.modules}  # parameters stay cut, and nothing else stays changed


def test_a_failed_initialize_gives_the_model_back() -> None:
    def run(communicator, model):
        before = state_of(model)
        tiles = {"tiled_compute": {"enabled": True}}
        several = make_config(0, accumulation=2) | tiles  # which an optimizer with a closure refuses
        del several["optimizer"]
        with pytest.raises(ConfigError):
            polyaccel.initialize(model=model, config=several, optimizer=torch.optim.LBFGS)
        first = state_of(model)
        nothing = {"activation_checkpointing": {"enabled": True, "blocks": ["nothing_of_this_name"]}}
        with pytest.raises(ConfigError):
            polyaccel.initialize(model=model, config=make_config(0) | tiles | nothing)
        tiled = [name for name, one in model.named_modules() if name.endswith("mlp") and "forward" in vars(one)]
        return before == first, tiled

    assert on_threads(1, run, lambda: tiny("llama", dtype=torch.float32)) == [(True, [])]


def test_a_request_that_cannot_be_met_is_refused_before_anything_is_changed() -> None:
    def run(communicator, model):
        whole = {name: one.shape for name, one in model.named_parameters()}
        config = make_config(0) | {
            "tensor_parallel": {"autotp_size": 2},
            "pipeline": {"stages": 2, "activation_checkpoint_interval": 1},
        }
        with pytest.raises(ConfigError):
            polyaccel.initialize(model=model, config=config)
        return whole == {name: one.shape for name, one in model.named_parameters()}

    assert on_threads(4, run, lambda: tiny("llama", dtype=torch.float32)) == [True] * 4
