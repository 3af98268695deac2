"""Frozen weights in 4 and 8 bits under engines, next to the same model with these weights as plain parameters."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from pairwise import combinations
from parity_models import assert_bitwise, assert_close, make_config, on_threads

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.torch.quantized.layers import QuantizedLayer, QuantizedLinear

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from safetensors.torch import load_file  # noqa: E402 - comes with transformers
from transformer_models import transformer_batch, transformer_model  # noqa: E402 - imports transformers

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
TARGETS = {"gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "v_proj", "down_proj"]}
STEPS = 3


def build(kind="llama", *, dtype="nf4", double=False, dora=False, plain=False, last=False, deferred=False):
    """`plain`: with the rounded weights as parameters. `last`: quantised after the adapters have been added."""
    if deferred:
        with polyaccel.zero.Init():
            model = transformer_model(kind)
    else:
        model = transformer_model(kind)
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    of_kind = {"target_modules": TARGETS[kind], "fan_in_fan_out": kind == "gpt2", "use_dora": dora}
    quantise = partial(polyaccel.quantize_frozen, dtype=dtype, group_size=16, double_quant=double)
    if not last:
        quantise(model)
    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **of_kind))
    if last:
        quantise(model)
    if plain:
        polyaccel.dequantize_frozen(model)
    return model


def integers(model):
    return {name: one.clone() for name, one in model.state_dict().items() if not one.is_floating_point()}


def engine_of(model, stage, zero=None, **keys):
    small = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 0} if stage else {}
    return polyaccel.initialize(model=model, config=make_config(stage, zero={**small, **(zero or {})}, **keys))[0]


def train(communicator, model, kind, stage, zero=None, **keys):
    engine = engine_of(model, stage, zero, **keys)
    losses = []
    for step in range(STEPS):
        loss = engine(**transformer_batch(kind, seed=10 * step + communicator.rank)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    prompt = transformer_batch(kind, seed=1, length=4)["input_ids"]
    tokens = engine.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
    state = {name: one.clone() for name, one in engine.module_state_dict().items()}
    engine.destroy()
    return losses, tokens, state


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradients_are_those_of_the_rounded_weights(kind):
    """In plain torch; of the inputs, and of biases, which stay parameters of their layer."""
    for dtype, double in (("nf4", True), ("int4", False), ("int8", False)):
        model = transformer_model(kind).eval()
        names = polyaccel.quantize_frozen(model, dtype, group_size=16, double_quant=double)
        twin = copy.deepcopy(model)
        assert polyaccel.dequantize_frozen(twin) == names
        for one in (model, twin):
            one(**transformer_batch(kind)).loss.backward()
        wanted = {name: one.grad for name, one in twin.named_parameters() if one.requires_grad}
        found = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
        assert not any(name.removesuffix(".weight") in names for name in wanted)
        assert_bitwise(found, wanted)
        weight, plain = (one.get_submodule(names[0]).weight for one in (model, twin))
        assert torch.equal(weight, plain)
        assert (weight.shape, weight.dtype) == (plain.shape, plain.dtype)


@combinations(
    kind=["llama", "gpt2"],
    stage=[1, 2, 3],
    world=[1, 2, 3],
    dtype=["nf4", "int4", "int8"],
    double=[False, True],
    dora=[False, True],
    last=[False, True],
    deferred=[False, True],
    precision=["fp32", "bf16", "fp16", "autocast"],
)
def test_training_is_that_of_the_rounded_weights(kind, stage, world, dtype, double, dora, last, deferred, precision):
    keys = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "loss_scale": 8.0}},
        "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    }[precision]
    make = partial(build, kind, dtype=dtype, double=double, dora=dora, last=last)
    wanted = on_threads(world, partial(train, kind=kind, stage=0, **keys), partial(make, plain=True))[0]
    found = on_threads(world, partial(train, kind=kind, stage=stage, **keys), partial(make, deferred=deferred))[0]
    codes = integers(make())
    assert codes
    assert_bitwise({name: found[2][name] for name in codes}, codes)
    trained = {name: one for name, one in wanted[2].items() if "lora" in name}
    assert trained
    own = {name: found[2][name] for name in trained}
    if kind == "gpt2" and precision != "fp32":  # its Conv1D adds the bias before the product is rounded
        assert found[0] == pytest.approx(wanted[0], rel=1e-3)
        assert_close(own, trained, 2e-2)
        return
    assert found[0] == wanted[0]
    assert torch.equal(found[1], wanted[1])
    assert_bitwise(own, trained)


@pytest.mark.parametrize("how", ["cpu", "nvme", "zero++", "recomputed", "unit by unit"])
def test_codes_travel_as_they_are(how, tmp_path):
    """Through offload, quantised traffic (which rounds other parameters), recomputation and rollouts unit by unit."""
    zero = {
        "cpu": {"offload_param": {"device": "cpu"}},
        "nvme": {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}},
        "zero++": {"zero_quantized_weights": True, "zero_hpz_partition_size": 2},
    }.get(how, {})
    keys = {
        "recomputed": {"activation_checkpointing": {"enabled": True}},
        "unit by unit": {"hybrid_engine": {"enabled": True, "pin_parameters": False}},
    }.get(how, {})
    run = partial(train, kind="llama", stage=3, zero=zero, **keys)
    found = on_threads(2, run, build)[0]
    codes = integers(build())
    assert_bitwise({name: found[2][name] for name in codes}, codes)
    if how != "zero++":
        wanted = on_threads(2, partial(train, kind="llama", stage=0), partial(build, plain=True))[0]
        assert found[0] == wanted[0]
        assert torch.equal(found[1], wanted[1])


def test_a_rank_holds_its_part_of_the_bytes():
    """A quarter of fp32 at 8 bits and an eighth at 4, with the scales; at stage 3 half of that on each of two ranks."""

    def held(communicator, model, stage):
        engine = engine_of(model, stage)
        plans = [param.plan.params for param in engine.zero.params]
        found = sum(plan.numel * plan.dtype.itemsize for plan in plans if not plan.dtype.is_floating)
        engine.destroy()
        return found

    for dtype in ("nf4", "int8"):
        stored = sum(one.nbytes for one in integers(build(dtype=dtype)).values())
        whole, half = (on_threads(2, partial(held, stage=stage), partial(build, dtype=dtype))[0] for stage in (2, 3))
        assert stored <= whole <= 1.6 * stored  # parameters begin at multiples of 64 bytes
        assert 0.9 * whole <= 2 * half <= 1.1 * whole  # buckets of another number are padded


def test_checkpoints_hold_codes_and_load_on_other_ranks(tmp_path):
    def save(communicator, model):
        engine = engine_of(model, 3)
        loss = engine(**transformer_batch("llama", seed=communicator.rank)).loss
        engine.backward(loss)
        engine.step()
        engine.save_checkpoint(str(tmp_path / "all"))
        engine.save_checkpoint(str(tmp_path / "lean"), exclude_frozen_parameters=True)
        engine.save_16bit_model(str(tmp_path), "whole.safetensors")
        state = {name: one.clone() for name, one in engine.module_state_dict().items()}
        engine.destroy()
        return state

    def load(communicator, model, stage, folder, strict):
        engine = engine_of(model, stage)
        engine.load_checkpoint(str(tmp_path / folder), load_module_strict=strict)
        state = {name: one.clone() for name, one in engine.module_state_dict().items()}
        engine.destroy()
        return state

    def emptied():
        model = build()
        for one in model.parameters():
            one.data.zero_()
        return model

    wanted = on_threads(2, save, build)[0]
    for world, stage in ((1, 0), (3, 3)):
        assert_bitwise(on_threads(world, partial(load, stage=stage, folder="all", strict=True), emptied)[0], wanted)
    lean = on_threads(1, partial(load, stage=2, folder="lean", strict=False), build)[0]
    assert_bitwise(lean, wanted)
    assert_bitwise(load_file(tmp_path / "whole.safetensors"), wanted)
    exported = build()
    exported.load_state_dict(load_file(tmp_path / "whole.safetensors"))
    polyaccel.dequantize_frozen(exported)
    merged = exported.merge_and_unload()
    assert not any(isinstance(part, QuantizedLayer) for part in merged.modules())


def test_tensor_ranks_hold_codes_whole():
    def alone(communicator, model, **keys):
        same = type("First", (), {"rank": 0})  # tensor ranks read the same batch
        return train(same, model, "llama", 3, **keys)

    wanted = on_threads(1, alone, build)[0]
    for found in on_threads(2, partial(alone, tensor_parallel={"autotp_size": 2}), build):
        assert found[0] == pytest.approx(wanted[0], rel=1e-6)
        assert torch.equal(found[1], wanted[1])


def test_exact_rollouts_have_the_bits_of_training():
    engine = engine_of(build().eval(), 2, generation={"exact": True})
    prompt = transformer_batch("llama", seed=1, length=4)["input_ids"]
    asked = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = engine.generate(input_ids=prompt, eos_token_id=None, **asked)
    for rows in (slice(0, 2), slice(1, 2)):
        sequences = out.sequences[rows]
        logits = engine(input_ids=sequences, attention_mask=torch.ones_like(sequences)).logits
        assert torch.equal(logits[:, 3:-1], torch.stack(out.logits, 1)[rows])


def test_plain_weights_are_rounded_when_they_are_loaded():
    plain = transformer_model("llama")
    model, wanted = copy.deepcopy(plain), copy.deepcopy(plain)
    names = polyaccel.quantize_frozen(model, skip=["mlp", "model.layers.1.self_attn.q_proj"])
    assert not any("mlp" in name for name in names)
    assert "model.layers.1.self_attn.q_proj" not in names
    assert "lm_head" not in names
    polyaccel.quantize_frozen(wanted, skip=["mlp", "model.layers.1.self_attn.q_proj"])
    for one in model.parameters():
        one.data.zero_()
    model.load_state_dict(plain.state_dict())
    assert_bitwise(model.state_dict(), wanted.state_dict())


def test_what_cannot_be_is_refused():
    model = build()
    with pytest.raises(PolyaccelError):
        model.merge_adapter()
    layer = next(part for part in model.modules() if isinstance(part, QuantizedLinear))
    with pytest.raises(PolyaccelError), torch.no_grad():
        layer.weight.add_(1.0)
    with pytest.raises(PolyaccelError):
        polyaccel.quantize_frozen(model)  # nothing is left
    engine = engine_of(model, 0)
    with pytest.raises(PolyaccelError):
        polyaccel.dequantize_frozen(model)
    fused = engine.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=2, do_sample=False, fuse_adapters=True)
    assert torch.equal(fused, engine.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=2, do_sample=False))
    engine.destroy()
    other = engine_of(transformer_model("llama"), 0)
    with pytest.raises(PolyaccelError):
        polyaccel.quantize_frozen(other.module)
    with torch.device("meta"):
        shapes = torch.nn.Sequential(torch.nn.Linear(4, 3))
    polyaccel.quantize_frozen(shapes)
    with pytest.raises(PolyaccelError):
        polyaccel.initialize(model=shapes, config=make_config(0))


def test_state_dicts_of_other_formats_and_sizes_are_refused():
    """Codes of another type, and of other groups of as many scales, have the same shapes."""

    def layer(dtype="nf4", size=50):
        model = torch.nn.Sequential(torch.nn.Linear(100, 4))
        polyaccel.quantize_frozen(model, dtype, group_size=size)
        return model

    for other in (layer("int4"), layer(size=64)):
        assert [one.shape for one in other.parameters()] == [one.shape for one in layer().parameters()]
        with pytest.raises(RuntimeError):
            layer().load_state_dict(other.state_dict())
    for shape in ((8, 100), (100, 4), (4, 99)):
        with pytest.raises(PolyaccelError) as caught:
            layer().load_state_dict({"0.weight": torch.zeros(shape), "0.bias": torch.zeros(4)})
        assert caught.value.value == shape


def test_names_to_skip_are_those_of_modules():
    names = ("q_proj", "k_proj")
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in names})
    with pytest.raises(PolyaccelError) as caught:
        polyaccel.quantize_frozen(model, skip=["q_prj"])
    assert caught.value.value == "q_prj"
    assert polyaccel.quantize_frozen(copy.deepcopy(model), skip="q_proj") == ("k_proj",)
    model["k_proj"].weight = torch.nn.Parameter(torch.empty(0, 4))
    model["q_proj"].weight = torch.nn.Parameter(torch.empty(4, 0))
    with pytest.raises(PolyaccelError):
        polyaccel.quantize_frozen(model)


def test_copies_of_layers_compute_the_same():
    model = transformer_model("gpt2").eval()
    polyaccel.quantize_frozen(model, "int4")
    wanted = model(**transformer_batch("gpt2")).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**transformer_batch("gpt2")).logits, wanted)


def test_a_head_of_classes_is_trained():
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_labels": 3}
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    assert "score" not in polyaccel.quantize_frozen(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS"))
    assert any("score" in name for name, one in model.named_parameters() if one.requires_grad)


def test_pefts_modules_to_save_trains_no_quantised_layer():
    """A layer that `skip` names is trained, and so is one that PEFT has before."""
    config = partial(peft.LoraConfig, r=2, target_modules=["q_proj"])
    model = transformer_model("llama")
    polyaccel.quantize_frozen(model, "nf4", group_size=16)
    with pytest.raises(PolyaccelError) as caught:
        peft.get_peft_model(model, config(modules_to_save=["o_proj"]))
    assert caught.value.value is True
    skipped = transformer_model("llama")
    polyaccel.quantize_frozen(skipped, "nf4", group_size=16, skip="o_proj")
    later = peft.get_peft_model(transformer_model("llama"), config(modules_to_save=["o_proj"]))
    polyaccel.quantize_frozen(later, "nf4", group_size=16)
    for made in (peft.get_peft_model(skipped, config(modules_to_save=["o_proj"])), later):
        assert any("o_proj" in name and one.requires_grad for name, one in made.named_parameters())
