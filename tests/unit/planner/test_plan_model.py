"""Models as the planner sees them: counted, built on the meta device, or read from a Hugging Face config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyaccel.config import load_resolved
from polyaccel.core.types import DType
from polyaccel.engine.policies.modules import ModuleRules, module_rules_of
from polyaccel.errors import PolyaccelError
from polyaccel.planner.model import BLOCKS, parse_count, shape_of_count
from polyaccel.torch.estimate.meta_shapes import shape_of_directory, shape_of_function, shape_of_module


def rules(**changes: Any) -> ModuleRules:
    return module_rules_of(load_resolved({"train_micro_batch_size_per_gpu": 1, **changes}, world_size=1))


@pytest.mark.parametrize(
    ("text", "numel"),
    [
        ("7e9", 7_000_000_000),
        ("1.3B", 1_300_000_000),
        ("124M", 124_000_000),
        ("1.5e+3", 1500),
        ("12", 12),
        ("0.5K", 500),
        ("1T", 10**12),
        ("1.23456K", 1234),
        ("model:build", None),
        ("7e", None),
        ("-7", None),
        ("7 B", None),
        ("7e999", None),
    ],
)
def test_a_number_of_parameters_is_understood(text: str, numel: int | None) -> None:
    assert parse_count(text) == numel


@pytest.mark.parametrize("numel", [0, 5, 1_000_003])
def test_a_counted_model_has_so_many_parameters_in_equal_blocks(numel: int) -> None:
    shape = shape_of_count(numel, DType.BFLOAT16)
    assert shape.numel == shape.trained_numel == numel
    blocks: dict[str, int] = {}
    for spec in shape.specs:
        assert spec.dtype is DType.BFLOAT16
        unit = shape.units[spec.fqn]
        blocks[unit] = blocks.get(unit, 0) + spec.numel
    if numel > 1000:
        assert len(blocks) == BLOCKS
        assert max(blocks.values()) - min(blocks.values()) <= 8
        assert next(iter(blocks)) == f"block{BLOCKS - 1}"  # gradients come from the end


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.requires_grad_(False)


def test_a_module_is_measured_without_values() -> None:
    with torch.device("meta"):
        shape = shape_of_module(Tied(), "tied", rules(fp16={"enabled": True}))
    assert shape.numel == 40 + 3 * 20 + 8
    assert shape.trained_numel == 3 * 20 + 8
    assert shape.buffer_nbytes == 4 * 4 + 4 * 4 + 8
    dtypes = {spec.fqn: spec.dtype for spec in shape.specs}
    in_float32 = {fqn for fqn, dtype in dtypes.items() if dtype is DType.FLOAT32}
    assert in_float32 == {"norm.weight", "norm.bias"}, "a norm with running statistics keeps their type"
    assert {dtypes[fqn] for fqn in dtypes.keys() - in_float32} == {DType.FLOAT16}
    assert [spec.fqn for spec in shape.specs][-1] == "embed.weight"
    assert shape.units["blocks.1.bias"] == "blocks.1"
    assert shape.units["embed.weight"] == ""


@pytest.fixture
def module_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory."""
    monkeypatch.chdir(tmp_path)
    name = f"planned_{tmp_path.name.replace('-', '_')}"
    Path(f"{name}.py").write_text(
        "import torch\n"
        "def build(): return torch.nn.Linear(100_000, 1_000_000)\n"  # 400 GB, were it real
        "def number(): return 3\n"
        "def reads(): return torch.nn.Linear(torch.ones(1).item(), 1)\n"
        "constant = 5\n"
    )
    return name


def test_a_function_is_called_on_the_meta_device(module_here: str) -> None:
    shape = shape_of_function(f"{module_here}:build", rules())
    assert shape.numel == 100_000 * 1_000_000 + 1_000_000
    assert shape.summary == f"{module_here}:build()"


@pytest.mark.parametrize("name", ["number", "reads", "constant", "missing"])
def test_a_function_that_gives_no_model_is_an_error(module_here: str, name: str) -> None:
    with pytest.raises(PolyaccelError) as caught:
        shape_of_function(f"{module_here}:{name}", rules())
    assert f"{module_here}:{name}" in str(caught.value)
    assert caught.value.hint


def test_a_module_that_is_not_there_is_an_error(module_here: str) -> None:
    with pytest.raises(PolyaccelError) as caught:
        shape_of_function("no_such_module:build", rules())
    assert caught.value.value == "no_such_module:build"


def test_a_hugging_face_directory_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"n_layer": 3, "n_embd": 8, "n_head": 2, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    real = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    shape = shape_of_directory(tmp_path, rules())
    assert {spec.fqn: spec.shape for spec in shape.specs} == {
        name: tuple(parameter.shape) for name, parameter in real.named_parameters()
    }
    assert shape.summary.startswith("GPT2LMHeadModel")

    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": None}))
    assert shape_of_directory(tmp_path, rules()).summary.startswith("GPT2Model")


def test_another_directory_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(PolyaccelError) as caught:
        shape_of_directory(tmp_path, rules())
    assert caught.value.value == str(tmp_path)


def test_without_transformers_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(PolyaccelError) as caught:
        shape_of_directory(tmp_path, rules())
    assert caught.value.value == str(tmp_path)
