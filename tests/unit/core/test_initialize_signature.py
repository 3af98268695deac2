"""`polyaccel.initialize` as an editor shows it: DeepSpeed's arguments in DeepSpeed's order, then ours by keyword."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import polyaccel
from polyaccel.errors import ConfigError, PolyaccelError

DEEPSPEED_ORDER = (
    "args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "distributed_port", "mpu",
    "dist_init_required", "collate_fn", "config", "mesh_param", "config_params",
)  # fmt: skip
"""As its documentation and its 0.19 sources have them."""


def test_arguments_stand_in_deepspeeds_order() -> None:
    parameters = inspect.signature(polyaccel.initialize).parameters
    positional = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert tuple(positional) == DEEPSPEED_ORDER
    assert [name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY] == [
        "params",
        "state",
        "state_reduction",
        "seed",
        "stacked",
        "mesh",
        "param_specs",
        "batch_spec",
        "axis_rules",
    ]
    assert len(parameters) == len(positional) + 9  # no *positional, no **named
    defaults = {name: one.default for name, one in parameters.items() if one.default is not None}
    assert defaults == {"stacked": ()}


def test_each_argument_is_explained() -> None:
    text = inspect.getdoc(polyaccel.initialize)
    assert text is not None
    assert [name for name in inspect.signature(polyaccel.initialize).parameters if f"\n    {name}: " not in text] == []


def test_help_needs_no_framework() -> None:
    script = """
import sys, pydoc, polyaccel
print(pydoc.render_doc(polyaccel.initialize, renderer=pydoc.plaintext))
print(sorted({"torch", "jax"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    *shown, loaded = done.stdout.strip().splitlines()
    assert "mesh_param" in "".join(shown)
    assert "whose floating leaves are trained" in "".join(shown)
    assert loaded == "[]"


def test_arguments_of_the_other_framework_are_refused() -> None:
    with pytest.raises(PolyaccelError) as caught:
        polyaccel.initialize(model=print, params={}, lr_scheduler=1, config={})
    assert all(part in str(caught.value) for part in ("lr_scheduler", "JAX"))
    with pytest.raises(PolyaccelError) as caught:
        polyaccel.initialize(model=print, seed=1, stacked=["layers"], config={})
    assert all(part in str(caught.value) for part in ("seed", "stacked"))


def test_a_model_in_the_place_of_args_is_noticed() -> None:
    with pytest.raises(PolyaccelError) as caught:
        polyaccel.initialize(print, config={})
    assert "model=" in caught.value.hint


def test_a_function_without_params_is_no_torch_module() -> None:
    with pytest.raises(PolyaccelError) as caught:
        polyaccel.initialize(model=lambda batch: batch, config={})
    assert caught.value.value == "function"
    assert "JAX" in str(caught.value)


def test_the_config_may_stand_in_any_one_place() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError) as caught:
        polyaccel.initialize(model=model, config={}, config_params={})
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("config", "config, config_params")]
    for given in ({"config_params": {"x": 1}}, {"args": SimpleNamespace(deepspeed_config={"x": 1})}):
        with pytest.raises(ConfigError) as caught:
            polyaccel.initialize(model=model, **given)
        assert [(problem.key, problem.value) for problem in caught.value.problems] == [("x", 1)]
