"""The decoder of `engine.generate`: the tokens of the module's own `generate`, or the module's own `generate`."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from pairwise import combinations
from parity_models import make_config, on_threads

import polyaccel
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.errors import PolyaccelError
from polyaccel.ops.base import KernelTable
from polyaccel.ops.decode import DECODE_ATTENTION, DECODE_LINEAR
from polyaccel.torch.generation.decode import fast
from polyaccel.torch.generation.decode.model import Decoder
from polyaccel.torch.generation.decode.proof import proved
from polyaccel.torch.generation.decode.structure import structure_of

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")
from decoder_models import OTHERS, model_of  # noqa: E402 - imports transformers
from transformer_models import KINDS, VOCABULARY, transformer_batch  # noqa: E402 - imports transformers

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
KNOWN = {
    *("llama", "llama_two_keys", "qwen2", "qwen3", "gpt2", "mixtral", "qwen3_moe", "phi3", "gpt_neox", "mistral"),
    *("phi", "opt"),
}
CHANGES = {
    "gpt_neox": ({}, {"use_parallel_residual": False}),
    "mixtral": ({"output_router_logits": False},),  # with which transformers' own generate fails for padded prompts
    "opt": ({}, {"do_layer_norm_before": False}),
    "phi": ({}, {"qk_layernorm": True}),
}
SAMPLES = {"do_sample": True, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8, "repetition_penalty": 1.2}
DECODERS = sorted(set(KINDS) - {"albert", "bert", "t5"}) + sorted(set(OTHERS) - set(KINDS))


@pytest.fixture
def steps(monkeypatch):
    """The sequences of each step that the decoder has computed."""
    seen = []

    class Watched(fast.Decoder):
        def step(self, tokens, slots, positions):
            seen.append(len(tokens))
            return super().step(tokens, slots, positions)

    monkeypatch.setattr(fast, "Decoder", Watched)
    return seen


def prompts(rows=3, length=7):
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row % 3] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def compared(model, table, **asked):
    found = []
    for generate in (model.generate, partial(fast.generate, model, table, ())):
        torch.manual_seed(5)
        found.append(generate(**asked) if generate == model.generate else generate(asked))
    return found


@pytest.mark.parametrize("kind", DECODERS)
def test_tokens_are_those_of_the_module(kind, steps):
    for changes in CHANGES.get(kind, ({},)):
        model = model_of(kind, **changes)
        for table in (CpuAccelerator("torch").decode_kernels(), KernelTable("none", {})):
            for choice in ({"do_sample": False}, SAMPLES):
                with torch.no_grad():
                    wanted, found = compared(model, table, **prompts(), max_new_tokens=9, **choice)
                assert torch.equal(found, wanted)
    assert bool(steps) == (kind in KNOWN)


@pytest.mark.parametrize("kind", sorted(KNOWN))
def test_a_step_is_one_call_where_all_parts_are_known(kind):
    """And it has the logits of single calls."""
    table = CpuAccelerator("torch").decode_kernels()
    single = KernelTable("single", {op: table[op] for op in (DECODE_LINEAR, DECODE_ATTENTION)})
    for changes in CHANGES.get(kind, ({},)):
        model = model_of(kind, **changes)
        found = []
        with torch.no_grad():
            structure = proved(model, structure_of(model), table)
            for kernels in (table, single):
                decoder = Decoder(structure, kernels, 4, 12)
                decoder.prefill([torch.tensor([5, 3, 9]), torch.tensor([8])], [2, 0])
                places = torch.tensor([2, 0]), torch.tensor([3, 1])
                found.append(decoder.step(torch.tensor([7, 4]), *places))
                found.append(decoder.step(torch.tensor([11]), torch.tensor([0]), torch.tensor([2])))
                is_whole = decoder._whole is not None
                assert is_whole == (kernels is table and kind not in ("mixtral", "qwen3_moe"))
        for one, other in zip(found[:2], found[2:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "opt", "phi", "qwen3_moe"])
def test_tensor_ranks_decode_their_parts_to_the_tokens_of_the_whole_model(kind, monkeypatch):
    """A token is a call for each half of a block and an exchange after it, where all parts are known."""
    runs = []

    class Watched(fast.Decoder):
        def step(self, tokens, slots, positions):
            runs.append(self._whole and len(self._whole._runs))
            return super().step(tokens, slots, positions)

    monkeypatch.setattr(fast, "Decoder", Watched)
    plain = model_of(kind)
    asked = {**prompts(), "max_new_tokens": 5}
    wanted = plain.generate(**asked, do_sample=False)

    def work(communicator, model):
        config = make_config(0, zero={}, tensor_parallel={"autotp_size": 2})
        engine = polyaccel.initialize(model=model, config=config)[0]
        assert torch.equal(engine.generate(**asked, do_sample=False), wanted)
        drawn = engine.generate(**asked, **SAMPLES, seed=3)
        engine.destroy()
        return drawn

    one, other = on_threads(2, work, partial(copy.deepcopy, plain))
    assert torch.equal(one, other)
    exchanges = {"phi": 1, "qwen3_moe": None}.get(kind, 2)  # phi computes both halves of a block side by side
    assert set(runs) == {exchanges and 2 * exchanges * plain.config.num_hidden_layers + 2}


@combinations(
    kind=["gpt2", "llama"], stage=[0, 2, 3], world=[1, 2], adapters=["none", "LoRA", "fused"], units=[False, True]
)
def test_engines_decode_with_the_weights_of_each_step(kind, stage, world, adapters, units, steps):
    plain = model_of(kind)
    if adapters != "none":
        targets = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}[kind]
        lora = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=targets, fan_in_fan_out=kind == "gpt2")
        plain = peft.get_peft_model(plain, lora).eval()
    asked = {**prompts(), "max_new_tokens": 5, "do_sample": False}
    keys = {"hybrid_engine": {"enabled": True, "pin_parameters": not units}}

    def train(communicator, model):
        engine = polyaccel.initialize(model=model, config=make_config(stage, zero={}, **keys))[0]
        for step in range(2):
            twin = copy.deepcopy(plain).eval()
            twin.load_state_dict(engine.module_state_dict())
            found = engine.generate(**asked, fuse_adapters=adapters == "fused")
            assert torch.equal(found, twin.generate(**asked))
            loss = engine(**transformer_batch(kind, seed=step + communicator.rank)).loss
            engine.backward(loss)
            engine.step()
        engine.destroy()

    on_threads(world, train, partial(copy.deepcopy, plain))
    assert steps or (stage == 3 and units)


def test_a_list_of_prompts_is_decoded_continuously(steps):
    engine = polyaccel.initialize(model=model_of("llama"), config=make_config(0))[0]
    texts = [list(range(1, 2 + length)) for length in (1, 5, 3, 8, 2)]
    whole = engine.generate(texts, max_new_tokens=6, do_sample=False, eos_token_id=[11, 23])
    few = engine.generate(texts, max_new_tokens=6, do_sample=False, eos_token_id=[11, 23], batch_size=2)
    for text, one, other in zip(texts, whole, few, strict=True):
        alone = engine.module.generate(
            torch.tensor([text]), max_new_tokens=6, do_sample=False, eos_token_id=[11, 23], pad_token_id=0
        )
        assert one.tolist() == other.tolist() == alone[0].tolist()
    assert max(steps) == 5
    assert max(steps[-6:]) <= 2
    with pytest.raises(PolyaccelError):
        engine.generate([[1], []])
    with pytest.raises(PolyaccelError):
        engine.generate(texts, batch_size=0)


NAMES = [chr(97 + one) if one < 26 else chr(0x3B1 + one) for one in range(VOCABULARY)]


def letters():
    """A tokenizer whose tokens are letters."""
    words = tokenizers.models.BPE({name: one for one, name in enumerate(NAMES)}, [], unk_token=NAMES[-1])
    plain = tokenizers.Tokenizer(words)
    plain.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token=NAMES[-1])


def test_stop_strings_end_where_pages_of_keys_do():
    model = model_of("llama")
    model.config.max_position_embeddings = 128
    engine = polyaccel.initialize(model=model, config=make_config(0))[0]
    texts = [[1 + place * 7 % 50 for place in range(length)] for length in (29, 30, 31, 32, 33)]
    asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "batch_size": 2}
    before = engine.generate(texts, **asked)
    batch = torch.tensor(texts[:1])
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()
    whole = [row.tolist() for row in engine.generate(texts, **asked)]
    assert whole != [row.tolist() for row in before]
    for at in range(5):
        stop = "".join(NAMES[one] for one in whole[0][29 + at : 31 + at])
        for row, found in zip(
            whole, engine.generate(texts, **asked, stop_strings=[stop], tokenizer=letters()), strict=True
        ):
            assert found.tolist() == row[: len(found)]
            ends = "".join(NAMES[one] for one in row[: len(found)]).endswith(stop)
            assert ends if len(found) < len(row) else stop not in "".join(NAMES[one] for one in row[33:-1])


@pytest.mark.parametrize("end", [None, 66])
@pytest.mark.parametrize("own", [False, True])
def test_a_list_with_stop_strings_ends_with_them(own, end):
    tokenizer = letters()
    engine = polyaccel.initialize(model=model_of("llama"), config=make_config(0))[0]
    texts, asked = [[1, 2, 3], [4], [5, 6]], {"max_new_tokens": 9, "do_sample": False, "eos_token_id": end}
    whole = engine.generate(texts, **asked)
    stop = NAMES[int(whole[0][5])]
    stops = {"stop_strings": [stop], "tokenizer": tokenizer, "own_decoder": own, "pad_token_id": 0}
    for text, one, found in zip(texts, whole, engine.generate(texts, **asked, **stops), strict=True):
        ends = [at for at in range(len(text), len(one)) if stop in NAMES[int(one[at])]]
        assert found.tolist() == one[: ends[0] + 1 if ends else len(one)].tolist()


@pytest.mark.parametrize("asked", [{}, {"repetition_penalty": 3.0, "no_repeat_ngram_size": 1}], ids=["no", "penalties"])
def test_a_seed_gives_a_sequence_the_same_tokens_in_any_batch(asked):
    """Processors of transformers see the padding of a batch, and its rows."""
    engine = polyaccel.initialize(model=model_of("qwen3"), config=make_config(0))[0]
    texts = [list(range(1, 2 + length)) for length in (4, 1, 6, 2)]
    draw = partial(engine.generate, texts, max_new_tokens=7, do_sample=True, eos_token_id=5, pad_token_id=9, **asked)
    state = torch.get_rng_state()
    found = [[one.tolist() for one in draw(seed=3, batch_size=size)] for size in (1, 2, 3, None)]
    assert all(one == found[0] for one in found)
    alone = engine.generate(texts[:1], **{**draw.keywords, "seed": 3})
    assert alone[0].tolist() == found[0][0]
    assert torch.equal(torch.get_rng_state(), state)
    assert [one.tolist() for one in draw(seed=4)] != found[0]


def test_sequences_that_are_replaced_have_the_penalties_of_the_batch(steps):
    engine = polyaccel.initialize(model=model_of("gpt2"), config=make_config(0))[0]
    texts = [list(range(1, 2 + length)) for length in (4, 1, 6, 2)]
    asked = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": 5, "pad_token_id": 0}
    for extra in ({"repetition_penalty": 3.0}, {"no_repeat_ngram_size": 1}, {"encoder_repetition_penalty": 2.0}):
        own = engine.generate(texts, **asked, **extra, own_decoder=False)
        few = engine.generate(texts, **asked, **extra, batch_size=2)
        assert [one.tolist() for one in few] == [one.tolist() for one in own]
    assert steps


def test_ended_sequences_are_not_computed_and_outputs_are_those_of_the_module(steps):
    model, table = model_of("gpt2"), CpuAccelerator("torch").decode_kernels()
    asked = {**prompts(), "max_new_tokens": 12, "do_sample": False}
    free = model.generate(**asked, eos_token_id=None)
    asked["eos_token_id"] = int(free[0, 9])  # ends the first sequence after three tokens, if not before
    wanted, found = compared(model, table, **asked)
    assert torch.equal(found, wanted)
    assert min(steps) < 3
    extra = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    wanted, found = compared(model, table, **asked, **extra)
    assert torch.equal(found.sequences, wanted.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(found[name]), torch.stack(wanted[name]), rtol=0, atol=1e-4)


def hooked(model):
    model.transformer.h[0].register_forward_hook(lambda *_: None)


def scaled(model):
    """A part that no structure has, without parameters: only logits show it."""
    own = model.transformer.h[0].attn.forward
    model.transformer.h[0].attn.forward = lambda *args, **named: (own(*args, **named)[0] * 1.5, None)


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        (hooked, {}),
        (scaled, {}),
        (None, {"num_beams": 2}),
        (None, {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]] * 3)}),
    ],
    ids=["hooks", "other logits", "beams", "a mask with a hole"],
)
def test_others_are_left_to_the_module_which_is_logged_once(change, asked, steps, caplog, monkeypatch):
    monkeypatch.setattr(fast, "_LOGGED", set())
    model, table = model_of("gpt2"), CpuAccelerator("torch").decode_kernels()
    if change is not None:
        change(model)
    for _ in range(2):
        with caplog.at_level("INFO", logger=fast.log.name):
            wanted, found = compared(model, table, **{**prompts(), "max_new_tokens": 3, "do_sample": False, **asked})
        assert torch.equal(found, wanted)
    assert not steps
    assert len([one for one in caplog.records if one.name == fast.log.name]) == 1
