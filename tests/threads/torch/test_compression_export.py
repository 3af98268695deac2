"""Compressed models made plain again: smaller, without polyaccel, and with the same outputs."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pytest
import torch
from parity_models import drawn_from, make_config, on_threads
from torch import Tensor, nn

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.torch.compression.layers import CompressedLayer

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 64, "hidden_size": 32, "max_position_embeddings": 16}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(layers: int = 2, seed: int = 0) -> Any:
    sizes = {**SIZES, "num_hidden_layers": layers}
    config = transformers.BertConfig(**sizes, **DROPOUT, num_attention_heads=4, intermediate_size=64)
    with drawn_from(seed):
        return transformers.BertForMaskedLM(config)


def section(method: str) -> dict[str, Any]:
    """As DeepSpeed's examples for BERT write it, with other numbers."""
    shared = {"enabled": True, "schedule_offset": 1, "method": method}
    return {
        "weight_quantization": {
            "shared_parameters": {
                "enabled": True,
                "quantizer_kernel": False,
                "schedule_offset": 0,
                "quantize_groups": 8,
                "quantize_verbose": False,
                "quantization_type": "symmetric",
                "quantize_weight_in_forward": True,
                "rounding": "nearest",
                "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.1},
            },
            "different_groups": {
                "wq1": {
                    "params": {"start_bits": 8, "target_bits": 8, "quantization_period": 0},
                    "modules": ["attention.self", "attention.output.dense", "intermediate", "layer.\\w+.output.dense"],
                }
            },
        },
        "row_pruning": {
            "shared_parameters": shared,
            "different_groups": {
                "rp1": {
                    "params": {"dense_ratio": 0.5},
                    "modules": ["intermediate.dense"],
                    "related_modules": [["layer.\\w+.output.dense"]],
                }
            },
        },
        "head_pruning": {
            "shared_parameters": {**shared, "num_heads": 4},
            "different_groups": {
                "hp1": {
                    "params": {"dense_ratio": 0.5},
                    "modules": ["attention.output.dense"],
                    "related_modules": [["self.query", "self.key", "self.value"]],
                }
            },
        },
    }


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


def nbytes(model: nn.Module) -> int:
    buffer = BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.tell()


@pytest.mark.parametrize(("method", "stage"), [("l1", 3), ("topk", 2)])
def test_a_pruned_transformer_runs_in_plain_transformers(method: str, stage: int) -> None:
    config = make_config(stage, compression_training=section(method))

    def run(communicator: Any, model: Any) -> Any:
        engine = polyaccel.initialize(model=model, config=config)[0]
        for step in range(3):
            batch = tokens(step, communicator.rank)
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        with torch.no_grad():
            trained = engine.eval()(input_ids=tokens(9, 0)).logits
        engine.destroy()
        polyaccel.redundancy_clean(model, config)
        return trained, model

    trained, model = on_threads(2, run, bert)[0]
    assert not any(isinstance(part, CompressedLayer) for part in model.modules())
    assert not [name for name in model.state_dict() if "mask" in name or "scores" in name]
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(input_ids=tokens(9, 0)).logits, trained, rtol=1e-5, atol=1e-5)
    layer = model.bert.encoder.layer[0]
    assert layer.intermediate.dense.weight.shape == (32, 32)
    assert layer.attention.self.query.weight.shape == (16, 32)
    assert layer.attention.output.dense.weight.shape == (32, 16)
    blocks = sum(one.numel() for one in model.bert.encoder.parameters())
    assert blocks < 0.52 * sum(one.numel() for one in bert().bert.encoder.parameters())
    assert nbytes(model) < 0.75 * nbytes(bert())  # embeddings and heads of words stay whole


def test_a_smaller_config_loads_pruned_rows(tmp_path: Any) -> None:
    rows = {"row_pruning": section("l1")["row_pruning"]}
    rows["row_pruning"]["shared_parameters"]["schedule_offset"] = 0
    model = bert()
    config = make_config(0, compression_training=rows)
    engine = polyaccel.initialize(model=model, config=config)[0]
    batch = tokens(0, 0)
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()
    engine.destroy()
    polyaccel.redundancy_clean(model, config)
    model.config.intermediate_size = 32
    model.save_pretrained(tmp_path / "small")
    bert().save_pretrained(tmp_path / "large")
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "small")
    gone = 2 * 4 * (64 - 32) * (2 * 32 + 1)  # rows, their biases and inputs of two layers, in float32
    small, large = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("small", "large"))
    assert large - small == pytest.approx(gone, abs=64)  # headers have other digits
    with torch.no_grad():
        wanted = model.eval()(input_ids=batch).logits
        torch.testing.assert_close(loaded.eval()(input_ids=batch).logits, wanted)


class Convolutions(nn.Module):
    """Two convolutions with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.norm(self.first(x)))  # which is not 0 at 0
        return self.head(self.second(hidden).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["l1", "topk"])
@pytest.mark.parametrize("stage", [0, 3])
def test_channels_go_with_their_norm_and_the_next_convolution(method: str, stage: int) -> None:
    pruning = {
        "channel_pruning": {
            "shared_parameters": {"enabled": True, "schedule_offset": 1, "method": method},
            "different_groups": {
                "c": {
                    "params": {"dense_ratio": 0.25},
                    "modules": ["first"],
                    "related_modules": [["norm", "second"]],
                }
            },
        }
    }
    config = make_config(stage, compression_training=pruning)
    with drawn_from(0):
        model: Any = Convolutions()
    engine = polyaccel.initialize(model=model, config=config)[0]
    x = torch.randn(4, 3, 8, 8)
    for _ in range(3):
        engine.backward(engine(x).square().mean())
        engine.step()
    with torch.no_grad():
        trained = engine.eval()(x)
    engine.destroy()
    polyaccel.redundancy_clean(model, config)
    assert model.first.weight.shape == (2, 3, 3, 3)
    assert model.second.weight.shape == (4, 2, 3, 3)
    assert model.norm.running_mean.shape == (2,)
    assert (model.first.out_channels, model.norm.num_features, model.second.in_channels) == (2, 2, 2)
    torch.testing.assert_close(model.eval()(x), trained, rtol=1e-5, atol=1e-6)
    plain: Any = Convolutions()
    plain.first, plain.norm, plain.second = nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 4, 3)
    plain.load_state_dict(model.state_dict())


def gpt2() -> Any:
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with drawn_from(0):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout))


def test_four_bits_leave_sixteen_levels_a_group_of_gpt2() -> None:
    """DeepSpeed's example W4or8A8 for GPT-2, whose linear layers are transformers' Conv1D."""
    bits = {
        "wq1": {"params": {"start_bits": 4, "target_bits": 4, "quantization_period": 0}, "modules": ["mlp.c_fc"]},
        "wq2": {"params": {"start_bits": 8, "target_bits": 8, "quantization_period": 0}, "modules": ["attn.c_attn"]},
    }
    config = make_config(
        2,
        compression_training={
            "weight_quantization": {
                "shared_parameters": {"enabled": True, "quantize_groups": 64},
                "different_groups": bits,
            },
            "activation_quantization": {
                "shared_parameters": {"enabled": True, "range_calibration": "dynamic", "schedule_offset": 0},
                "different_groups": {"aq1": {"params": {"bits": 8}, "modules": ["attn.c_attn", "mlp.c_fc"]}},
            },
        },
    )
    model = gpt2()
    engine = polyaccel.initialize(model=model, config=config)[0]
    batch = tokens(0, 0)
    for _ in range(2):
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    engine.destroy()
    polyaccel.redundancy_clean(model, config)
    for part, most in ((model.transformer.h[0].mlp.c_fc, 16), (model.transformer.h[0].attn.c_attn, 256)):
        assert type(part).__name__ == "Conv1D"
        groups = part.weight.detach().reshape(64, -1)
        assert max(len(group.unique()) for group in groups) <= most


REDUCTION = {
    "layer_reduction": {
        "enabled": True,
        "keep_number_layer": 2,
        "module_name_prefix": "bert.encoder.layer",
        "teacher_layer": [1, 3],
        "other_module_name": ["bert.embeddings", "cls"],
    }
}


def teacher() -> Any:
    return bert(layers=4, seed=1)


@pytest.mark.parametrize("how", ["plain", "init_compression", "sharded teacher"])
def test_a_student_begins_with_its_teachers_layers(how: str) -> None:
    config = make_config(3, compression_training=REDUCTION)

    def run(communicator: Any, student: Any) -> Any:
        of_teacher = teacher()
        if how == "init_compression":
            return polyaccel.init_compression(student, config, teacher_model=of_teacher)
        engine = polyaccel.initialize(model=of_teacher, config=make_config(3))[0] if "sharded" in how else None
        polyaccel.student_initialization(student, of_teacher, config)
        if engine is not None:
            engine.destroy()
        return student

    wanted: Any = teacher()
    for student in on_threads(2, run, bert):
        for mine, theirs in ((0, 1), (1, 3)):
            pairs = zip(
                student.bert.encoder.layer[mine].parameters(),
                wanted.bert.encoder.layer[theirs].parameters(),
                strict=True,
            )
            assert all(torch.equal(one, other) for one, other in pairs)
        assert torch.equal(
            student.bert.embeddings.word_embeddings.weight, wanted.bert.embeddings.word_embeddings.weight
        )


def test_what_cannot_be_done_is_said() -> None:
    config = make_config(0, compression_training=section("l1"))
    with pytest.raises(PolyaccelError):
        polyaccel.redundancy_clean(bert(), config)
    with pytest.raises(PolyaccelError):
        polyaccel.student_initialization(bert(), teacher(), config)
    model = bert()
    polyaccel.initialize(model=model, config=config)
    with pytest.raises(PolyaccelError):
        polyaccel.redundancy_clean(model, config)
    with pytest.raises(PolyaccelError):
        polyaccel.init_compression(bert(), make_config(0, compression_training=REDUCTION))
    other = {"layer_reduction": {**REDUCTION["layer_reduction"], "teacher_layer": [1, 9]}}
    with pytest.raises(PolyaccelError) as caught:
        polyaccel.student_initialization(bert(), teacher(), make_config(0, compression_training=other))
    assert caught.value.value == "bert.encoder.layer.9"
