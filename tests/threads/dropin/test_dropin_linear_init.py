"""`deepspeed.linear.Init`: models of scripts and of transformers, next to PEFT and `polyaccel.quantize_frozen`."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.linear import Init, LoRAConfig, QuantizationConfig, init_lora
from deepspeed.linear.optimized_linear import LoRAOptimizedLinear
from deepspeed.linear.quantization import QuantizedLinear
from parity_models import make_config
from torch import nn

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.errors import PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
SIZES = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
LORA = LoRAConfig(lora_r=2, lora_alpha=6.0, target_mods=["q_proj", "down_proj"])
PLAIN = nn.Linear


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2, whose query layer has a bias."""
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("qwen2")
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, **HEADS))
    for name, one in model.named_parameters():
        if name.endswith("q_proj.bias"):
            nn.init.normal_(one)
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path, quantization: QuantizationConfig | None) -> Any:
    with Init(lora_config=LORA, quant_config=quantization):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert nn.Linear is PLAIN
    return model


def twin(folder: Path, bits: int | None, model: Any) -> Any:
    """The same by PEFT, over weights that polyaccel quantised, with the adapters of `model`."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if bits is not None:
        others = [name for name, one in base.named_modules() if type(one) is nn.Linear and not is_named(name)]
        polyaccel.quantize_frozen(base, {4: "nf4", 8: "int8"}[bits], group_size=8, skip=others)
    made = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=6.0, target_modules=LORA.target_mods))
    with torch.no_grad():
        for name, one in model.named_modules():
            if isinstance(one, LoRAOptimizedLinear):
                layer = made.base_model.model.get_submodule(name)
                layer.lora_A["default"].weight.copy_(one.lora_weight_1.weight)
                layer.lora_B["default"].weight.copy_(one.lora_weight_2.weight)
    return made


def is_named(name: str) -> bool:
    return any(target in name for target in LORA.target_mods)


def losses_of(model: Any, stage: int) -> list[float]:
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(communicator: Communicator) -> list[float]:
        zero = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 0} if stage else {}
        config = make_config(stage, zero=zero, gradient_clipping=0.0)
        engine = deepspeed.initialize(model=models[communicator.rank], config=config)[0]
        found = []
        for step in range(3):
            drawn = torch.Generator().manual_seed(10 * step + communicator.rank)
            tokens = torch.randint(0, 48, (2, 6), generator=drawn)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        engine.destroy()
        return found

    return run_threads(2, body)[0]


@pytest.mark.parametrize(("stage", "bits"), [(3, None), (2, 8), (3, 4)])
def test_a_pretrained_model_trains_as_by_peft(saved: Path, stage: int, bits: int | None) -> None:
    model = loaded(saved, None if bits is None else QuantizationConfig(q_bits=bits, group_size=8))
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_weight_2" in name:
                nn.init.normal_(one, std=0.3)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert len(trained) == 2 * 2 * 2
    assert all("lora_weight" in name for name in trained)
    found = losses_of(model, stage)
    assert found == pytest.approx(losses_of(twin(saved, bits, model), 0), rel=1e-6)
    assert found[2] < found[0]


def test_layers_of_a_script_are_made_with_adapters() -> None:
    with Init(lora_config=LORA), pytest.raises(PolyaccelError):
        Init(lora_config=LORA).__enter__()
    with Init(lora_config=LORA):

        class Own(nn.Linear):
            """A subclass is itself."""

        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(in_features=3, out_features=2, bias=False), Own(2, 2))
        assert isinstance(PLAIN(2, 2), nn.Linear)
        assert issubclass(PLAIN, nn.Linear)
    assert nn.Linear is PLAIN
    assert [type(one) for one in model] == [LoRAOptimizedLinear, LoRAOptimizedLinear, Own]
    assert {one.dtype for one in model[:2].parameters()} == {torch.bfloat16}  # as there
    model.bfloat16()
    with pytest.raises(PolyaccelError):
        model(torch.ones(1, 4, dtype=torch.bfloat16))
    init_lora(model)
    assert model(torch.ones(1, 4, dtype=torch.bfloat16)).shape == (1, 2)
    with Init():
        assert type(nn.Linear(3, 2)) is PLAIN


def test_from_config_has_adapters_and_no_match_is_an_error() -> None:
    config = transformers.Qwen2Config(**SIZES, **HEADS)
    with Init(lora_config=LORA):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(isinstance(one, LoRAOptimizedLinear) for one in model.modules()) == 4
    with pytest.raises(PolyaccelError) as caught, Init(lora_config=LoRAConfig(target_mods=["nothing"])):
        transformers.AutoModelForCausalLM.from_config(config)
    assert caught.value.value == ["nothing"]
    assert nn.Linear is PLAIN


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_layer_without_adapters_computes_as_quantize_frozen(bits: int) -> None:
    settings = QuantizationConfig(q_bits=bits, group_size=4)
    with Init(quant_config=settings):
        layer: Any = nn.Linear(8, 3)
    assert isinstance(layer, QuantizedLinear)
    plain = nn.Linear(8, 3)
    layer.load_state_dict(plain.state_dict())
    model = nn.Sequential(plain)
    polyaccel.quantize_frozen(model, {4: "nf4", 8: "int8"}[bits], group_size=4)
    x = torch.randn(5, 8)
    assert torch.equal(layer(x), model(x))
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(copied, QuantizedLinear)
        assert torch.equal(copied(x), model(x))
