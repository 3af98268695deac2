"""Weights that bitsandbytes and torchao have quantised, under engines and in plain torch (`make test-quantized`)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from parity_models import assert_bitwise, make_config, on_threads
from torch import nn

import polyaccel
from polyaccel.errors import PolyaccelError

bnb = pytest.importorskip("bitsandbytes", reason="make test-quantized has it")
torchao = pytest.importorskip("torchao", reason="make test-quantized has it")
peft = pytest.importorskip("peft")
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_  # noqa: E402 - as above
from transformer_models import transformer_batch, transformer_model  # noqa: E402 - imports transformers

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # PEFT's own
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was:UserWarning"),  # it cannot merge, and nothing does
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),  # each call reports that it rounds to float16
]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
STEPS = 3


def four_bits(layer: nn.Linear, nested: bool) -> nn.Module:
    return bnb.nn.Linear4bit(  # type: ignore[no-any-return]
        *(layer.in_features, layer.out_features, False),
        quant_type="nf4",
        compute_dtype=torch.float32,
        compress_statistics=nested,
    )


def eight_bits(layer: nn.Linear) -> nn.Module:
    return bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, False, has_fp16_weights=False)  # type: ignore[no-any-return]


MAKERS = {
    "4 bits": partial(four_bits, nested=False),
    "4 bits, nested": partial(four_bits, nested=True),
    "8 bits": eight_bits,
}
CONFIGS = {
    "torchao int8": Int8WeightOnlyConfig,
    "torchao int4": partial(IntxWeightOnlyConfig, weight_dtype=torch.int4),
}


def build(how: str, dora: bool = False) -> nn.Module:
    model = transformer_model("llama", **SIZES)
    if how in CONFIGS:
        quantize_(model.model, CONFIGS[how]())
    else:
        for name, layer in list(model.model.named_modules()):
            if type(layer) is nn.Linear:
                made = MAKERS[how](layer)
                made.load_state_dict({"weight": layer.weight.data})
                parent, _, leaf = name.rpartition(".")
                setattr(model.model.get_submodule(parent), leaf, made.to("cpu"))
    torch.manual_seed(3)
    lora = peft.LoraConfig(r=2, init_lora_weights=False, use_dora=dora, target_modules=["q_proj", "down_proj"])
    return peft.get_peft_model(model, lora)  # type: ignore[no-any-return]


def plain_losses(model: nn.Module, world: int) -> list[float]:
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    found = []
    for step in range(STEPS):
        losses = [model(**transformer_batch("llama", seed=10 * step + rank)).loss for rank in range(world)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        found.append(losses[0].item())
    return found


def train(communicator, model, stage, folder=None, zero=None, **keys):
    small = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 0} if stage else {}
    config = make_config(stage, zero={**small, **(zero or {})}, **keys)
    engine = polyaccel.initialize(model=model, config=config)[0]
    losses = []
    for step in range(STEPS):
        loss = engine(**transformer_batch("llama", seed=10 * step + communicator.rank)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if folder is not None:
        engine.save_checkpoint(str(folder))
    prompt = transformer_batch("llama", seed=1, length=4)["input_ids"]
    asked = {"input_ids": prompt, "max_new_tokens": 4, "do_sample": False}
    tokens = engine.generate(**asked)
    engine.destroy()
    with torch.no_grad():  # the model is as it was, with trained adapters
        left = model.eval()(prompt).logits
    return losses, tokens, left


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", [*MAKERS, *CONFIGS])
def test_training_is_that_of_plain_torch(how: str, world: int) -> None:
    wanted = plain_losses(build(how), world)
    first = None
    for stage in (0, 2, 3):
        found = on_threads(world, partial(train, stage=stage), partial(build, how))[0]
        assert found[0] == pytest.approx(wanted, rel=1e-5)
        first = found if first is None else first
        assert found[0] == first[0]
        assert torch.equal(found[1], first[1])
        torch.testing.assert_close(found[2], first[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["4 bits, nested", "8 bits", "torchao int8"])
def test_in_bf16_with_offload_and_recomputation(how: str) -> None:
    run = partial(train, bf16={"enabled": True})
    wanted = on_threads(2, partial(run, stage=0), partial(build, how))[0]
    for zero, keys in (
        ({"offload_param": {"device": "cpu"}}, {}),
        ({}, {"activation_checkpointing": {"enabled": True}}),
        ({}, {"hybrid_engine": {"enabled": True, "pin_parameters": False}}),
    ):
        found = on_threads(2, partial(run, stage=3, zero=zero, **keys), partial(build, how))[0]
        assert found[0] == wanted[0]
        assert torch.equal(found[1], wanted[1])


def test_what_cannot_be_trained_over_is_refused() -> None:
    """A layer in 8 bits whose codes are not there yet, and one that rounds a trained weight, at stage 3."""
    for layer, stage in ((bnb.nn.Linear8bitLt(4, 3, has_fp16_weights=False), 2), (bnb.nn.Linear8bitLt(4, 3), 3)):
        model = nn.Sequential(nn.Linear(4, 4), layer)
        with pytest.raises(PolyaccelError) as caught:
            on_threads(
                1,
                lambda _, one, at=stage: polyaccel.initialize(model=one, config=make_config(at)),
                lambda one=model: one,
            )
        assert caught.value.value == "1"


def test_a_layer_in_eight_bits_is_as_it_was_after_an_engine() -> None:
    """Its own forward computes from codes again, and its state dict has codes and scales at all times."""
    layer = eight_bits(nn.Linear(8, 6)).to("cpu")
    model = nn.Sequential(nn.Linear(8, 8), layer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert "1.SCB" in before
    engine = polyaccel.initialize(model=model, config=make_config(3))[0]
    engine(torch.ones(2, 8))
    engine.destroy()
    assert_bitwise(dict(model.state_dict()), before)
    assert "forward" not in layer.__dict__
    x = torch.ones(2, 8)
    scales = before["1.SCB"].unsqueeze(1) / 127
    torch.testing.assert_close(layer.train()(x), x @ (before["1.weight"].float() * scales).T, rtol=1e-5, atol=1e-6)


def test_codes_of_the_parameter_are_those_of_bitsandbytes() -> None:
    """NF4 has the same codes and scales there, where a row is whole groups."""
    weight = torch.randn(6, 128)
    layer = nn.Linear(128, 6, bias=False)
    layer.weight.data.copy_(weight)
    model = nn.Sequential(layer)
    polyaccel.quantize_frozen(model, "nf4", group_size=64)
    codes, state = bnb.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    found = dict(model.named_parameters())
    assert torch.equal(found["0.weight_nf4_64"].flatten(), codes.flatten())
    assert torch.equal(found["0.weight_scales"].view(torch.float32).flatten(), state.absmax.flatten())
    assert_bitwise({"": layer.weight.data}, {"": bnb.functional.dequantize_4bit(codes, state)})
