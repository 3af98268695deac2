"""Compressed models of other shapes: tied weights, gated layers, torch's transformers, loaded states, odd inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from parity_models import drawn_from, make_config
from torch import Tensor, nn

import polyaccel
from polyaccel.errors import ConfigError

transformers = pytest.importorskip("transformers")
Section = dict[str, Any]


def bits(start: int, target: int, modules: list[str], **shared: Any) -> Section:
    params = {"start_bits": start, "target_bits": target, "quantization_period": 1}
    groups = {"a": {"params": params, "modules": modules}}
    return {"weight_quantization": {"shared_parameters": {"enabled": True, **shared}, "different_groups": groups}}


def pruning(kind: str, modules: list[str], related: list[list[str]] | None = None, **shared: Any) -> Section:
    group = {"params": {"dense_ratio": 0.5}, "modules": modules, "related_modules": related}
    shared = {"enabled": True, "method": "l1", "schedule_offset": 0, **shared}
    return {f"{kind}_pruning": {"shared_parameters": shared, "different_groups": {"a": group}}}


def trained(model: Any, section: Section, stage: int, *inputs: Any, **named: Any) -> Any:
    """The outputs of a model after two steps, and those of its export."""
    config = make_config(stage, compression_training=section)
    engine = polyaccel.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(outputs(engine(*inputs, **named)).float().square().mean())
        engine.step()
    with torch.no_grad():
        wanted = outputs(engine.eval()(*inputs, **named)).clone()
        engine.destroy()
        polyaccel.redundancy_clean(model, config)
        return wanted, outputs(model.eval()(*inputs, **named))


def outputs(found: Any) -> Any:
    return found if isinstance(found, Tensor) else found.logits


def gpt2() -> Any:
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with drawn_from(0):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout))


def llama(keys: int) -> Any:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    with drawn_from(0):
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=keys)
        return transformers.LlamaForCausalLM(config)


TOKENS = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(0))
MIXED = {"fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.1}}
TIED: dict[str, tuple[Section, bool]] = {
    "the output layer alone": (bits(3, 3, ["lm_head"]), False),
    "its pruning": (pruning("sparse", ["lm_head"]), False),
    "both alike": (bits(3, 3, ["lm_head", "wte"]), True),
    "both, mixed with their own values": (bits(3, 3, ["lm_head", "wte"], **MIXED), True),
}


@pytest.mark.parametrize("name", TIED)
def test_a_tied_weight_is_exported_for_each_layer(name: str, tmp_path: Any) -> None:
    section, is_tied = TIED[name]
    model = gpt2()
    wanted, found = trained(model, section, 2, TOKENS)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert (model.lm_head.weight is model.transformer.wte.weight) == is_tied
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(TOKENS).logits, wanted, rtol=1e-6, atol=1e-6)


class Alike(nn.Module):
    """Two linear layers with one weight, each before one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.relu(self.c(self.b(torch.relu(self.a(x))))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("modules", "related", "is_tied"),
    [(["a"], [["b"]], False), (["^a$", "^c$"], [["b"], ["d"]], True)],
    ids=["one of both", "both"],
)
def test_tied_layers_are_cut_apart_or_alike(modules: list[str], related: list[list[str]], is_tied: bool) -> None:
    with drawn_from(0):
        model = Alike()
    wanted, found = trained(model, pruning("row", modules, related), 3, torch.randn(4, 8))
    torch.testing.assert_close(found, wanted)
    assert (model.c.weight is model.a.weight) == is_tied
    assert model.a.weight.shape == (8, 8)


def test_a_gated_layer_loses_the_rows_of_its_gate() -> None:
    model = llama(2)
    wanted, found = trained(model, pruning("row", ["gate_proj"], [["up_proj", "down_proj"]]), 3, TOKENS)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    layer = model.model.layers[0].mlp
    sizes = [tuple(one.weight.shape) for one in (layer.gate_proj, layer.up_proj, layer.down_proj)]
    assert sizes == [(12, 16), (12, 16), (16, 12)]


REFUSED: dict[str, tuple[Any, Section, str]] = {
    "both factors of a product": (llama, pruning("row", ["gate_proj", "up_proj"], [["down_proj"]] * 2), "down_proj"),
    "shared keys": (llama, pruning("head", ["o_proj"], [["q_proj"]], num_heads=4), "LlamaForCausalLM"),
    "attention of torch": (lambda _: nn.TransformerEncoderLayer(8, 2), bits(4, 4, ["*"]), "out_proj"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_export_has_is_refused(name: str) -> None:
    make, section, value = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        polyaccel.initialize(model=make(2), config=make_config(0, compression_training=section))
    assert any(str(problem.value).endswith(value) for problem in caught.value.problems)


def test_a_layer_is_pruned_once() -> None:
    """Where two expressions of a group find it; two groups that do are refused."""
    model: Any = nn.Sequential(nn.Linear(4, 4))
    section = pruning("sparse", ["0", "*"])
    polyaccel.init_compression(model, make_config(0, compression_training=section))
    assert [name for name, _ in model.named_buffers()] == ["0.sparse_mask"]
    section["sparse_pruning"]["different_groups"]["b"] = {"params": {"dense_ratio": 0.2}, "modules": ["0"]}
    with pytest.raises(ConfigError):
        polyaccel.init_compression(nn.Sequential(nn.Linear(4, 4)), make_config(0, compression_training=section))


def test_the_fused_inference_of_torch_is_not_taken() -> None:
    with drawn_from(0):
        model: Any = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 8)
    config = make_config(0, compression_training=bits(2, 2, ["linear"]))
    polyaccel.init_compression(model, config).eval()
    with torch.no_grad():
        fused = model(x)
    torch.testing.assert_close(model(x), fused)  # with gradients torch never fuses
    polyaccel.redundancy_clean(model, config)
    assert not any(part._forward_pre_hooks for part in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(model(x), fused)


def pair() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_loaded_weights_are_exported_at_the_end_of_the_schedule() -> None:
    section = {**pruning("row", ["0"], [["2"]], schedule_offset=1), **bits(8, 3, ["2"], schedule_offset=1)}
    config = make_config(0, compression_training=section)
    model, x = pair(), torch.randn(4, 8)
    engine = polyaccel.initialize(model=model, config=config)[0]
    for _ in range(8):
        engine.backward(engine(x).square().mean())
        engine.step()
    wanted = engine.eval()(x).detach().clone()
    engine.destroy()
    other = polyaccel.init_compression(pair(), config)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    polyaccel.redundancy_clean(other, config)
    assert other[0].weight.shape == (8, 8)
    torch.testing.assert_close(other(x), wanted)


def test_pruning_begins_where_the_script_calls_the_model() -> None:
    model, x = pair(), torch.randn(4, 8)
    config = make_config(2, compression_training=pruning("sparse", ["*"], schedule_offset=1))
    engine = polyaccel.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(engine.module(x).square().mean())
        engine.step()
    assert all(mask.float().mean() == 0.5 for mask in model.buffers())


def static(bits: int) -> Section:
    shared = {"enabled": True, "schedule_offset": 0, "range_calibration": "static"}
    groups = {"a": {"params": {"bits": bits}, "modules": ["*"]}}
    return {"activation_quantization": {"shared_parameters": shared, "different_groups": groups}}


def test_inputs_by_name_are_quantised() -> None:
    layer, x = nn.Linear(8, 4), torch.randn(2, 8)
    polyaccel.init_compression(nn.Sequential(layer), make_config(0, compression_training=static(2)))
    assert torch.equal(layer(x), layer(input=x))
    assert not torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_an_overflow_does_not_spoil_a_range() -> None:
    model, x = pair(), torch.randn(4, 8)
    engine = polyaccel.initialize(model=model, config=make_config(0, compression_training=static(8)))[0]
    for inputs in (x, torch.full_like(x, torch.inf)):
        engine(inputs)
        engine.backward(engine(x).square().mean())
        engine.step()
    assert torch.equal(model[0].input_range, torch.stack([x.min(), x.max()]))
    assert engine(x).isfinite().all()
