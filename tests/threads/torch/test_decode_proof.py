"""What a new model's small weights hide from the decoder's proof, and calls whose outputs are separated."""

from __future__ import annotations

import pytest
import torch
from parity_models import make_config

import polyaccel
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.torch.generation.decode import fast
from polyaccel.torch.generation.decode.errors import Unsupported
from polyaccel.torch.generation.decode.proof import proved
from polyaccel.torch.generation.decode.structure import structure_of
from polyaccel.torch.shrunk_config import shrunk

transformers = pytest.importorskip("transformers")
COMMON = {"vocab_size": 61, "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 1}
ROTARY = {
    **COMMON,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "head_dim": 8,
    "num_key_value_heads": 3,
}
MODELS = {
    "GPTJ": {**COMMON, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, "rotary_dim": 4},
    "Glm": ROTARY,
    "Helium": ROTARY,
    "SmolLM3": {**ROTARY, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "Llama": ROTARY,
}
ASKED = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}


def new_model(name):
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**MODELS[name])).eval()


@torch.no_grad()
def enlarge(model):
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.4 if parameter.dim() > 1 else parameter)


@torch.no_grad()
def tokens(model, **asked):
    ids = torch.tensor([[5, 6, 7, 8]])
    table = CpuAccelerator("torch").decode_kernels()
    named = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **ASKED, **asked}
    return fast.generate(model, table, (), dict(named)), model.generate(**named)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_bf16_model_whose_weights_grow_after_its_proof_keeps_its_tokens(name):
    model = new_model(name).bfloat16()
    tokens(model)
    enlarge(model)
    found, wanted = tokens(model, max_new_tokens=1, output_logits=True, return_dict_in_generate=True)
    largest = float(wanted.logits[0].abs().max())
    assert float((found.logits[0] - wanted.logits[0]).abs().max()) <= 0.1 * largest


@pytest.mark.parametrize(("heads", "width"), [(32, 100), (32, 120), (8, 104), (16, 72), (3, 34), (5, 17), (4, 64)])
def test_small_heads_keep_whole_and_even_widths(heads, width):
    kind = transformers.GPTNeoXConfig(hidden_size=heads * width, num_attention_heads=heads)
    small = shrunk(kind)[0]
    assert small.num_attention_heads == heads
    assert small.hidden_size % heads == 0
    assert small.hidden_size // heads % 2 == width % 2
    assert small.hidden_size < kind.hidden_size or width < 64


@torch.no_grad()
def test_queries_that_are_scaled_behind_a_position_are_left_to_the_module():
    kept = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    common = {**ROTARY, "max_position_embeddings": 64, "sliding_window": None}
    for scale in (0.0, 0.5):
        rope = {**kept, "llama_4_scaling_beta": scale, "mscale": 1.0, "mscale_all_dim": 1.0}
        model = transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**common, rope_parameters=rope)).eval()
        enlarge(model)
        table = CpuAccelerator("torch").decode_kernels()
        structure = structure_of(model)
        if scale:
            with pytest.raises(Unsupported):
                proved(model, structure, table)
        else:
            proved(model, structure, table)
        found, wanted = tokens(model, max_new_tokens=30)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_large_weights_in_integers_are_decoded(dtype, monkeypatch):
    """Kernels round inputs to 16 bits, which large weights show: 1.4e-4 of the largest logit."""
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**ROTARY, "intermediate_size": 131}))
    enlarge(model)
    engine = polyaccel.init_inference(model, {"dtype": dtype})
    left = []
    monkeypatch.setattr(fast, "_LOGGED", set())
    monkeypatch.setattr(fast.log, "info", lambda *args: left.append(args))
    prompts = torch.tensor([[5, 6, 7, 8]])
    found, wanted = (engine.generate(prompts, **ASKED, own_decoder=own) for own in (True, False))
    assert torch.equal(found, wanted)
    assert not left


@pytest.mark.parametrize("part", ["model", "model.layers.0", "model.layers.0.self_attn", "model.embed_tokens"])
def test_a_forward_that_is_replaced_after_the_proof_is_called(part):
    model = new_model("Llama")
    enlarge(model)
    tokens(model)
    replaced = model.get_submodule(part)
    before, seen = replaced.forward, []

    def forward(*args, **named):
        seen.append(part)
        return before(*args, **named)

    replaced.forward = forward
    found, wanted = tokens(model)
    calls = len(seen)
    assert torch.equal(found, wanted)
    assert calls >= 2 * ASKED["max_new_tokens"]  # those of both


def test_lists_have_several_sequences_and_the_end_that_was_asked_for():
    model = new_model("Llama")
    enlarge(model)
    prompts = [[5, 6, 7], [8], [9, 10]]
    engine = polyaccel.initialize(model=model, config=make_config(0, zero={}))[0]
    whole = engine.generate(prompts, **ASKED)
    assert [len(one) for one in whole] == [11, 9, 10]
    end = int(whole[0][5])
    model.generation_config.eos_token_id = end
    for own in (True, False):
        named = {**ASKED, "own_decoder": own}
        assert all(map(torch.equal, engine.generate(prompts, **named), whole))
        named["eos_token_id"] = torch.tensor(end)
        first = next(index for index, token in enumerate(whole[0][3:].tolist()) if token == end)
        assert torch.equal(engine.generate(prompts, **named)[0], whole[0][: 4 + first])
        several = engine.generate(prompts, **{**named, "do_sample": True, "num_return_sequences": 2}, seed=1)
        assert [one[:length].tolist() for one, length in zip(several, [3, 3, 1, 1, 2, 2], strict=True)] == [
            prompt for prompt in prompts for _ in "12"
        ]


def test_processors_that_know_a_row_by_its_place_see_the_whole_batch():
    model = new_model("Llama")
    enlarge(model)
    engine = polyaccel.initialize(model=model, config=make_config(0, zero={}))[0]
    allowed = [[3], [4], [5]]
    named = {**ASKED, "prefix_allowed_tokens_fn": lambda row, written: allowed[row]}
    found = engine.generate([[5, 6], [7], [8]], batch_size=2, **named)
    assert [one[-1].item() for one in found] == [3, 4, 5]
