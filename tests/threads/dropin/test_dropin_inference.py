"""`deepspeed.init_inference` with DeepSpeed's own keys, next to the untouched model."""

from __future__ import annotations

import copy
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed_runs import GOLDEN, SAMPLES, TOLD, Net, batch
from transformer_models import transformer_batch, transformer_model

from polyaccel.checkpoint.convert import importers
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def prompt() -> torch.Tensor:
    return transformer_batch("gpt2", length=5)["input_ids"]


def plain_logits(model: Any, dtype: torch.dtype) -> torch.Tensor:
    twin = copy.deepcopy(model).eval()
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(dtype)
    with torch.no_grad():
        logits: torch.Tensor = twin(prompt()).logits
    return logits


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"dtype": torch.float, "mp_size": 1, "replace_method": "auto"}, torch.float32),
        ({"dtype": "bf16", "kernel_inject": True, "return_tuple": False}, torch.bfloat16),
        ({"config": {"dtype": torch.half, "tensor_parallel": {"tp_size": 1}}}, torch.float16),
        ({}, torch.float16),
    ],
)
def test_one_rank_has_the_bits_of_the_model(keys: dict[str, Any], dtype: torch.dtype) -> None:
    model: Any = transformer_model("gpt2")
    logits = plain_logits(model, dtype)
    engine = deepspeed.init_inference(model, **keys)
    assert isinstance(engine, deepspeed.InferenceEngine)
    assert engine.config is model.config
    assert torch.equal(engine(prompt()).logits, logits)


@pytest.mark.parametrize(
    "keys", [{"mp_size": 2}, {"tp": {"tp_size": 2}}, {"config": {"tensor_parallel": {"tp_size": 2}}}]
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tensor_ranks_have_the_tokens_of_the_model(kind: str, keys: dict[str, Any]) -> None:
    models: list[Any] = [transformer_model(kind) for _ in range(2)]
    logits = plain_logits(models[0], torch.float32)
    tokens = copy.deepcopy(models[0]).eval().generate(prompt(), **GREEDY)

    def body(communicator: Communicator) -> None:
        engine = deepspeed.init_inference(models[communicator.rank], dtype=torch.float32, **keys)
        assert engine.mp_world_size == 2
        torch.testing.assert_close(engine(prompt()).logits, logits, rtol=1e-5, atol=1e-6)
        assert torch.equal(engine.generate(prompt(), **GREEDY), tokens)

    run_threads(2, body)


@pytest.mark.parametrize("stated", ["folder", "dict", "json"])
def test_a_checkpoint_is_found_as_deepspeed_describes_it(stated: str, tmp_path: Path) -> None:
    saved: Any = transformer_model("llama", initializer_range=0.5)
    saved.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    names = sorted(file.name for file in (tmp_path / "model").glob("*.safetensors"))
    assert len(names) > 1
    described = {"type": "ds_model", "checkpoints": names, "version": 1.0}
    (tmp_path / "files.json").write_text(json.dumps(described))
    checkpoint: Any = {"folder": "model", "dict": described, "json": str(tmp_path / "files.json")}[stated]
    base = tmp_path if stated == "folder" else tmp_path / "model"
    with deepspeed.zero.Init():
        model = type(saved)(saved.config)
    engine = deepspeed.init_inference(model, dtype=torch.float32, checkpoint=checkpoint, base_dir=str(base))
    assert torch.equal(engine(prompt()).logits, plain_logits(saved, torch.float32))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"dtipe": "fp16"}, {}),
        ({"dtype": "fp16"}, {"dtype": "fp32"}),
        ({"max_out_tokens": 8}, {"max_tokens": 9}),
        ({"tensor_parallel": {"tp_size": 3}}, {"mp_size": 2}),
        ({"dtype": torch.float64}, {}),
        ({}, {"ep_size": 2}),
        ({}, {"quant": {"weight": {"num_bits": 4}}}),
        ({}, {"checkpoint": {"checkpoints": []}}),
        ({}, {"tensor_parallel": {"tp_group": object()}}),
    ],
)
def test_what_there_is_not_is_a_value_error(config: Any, named: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        deepspeed.init_inference(transformer_model("gpt2"), config, **named)


def test_its_defaults_change_nothing() -> None:
    defaults = deepspeed.default_inference_config()
    assert defaults["dtype"] is torch.float16
    defaults.pop("max_out_tokens")
    engine = deepspeed.init_inference(transformer_model("gpt2"), defaults)
    assert {one.dtype for one in engine.module.parameters()} == {torch.float16}


@pytest.mark.parametrize("name", ["zero1", "zero3", "universal"])
def test_checkpoints_of_deepspeed_are_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the step that a real DeepSpeed made after it had saved them."""
    importer = EntryPoint("deepspeed", "polyaccel_deepspeed.exchange.importing:read", importers.GROUP)
    others = importers.metadata.entry_points

    def installed(group: str) -> Any:
        return [importer] if group == importers.GROUP else others(group=group)

    monkeypatch.setattr(importers.metadata, "entry_points", installed)
    torch.manual_seed(99)
    engine = deepspeed.init_inference(Net(), dtype=torch.float32, checkpoint=str(GOLDEN / name))
    ranks = TOLD[name]["ranks"]
    losses = [engine(*batch(4, slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks))) for rank in range(ranks)]
    assert torch.stack(losses).mean().item() == pytest.approx(TOLD[name]["losses"][4], rel=2e-6)
