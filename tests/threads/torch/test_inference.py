"""`polyaccel.init_inference`: logits and greedy tokens next to those of the untouched model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError, ConfigError, PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.generation.decode.model import Decoder
from polyaccel.torch.weight_groups import GroupedWeight

pytest.importorskip("transformers")
from transformer_models import transformer_batch, transformer_model

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def inputs_of(kind: str) -> dict[str, torch.Tensor]:
    batch = transformer_batch(kind)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def prompt_of(kind: str) -> torch.Tensor:
    return transformer_batch(kind, length=5)["input_ids"]


def plain_results(model: nn.Module, kind: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and tokens of a copy of `model`, whose parameters have the type `dtype`."""
    twin: Any = copy.deepcopy(model).eval()
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(TYPES[dtype])
    with torch.no_grad():
        return twin(**inputs_of(kind)).logits, twin.generate(prompt_of(kind), **GREEDY)


def compute(model: nn.Module, kind: str, **keys: Any) -> tuple[torch.Tensor, torch.Tensor]:
    engine = polyaccel.init_inference(model, **keys)
    assert not any(part.training for part in engine.module.modules())
    logits = engine(**inputs_of(kind)).logits
    assert not logits.requires_grad
    return logits, engine.generate(prompt_of(kind), **GREEDY)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_one_rank_has_the_bits_of_the_model(kind: str, dtype: str) -> None:
    model = transformer_model(kind)
    logits, tokens = plain_results(model, kind, dtype)
    found, texts = compute(model, kind, dtype=dtype)
    assert found.dtype is TYPES[dtype]
    assert torch.equal(found, logits)
    assert torch.equal(texts, tokens)


@pytest.mark.parametrize(("kind", "dtype"), [("gpt2", "fp32"), ("llama", "fp32"), ("llama", "bf16")])
@pytest.mark.parametrize("copies", [1, 2])
def test_tensor_ranks_have_the_logits_of_the_model(kind: str, dtype: str, copies: int) -> None:
    models = [transformer_model(kind) for _ in range(2 * copies)]
    logits, tokens = plain_results(models[0], kind, dtype)

    def body(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor, int]:
        mine = models[communicator.rank]
        results = compute(mine, kind, dtype=dtype, tensor_parallel={"tp_size": 2})
        return (*results, sum(one.numel() for one in mine.parameters()))

    whole = sum(one.numel() for one in models[0].parameters())
    for found, texts, numel in run_threads(2 * copies, body):
        rtol, atol = (1e-5, 1e-6) if dtype == "fp32" else (2e-2, 2e-2)
        torch.testing.assert_close(found, logits, rtol=rtol, atol=atol)
        assert numel < 0.7 * whole
        if dtype == "fp32":
            assert torch.equal(texts, tokens)


@pytest.mark.parametrize("largest", [127, 7], ids=["int8", "int4"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_weights_in_integers_are_those_of_a_reference(
    kind: str, ranks: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model whose weights were rounded before, by the formula in float64."""
    changes = {"intermediate_size": 40} if kind == "llama" else {}
    models = [transformer_model(kind, **changes) for _ in range(ranks)]
    twin: Any = copy.deepcopy(models[0]).eval()
    size = 4  # divides the parts of ranks, whose groups are then those of the whole
    rounded = 0
    for part in twin.modules():
        weight = getattr(part, "weight", None)
        if weight is not None and weight.dim() == 2 and not isinstance(part, nn.Embedding):
            if weight is twin.get_input_embeddings().weight:
                continue
            rows = weight.data.double()
            rows = rows.t() if type(part).__name__ == "Conv1D" else rows
            groups = rows.reshape(rows.shape[0], -1, size)
            scales = (groups.abs().amax(-1, keepdim=True).float() / largest).double()
            back = ((groups / scales).round() * scales).reshape(rows.shape)
            weight.data = (back.t() if type(part).__name__ == "Conv1D" else back).float().contiguous()
            rounded += 1
    with torch.no_grad():
        logits, tokens = twin(**inputs_of(kind)).logits, twin.generate(prompt_of(kind), **GREEDY)

    def body(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        mine = models[communicator.rank]
        keys = {
            "dtype": "int8" if largest == 127 else "int4",
            "group_size": size,
            "tensor_parallel": {"tp_size": ranks},
        }
        return compute(mine, kind, **keys)

    prefills = []
    prefill = Decoder.prefill
    monkeypatch.setattr(Decoder, "prefill", lambda *given: prefills.append(1) or prefill(*given))
    assert rounded > 7
    for found, texts in run_threads(ranks, body):
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(texts, tokens)
    assert prefills  # by the decoder, on integers


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("shape", "size"), [((5, 12), 4), ((3, 10), 4), ((2, 3), 128), ((4, 1), 1), ((40, 9), 3)])
def test_groups_round_by_half_a_scale(shape: tuple[int, int], size: int, is_transposed: bool, bits: int) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[0] = 0.0
    weight = weight.t().contiguous() if is_transposed else weight
    grouped = GroupedWeight(weight, size, bits=bits, is_transposed=is_transposed)
    error = (grouped.weight().double() - weight.double()).abs()
    assert grouped.weight().shape == weight.shape
    assert error.max() <= grouped.scales.double().max() * 0.5001
    assert torch.equal(grouped.weight() == 0, (grouped.weight() == 0) & torch.isfinite(grouped.weight()))
    assert grouped.values.dtype is torch.int8
    assert grouped.values.abs().max() == (127 if bits == 8 else 7)


def trained_checkpoint(kind: str, folder: Path) -> nn.Module:
    model: nn.Module = transformer_model(kind)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    engine, *_ = polyaccel.initialize(model=model, config=config)
    engine.backward(engine(**transformer_batch(kind)).loss)
    engine.step()
    engine.save_checkpoint(str(folder))
    engine.destroy()
    return model


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("where", ["ours", "safetensors", "shards", "bin"])
def test_weights_come_from_a_checkpoint(kind: str, where: str, tmp_path: Path) -> None:
    trained = trained_checkpoint(kind, tmp_path / "ours")
    folder = tmp_path / "ours" if where == "ours" else tmp_path / "model"
    if where == "bin":
        folder.mkdir()
        torch.save(trained.state_dict(), folder / "pytorch_model.bin")
    elif where != "ours":
        trained.save_pretrained(folder, max_shard_size="20KB" if where == "shards" else "1GB")  # type: ignore[operator]
    logits, tokens = plain_results(trained, kind, "fp32")
    found, texts = compute(transformer_model(kind), kind, checkpoint=str(folder))
    assert torch.equal(found, logits)
    assert torch.equal(texts, tokens)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_without_values_gets_them(ranks: int, tmp_path: Path) -> None:
    saved: Any = transformer_model("llama")
    saved.save_pretrained(tmp_path)
    logits, _ = plain_results(saved, "llama", "fp32")
    models = []
    for _ in range(ranks):
        with polyaccel.zero.Init():
            models.append(type(saved)(saved.config))

    def body(communicator: Communicator) -> torch.Tensor:
        keys = {"checkpoint": str(tmp_path), "tensor_parallel": {"tp_size": ranks}}
        return compute(models[communicator.rank], "llama", **keys)[0]

    for found in run_threads(ranks, body):
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    transformer_model("gpt2").save_pretrained(tmp_path / "gpt2")  # type: ignore[operator]
    with pytest.raises(CheckpointError) as caught:
        polyaccel.init_inference(transformer_model("llama"), checkpoint=str(tmp_path / "gpt2"))
    missing: Any = caught.value.value
    assert "model.norm.weight" in missing
    wider = transformer_model("gpt2", n_positions=64)
    with pytest.raises(CheckpointError) as caught:
        polyaccel.init_inference(wider, checkpoint=str(tmp_path / "gpt2"))
    assert caught.value.value == "transformer.wpe.weight"
    (tmp_path / "empty").mkdir()
    for absent in ("empty", "nowhere"):
        with pytest.raises(CheckpointError):
            polyaccel.init_inference(wider, checkpoint=str(tmp_path / absent))


@pytest.mark.parametrize(
    ("config", "named", "key"),
    [
        ({"dtipe": "bf16"}, {}, "dtipe"),
        (None, {"tensor_parallel": {"size": 2}}, "tensor_parallel.size"),
        ({"dtype": "int3"}, {}, "dtype"),
        ({"dtype": "bf16"}, {"dtype": "fp16"}, "dtype"),
        ({}, {"max_out_tokens": 0}, "max_out_tokens"),
    ],
)
def test_wrong_keys_are_refused(config: Any, named: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        polyaccel.init_inference(nn.Linear(2, 2), config, **named)
    assert [problem.key for problem in caught.value.problems] == [key]


def test_an_engine_trains_nothing_and_bounds_tokens(caplog: pytest.LogCaptureFixture) -> None:
    model = transformer_model("gpt2")
    with caplog.at_level("INFO"):
        engine = polyaccel.init_inference(model, {"max_out_tokens": 8}, replace_with_kernel_inject=True)
    assert [one for one in caplog.records if "replace_with_kernel_inject" in one.message]
    assert isinstance(engine, polyaccel.InferenceEngine)
    assert engine.module is model
    for refused in (engine.train, engine.step, lambda: engine.backward(torch.ones(()))):
        with pytest.raises(PolyaccelError):
            refused()
    assert engine.eval() is engine
    assert engine.generate(prompt_of("gpt2"), max_new_tokens=3).shape[1] == 8
    with pytest.raises(PolyaccelError) as caught:
        engine.generate(prompt_of("gpt2"), max_new_tokens=4)
    assert caught.value.value == 9
    with pytest.raises(PolyaccelError):
        polyaccel.init_inference(lambda x: x)  # type: ignore[arg-type]  # JAX has no such engine
