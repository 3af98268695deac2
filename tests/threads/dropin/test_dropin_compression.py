"""DeepSpeed's examples of compression, as of 0.19.5: their sections run as they are, through DeepSpeed's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.compression.compress import init_compression, redundancy_clean, student_initialization
from deepspeed.compression.helper import convert_conv1d_to_linear
from parity_models import drawn_from
from polyaccel_deepspeed.config import normalise

from polyaccel.errors import ConfigError

transformers = pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parent / "compression_configs"
SIZES = {"vocab_size": 64, "hidden_size": 48, "max_position_embeddings": 16, "num_labels": 2}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(layers: int) -> Any:
    sizes = {**SIZES, "num_hidden_layers": layers, "num_attention_heads": 12, "intermediate_size": 96}
    with drawn_from(layers):
        return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **DROPOUT))


def gpt2() -> Any:
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    with drawn_from(0):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def example(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((EXAMPLES / f"{name}.json").read_text(encoding="utf-8"))
    return {**config, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "train_batch_size": 4}


def train(model: Any, config: dict[str, Any], **labels: Any) -> list[float]:
    config.pop("train_micro_batch_size_per_gpu", None)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(4):
        loss = engine(input_ids=tokens, **(labels or {"labels": tokens})).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def test_gpt2_in_4_or_8_bits() -> None:
    config = example("ds_config_W4or8A8_Qgroup64_fp32")
    model = init_compression(convert_conv1d_to_linear(gpt2(), transformers.pytorch_utils.Conv1D), config)
    losses = train(model, config)
    assert losses[-1] < losses[0]
    redundancy_clean(model, config)
    assert {type(part) for part in model.modules() if "c_fc" in type(part).__name__} <= {torch.nn.Linear}
    weight = model.transformer.h[0].mlp.c_fc.weight.detach().reshape(64, -1)
    assert max(len(group.unique()) for group in weight) <= 16


@pytest.mark.parametrize("name", ["ds_config_W48A8_Qgroup48_lkd_fp32", "ds_config_layer_reduction_fp16"])
def test_bert(name: str) -> None:
    config = example(name)
    student, teacher = bert(6), bert(12)
    labels = torch.tensor([0, 1, 0, 1])
    if config["compression_training"]["layer_reduction"]["enabled"]:
        student = student_initialization(student, teacher, config)
        kept = student.bert.encoder.layer[1].output.dense.weight
        assert torch.equal(kept, teacher.bert.encoder.layer[3].output.dense.weight)
    else:
        student = init_compression(student, config)
    losses = train(student, config, labels=labels)
    assert losses[-1] < losses[0]


def test_techniques_that_are_off_are_dropped_and_others_refused_by_value() -> None:
    pruning = {"shared_parameters": {"enabled": False, "method": "snip_momentum", "block_pattern": "4x1"}}
    tree, changes = normalise({"gradient_clipping": 0.0, "compression_training": {"sparse_pruning": pruning}})
    assert tree["compression_training"] == {}
    assert [change.key for change in changes] == ["compression_training.sparse_pruning"]
    pruning["shared_parameters"]["enabled"] = True
    with pytest.raises(ConfigError) as caught:
        deepspeed.initialize(
            model=bert(1), config={"train_batch_size": 4, "compression_training": {"sparse_pruning": pruning}}
        )
    keys = {problem.key.rpartition(".")[2] for problem in caught.value.problems}
    assert keys == {"method", "block_pattern"}
