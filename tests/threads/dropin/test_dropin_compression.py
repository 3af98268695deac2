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

from polyaccel.config import load_config
from polyaccel.engine.policies.compression import compression_policy_of
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


@pytest.mark.parametrize(
    "name", ["ds_config_W48A8_Qgroup48_lkd_fp32", "ds_config_W1A8_Qgroup1_fp32", "ds_config_layer_reduction_fp16"]
)
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


FILLED = {
    "BATCH_SIZE_PER_GPU": "32",
    "FP16_ENABLE": "false",
    "QuantW_FORWARD": "true",
    "Q_GROUP": "64",
    "W_BIT1": "4",
    "W_BIT2": "2",
    "A_BIT1": "8",
    "A_BIT2": "4",
    "S_DENSE_RATIO": "0.6",
    "R_DENSE_RATIO": "0.6",
    "H_DENSE_RATIO": "0.6",
    "SPARSE_PRUNING_OFFSET": "1000",
    "SPARSE_PRUNING_OFFSET_END": "51000",
    "SPARSE_PRUNING_OFFSET_STRIDE": "1000",
    "SPARSE_PRUNING_BLOCK_PATTERN": '"4x1"',
    "SPARSE_PRUNING_EXCLUDED_MODULES": '["classifier", "pooler"]',
}
"""What the examples' scripts put into their templates, apart from what is on."""
SWITCHES = ("LAYER_REDUCTION", "WEIGHT_QUANT", "ACTIVATION_QUANT", "SPARSE_PRUNING", "ROW_PRUNING", "HEAD_PRUNING")


def filled(template: str, switch: str, **values: str) -> dict[str, Any]:
    text = (EXAMPLES / f"{template}.template").read_text(encoding="utf-8")
    given = {**FILLED, **{f"{one}_ENABLE": str(one == switch).lower() for one in SWITCHES}, **values}
    for name in sorted(given, key=len, reverse=True):
        text = text.replace(name, given[name])
    config: dict[str, Any] = json.loads(text)
    return {**config, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "train_batch_size": 4}


TEMPLATES = [("ds_config", one) for one in SWITCHES[1:]] + [("ds_config_structural_pruning", "SPARSE_PRUNING")]


@pytest.mark.parametrize(("template", "switch"), TEMPLATES)
def test_templates_as_their_scripts_fill_them(template: str, switch: str) -> None:
    """With the scripts' steps in thousands, so that what has an offset has not begun; one has, by another offset."""
    steps = {"SPARSE_PRUNING_OFFSET": "1", "SPARSE_PRUNING_OFFSET_END": "3", "SPARSE_PRUNING_OFFSET_STRIDE": "1"}
    config = filled(template, switch, **(steps if "structural" in template else {}))
    model = init_compression(bert(2), config)
    losses = train(model, config, labels=torch.tensor([0, 1, 0, 1]))
    assert losses[-1] < losses[0]
    redundancy_clean(model, config)
    if "structural" in template:
        weights = [one.dense.weight for one in model.bert.encoder.modules() if hasattr(one, "dense")]
        assert any((weight == 0).any() for weight in weights)


class Block(torch.nn.Module):
    """A block of a residual net, as torchvision names its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.conv2, self.bn2 = torch.nn.Conv2d(8, 4, 3, padding=1), torch.nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.layer1 = torch.nn.Conv2d(3, 4, 3), torch.nn.Sequential(Block(), Block())
        self.fc = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(self.layer1(self.conv1(x)).mean((2, 3)))


def test_channels_of_a_net_and_its_engine_is_cleaned() -> None:
    """As the example's script does, which gives the engine."""
    config = example("ds_config_channel_prune") | {"train_micro_batch_size_per_gpu": 4}
    engine, *_ = deepspeed.initialize(model=init_compression(Net(), config), config=config)
    x = torch.randn(4, 3, 8, 8).half()
    for _ in range(2):
        engine.backward(engine(x).float().square().mean())
        engine.step()
    wanted = engine.eval()(x)
    model = redundancy_clean(engine, config)
    assert model.layer1[0].conv1.weight.shape == (4, 4, 3, 3)
    torch.testing.assert_close(model(x), wanted, rtol=1e-2, atol=1e-2)


def test_techniques_that_are_off_are_dropped_and_others_refused_by_value() -> None:
    pruning = {"shared_parameters": {"enabled": False, "method": "magnitude", "block_pattern": "4x1"}}
    tree, changes = normalise({"gradient_clipping": 0.0, "compression_training": {"sparse_pruning": pruning}})
    assert tree["compression_training"] == {}
    assert [change.key for change in changes] == ["compression_training.sparse_pruning"]
    model, config = bert(1), {"train_batch_size": 4, "compression_training": {"sparse_pruning": pruning}}
    assert redundancy_clean(model, config) is model
    pruning["shared_parameters"]["enabled"] = True
    with pytest.raises(ConfigError) as caught:
        deepspeed.initialize(model=model, config=config)
    assert [problem.key.rpartition(".")[2] for problem in caught.value.problems] == ["method"]


MOQ: dict[str, Any] = {
    "enabled": True,
    "quantize_verbose": True,
    "quantizer_kernel": True,
    "quantize-algo": {"q_type": "symmetric"},
    "quantize_bits": {"start_bits": 8, "target_bits": 3},
    "quantize_schedule": {"quantize_period": 2, "schedule_offset": 1},
    "quantize_groups": 8,
    "fp16_mixed_quantize": {"enabled": False},
    "eigenvalue": {"enabled": False, "verbose": True, "max_iter": 50},
    "quantize_eigenvalue": False,
}
"""As DeepSpeed's tutorial of MoQ writes it, with fewer steps."""


def test_moq_loses_bits_after_periods_that_double() -> None:
    """Next to the counter of DeepSpeed's Quantizer: a bit less and twice the period, when the steps reach it."""
    tree, changes = normalise({"train_batch_size": 4, "quantize_training": MOQ})
    assert "quantize_training" in [change.key for change in changes]
    rule = compression_policy_of(load_config(tree)).weights[0]
    bits, period, wanted = 8, 2, [0]
    for steps in range(40):
        if bits != 3 and steps >= period:
            period, bits = 2 * period, bits - 1
        wanted.append(bits)
    assert [rule.bits_at(step) for step in range(41)] == wanted
    assert (rule.groups, rule.is_symmetric, rule.modules) == (8, True, ("*",))
    losses = train(gpt2(), {"train_batch_size": 4, "optimizer": {"type": "Adam"}, "quantize_training": MOQ})
    assert losses[0] != losses[-1]


def test_moq_follows_eigenvalues() -> None:
    """As its tutorial writes them: blocks lose bits at their own times, behind one bit that all lose at once."""
    eigenvalue = {"enabled": True, "verbose": True, "max_iter": 50, "tol": 1e-2, "stability": 0, "layer_num": 2}
    section = {**MOQ, "eigenvalue": {**eigenvalue, "gas_boundary_resolution": 1, "layer_name": "transformer.h"}}
    tree, changes = normalise({"train_batch_size": 4, "quantize_training": section})
    assert "quantize_training.eigenvalue" in [change.key for change in changes]
    curvature = compression_policy_of(load_config(tree)).curvature
    assert curvature is not None
    assert (curvature.blocks, curvature.count, curvature.iterations) == ("transformer.h", 2, 50)
    losses = train(gpt2(), {"train_batch_size": 4, "optimizer": {"type": "Adam"}, "quantize_training": section})
    assert losses[0] != losses[-1]


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"quantize_eigenvalue": True}, "eigenvalue.layer_name"),  # DeepSpeed's default is of BERT
        ({"eigenvalue": {"enabled": True, "layer_name": "transformer.h"}}, "eigenvalue.layer_num"),
        ({"quantize_bits": {"start_bits": 3, "target_bits": 8}}, "params"),
        ({"quantise_groups": 8}, "quantise_groups"),
        ({"enabled": "perhaps"}, "shared_parameters.enabled"),  # it was read as off
    ],
)
def test_what_moq_cannot_be_is_named(changed: dict[str, Any], key: str) -> None:
    config = {"train_batch_size": 4, "quantize_training": {**MOQ, **changed}}
    with pytest.raises(ConfigError) as caught:
        deepspeed.initialize(model=gpt2(), config=config)
    assert any(problem.key.endswith(key) for problem in caught.value.problems), caught.value
    off = normalise({"quantize_training": {**MOQ, **changed, "enabled": False}})[0]
    assert "quantize_training" not in off
    assert not off.get("compression_training")
    assert not off.get("eigenvalue")
