"""Models of transformers whose sequences are cut over ranks: loss and gradients are those of one rank."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hf_models import SIZES, VOCABULARY, tiny
from mixing_models import CASES, mixing
from pairwise import combinations
from parity_models import drawn_from
from transformers import (
    BertGenerationConfig,
    BertGenerationDecoder,
    DogeConfig,
    DogeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    LlamaForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from polyaccel.comm.init.threads import run_threads
from polyaccel.errors import PolyaccelError
from polyaccel.torch.context_parallel import SequenceSettings, apply_context_parallel
from polyaccel.torch.tiled.tokenwise import TokenwiseLayers

ROWS = 2
RING = SequenceSettings("ring")


def batch_of(kind: str, model: str, length: int) -> dict[str, Any]:
    """Ids and labels of a batch: plain, padded on both sides, or packed; or all labels at the first tokens."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if model == "bert":
        batch["labels"] = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, ids, -100)
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, -(length // 3) :] = 0
        mask[1, :3] = 0
        batch["attention_mask"] = mask
        batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    if kind == "packed":
        positions = torch.arange(length).expand(ROWS, -1).clone()
        for row, start in ((0, 5), (0, length // 2), (1, length - 4)):
            positions[row, start:] = torch.arange(length - start)
        batch["position_ids"] = positions
        batch["use_cache"] = False  # with a cache transformers does not look for documents
        batch["labels"] = batch["labels"].masked_fill(positions == 0, -100)
    if kind == "first":
        batch["labels"][:, 4:] = -100
    return batch


def loss_and_gradients(model, batch):
    outputs = model(**batch)
    outputs.loss.backward()
    return outputs.loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def over_ranks(model, world, settings, batch):
    """Every rank's loss, and the mean of their gradients, which is what the engine takes."""

    def run(communicator):
        own = copy.deepcopy(model)
        apply_context_parallel(own, communicator, settings)
        return loss_and_gradients(own, batch)

    found = run_threads(world, run)
    names = found[0][1].keys()
    assert all(gradients.keys() == names for _, gradients in found)
    return [loss for loss, _ in found], {name: sum(one[name] for _, one in found) / world for name in names}


def assert_one_rank(model, world, settings, batch, tolerance=1e-9):
    model.train()
    expected_loss, expected = loss_and_gradients(copy.deepcopy(model), batch)
    losses, found = over_ranks(model, world, settings, batch)
    for loss in losses:
        torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=tolerance)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance, msg=name)


@combinations(
    model=["llama", "qwen2", "mistral", "gpt2", "bert"],
    method=["ulysses", "ring"],
    world=[2, 3, 4],
    batch=["plain", "padded", "packed", "first"],
    length=[24, 31],
)
def test_loss_and_gradients_are_those_of_one_rank(model, method, world, batch, length):
    if model == "bert" and batch == "packed":
        batch = "plain"  # its one-rank attention does not look at position ids
    # transformers computes losses in float32 of whatever the model computes in
    assert_one_rank(tiny(model), world, SequenceSettings(method), batch_of(batch, model, length), 1e-6)


def test_packed_documents_are_logged_once(caplog):
    def run(communicator):
        own = tiny("llama").train()
        apply_context_parallel(own, communicator, RING)
        for kind in ("plain", "packed", "packed"):
            own(**batch_of(kind, "llama", 24))

    run_threads(2, run)
    assert ["position_ids" in record.getMessage() for record in caplog.records] == [True]


@combinations(
    core=["eager", "sdpa"],
    model=["llama", "mistral", "gpt2", "bert"],
    batch=["plain", "padded", "packed"],
    world=[2, 3],
)
def test_any_core_attention_computes_between_the_exchanges(core, model, batch, world):
    if model == "bert" and batch == "packed":
        batch = "plain"
    settings = SequenceSettings("ulysses", core)
    # in float64 transformers' eager attention makes NaN of a token that sees none
    assert_one_rank(tiny(model, core, torch.float32), world, settings, batch_of(batch, model, 22), 1e-5)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize("settings", [SequenceSettings(), RING], ids=["ulysses", "ring"])
def test_layers_may_be_computed_anew_in_the_backward_pass(settings, reentrant):
    model = tiny("llama")
    batch = batch_of("packed", "llama", 24)
    model.train()
    _, expected = loss_and_gradients(copy.deepcopy(model), batch)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    _, found = over_ranks(model, 2, settings, batch)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_batch_without_targets_has_the_loss_of_one_rank(kind):
    model = tiny(kind).train()
    batch = batch_of("plain", kind, 12)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    alone, expected = loss_and_gradients(copy.deepcopy(model), batch)
    assert all(float(gradient.abs().max()) == 0.0 for gradient in expected.values())
    losses, gradients = over_ranks(model, 3, RING, batch)
    assert [bool(loss.isnan()) for loss in (alone, *losses)] == [True] * 4
    assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients.values())


def test_a_count_of_targets_that_a_trainer_gives_is_the_divisor():
    """Trainers that accumulate divide by the targets of several batches."""
    assert_one_rank(tiny("llama"), 2, RING, {**batch_of("plain", "llama", 15), "num_items_in_batch": 123}, 1e-6)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # PEFT asks by the old name
def test_adapters_around_a_model_train_as_on_one_rank():
    from peft import LoraConfig, get_peft_model

    base = tiny("llama")
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"))
    assert_one_rank(model, 2, SequenceSettings(), batch_of("plain", "llama", 14), 1e-5)


def test_outputs_are_those_of_a_rank_and_may_be_tuples():
    batch = batch_of("plain", "llama", 13)
    batch["return_dict"] = False
    model = tiny("llama").train()
    expected = model(**batch)

    def run(communicator):
        own = copy.deepcopy(model)
        parallel = apply_context_parallel(own, communicator, RING)
        loss, logits = own(**batch)
        torch.testing.assert_close(logits, parallel.own_part(expected[1]), rtol=1e-9, atol=1e-9)
        without = own(batch["input_ids"])  # a loss of one's own
        assert torch.equal(without.logits, logits)
        assert without.loss is None
        return loss.detach()

    for loss in run_threads(2, run):
        torch.testing.assert_close(loss, expected[0].detach(), rtol=1e-6, atol=1e-6)


def test_evaluation_without_labels_and_generation_are_whole():
    model = tiny("llama").eval()
    batch = batch_of("plain", "llama", 9)
    with torch.no_grad():
        expected = model(**batch)
        generated = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)

    @torch.no_grad()
    def run(communicator):
        own = copy.deepcopy(model)
        parallel = apply_context_parallel(own, communicator, SequenceSettings())
        assert torch.equal(own(batch["input_ids"]).logits, expected.logits)
        assert torch.equal(own.generate(batch["input_ids"], max_new_tokens=4, do_sample=False), generated)
        loss = own(**batch).loss
        parallel.remove()
        assert own.config._attn_implementation == "sdpa"
        assert torch.equal(own(**batch).loss, expected.loss)
        return loss

    for loss in run_threads(3, run):
        torch.testing.assert_close(loss, expected.loss, rtol=1e-6, atol=1e-6)


def test_fewer_tokens_than_ranks_are_left_whole():
    assert_one_rank(tiny("gpt2"), 4, RING, batch_of("plain", "gpt2", 3), 1e-9)


SINKS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt_oss": (GptOssForCausalLM, GptOssConfig, {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite_swa": (GraniteSWAForCausalLM, GraniteSWAConfig, {}),
    "mimo": (
        MiMoV2FlashForCausalLM,
        MiMoV2FlashConfig,
        {
            "head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SINKS)
def test_sinks_that_attention_reads_from_its_layer_are_those_of_the_ranks_heads(kind):
    make, config, own = SINKS[kind]
    model = make(config(**SIZES, num_key_value_heads=2, sliding_window=7, **own))
    with drawn_from(5), torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    assert_one_rank(model, 2, SequenceSettings(), batch_of("plain", kind, 19), 1e-5)

    def ring(communicator):
        cut = copy.deepcopy(model).train()
        apply_context_parallel(cut, communicator, RING)
        with pytest.raises(PolyaccelError) as caught:
            cut(**batch_of("plain", kind, 19))
        return "s_aux" in str(caught.value.value)

    assert run_threads(2, ring) == [True, True]


@pytest.mark.parametrize("settings", [SequenceSettings(), RING], ids=["ulysses", "ring"])
def test_a_model_that_reads_its_mask_is_refused(settings):
    class Adds(DogeForCausalLM):
        """Its layers add to the mask before they read its type."""

    class Indexes(DogeForCausalLM):
        """Its layers take a part of the mask."""

    first = DogeConfig(**SIZES, num_key_value_heads=2)
    for kind, read in ((DogeForCausalLM, None), (Adds, lambda mask: 1.0 - mask), (Indexes, lambda mask: mask[:, 0])):
        with drawn_from(5):
            model = kind(first).train()
        if read is not None:
            for layer in model.model.layers:
                layer.self_attn.prepare_dynamic_mask = lambda attention_mask, read=read, **_: read(attention_mask)

        def run(communicator, model=model):
            cut = copy.deepcopy(model)
            apply_context_parallel(cut, communicator, settings)
            with pytest.raises(PolyaccelError) as caught:
                cut(**batch_of("plain", "doge", 12))
            return caught.value.value

        assert run_threads(2, run) == [kind.__name__] * 2


def test_what_attention_is_given_for_this_ranks_tokens_is_refused():
    def attention(module, query, key, value, attention_mask, scaling=None, position_bias=None, **named):
        raise AssertionError("not called")

    ALL_ATTENTION_FUNCTIONS.register("biased", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("biased", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model = tiny("llama").train()
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = partial(forward, position_bias=torch.zeros(1, 4, 6, 6))

    def run(communicator):
        cut = copy.deepcopy(model)
        apply_context_parallel(cut, communicator, SequenceSettings("ulysses", "biased"))
        with pytest.raises(PolyaccelError) as caught:
            cut(**batch_of("plain", "llama", 12))
        return caught.value.value

    assert run_threads(2, run) == ["position_bias"] * 2


def test_dropout_of_attention_is_left_to_the_model_or_refused():
    model = tiny("gpt2", attn_pdrop=0.5).train()
    batch = batch_of("plain", "gpt2", 12)

    def exchanged(communicator):
        own = copy.deepcopy(model)
        apply_context_parallel(own, communicator, SequenceSettings())
        return bool(own(**batch).loss.isfinite())

    assert run_threads(2, exchanged) == [True, True]

    def ring(communicator):
        own = copy.deepcopy(model)
        apply_context_parallel(own, communicator, RING)
        with pytest.raises(PolyaccelError) as caught:
            own(**batch)
        assert "0.5" in str(caught.value.value)

    run_threads(2, ring)


class Chat(LlamaForCausalLM):
    """transformers finds no loss by this name, and takes the causal one."""


class Tagger(LlamaForCausalLM):
    """It computes its own loss, of the labels as they are."""

    def forward(self, input_ids, labels=None, position_ids=None, attention_mask=None, use_cache=None):
        out = super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
        if labels is not None:
            logits, targets = self.pairs(out.logits, labels)
            out.loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return out

    def pairs(self, logits, labels):
        return logits, labels


class Continuation(Tagger):
    def pairs(self, logits, labels):
        return logits[:, :-1], labels[:, 1:]


class Backwards(Tagger):
    def pairs(self, logits, labels):
        return logits[:, 1:], labels[:, :-1]


def generation_decoder():
    config = BertGenerationConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24,
        is_decoder=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(5)
    return BertGenerationDecoder(config)


@pytest.mark.parametrize("settings", [SequenceSettings(), RING], ids=["ulysses", "ring"])
@pytest.mark.parametrize("kind", ["chat", "generation", "tagger", "continuation"])
def test_labels_are_shifted_as_the_models_own_loss_does(kind, settings):
    makers = {"chat": Chat, "tagger": Tagger, "continuation": Continuation}
    model = makers[kind](tiny("llama").config).float() if kind in makers else generation_decoder()
    batch = {name: one for name, one in batch_of("plain", "llama", 14).items() if name in ("input_ids", "labels")}
    states = torch.get_rng_state()
    assert_one_rank(model, 2, settings, batch, 1e-5)
    assert torch.equal(torch.get_rng_state(), states)


@pytest.mark.parametrize("case", CASES)
def test_tokens_that_interact_outside_of_attention_are_refused_or_computed_whole(case):
    model, batch = mixing(case).train(), batch_of("plain", "bert", 14)
    expected_loss, expected = loss_and_gradients(copy.deepcopy(model), batch)

    def run(communicator):
        own = copy.deepcopy(model)
        with pytest.raises(PolyaccelError) as caught:
            apply_context_parallel(own, communicator, SequenceSettings())
        assert str(caught.value.value).startswith(CASES[case][1])
        assert "tokenwise" in caught.value.hint
        layers = TokenwiseLayers(own, communicator)
        assert layers.module_names
        return loss_and_gradients(own, batch)

    found = run_threads(2, run)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    for name, gradient in expected.items():
        mean = (found[0][1][name] + found[1][1][name]) / 2
        torch.testing.assert_close(mean, gradient, rtol=1e-6, atol=1e-6, msg=name)


def test_a_loss_of_neither_labels_is_refused():
    def run(communicator):
        with pytest.raises(PolyaccelError) as caught:
            apply_context_parallel(Backwards(tiny("llama").config), communicator, RING)
        return caught.value.value

    assert run_threads(2, run) == ["Backwards", "Backwards"]


def test_what_cannot_be_cut_is_named():
    from transformers import MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

    t5 = T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    mamba = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=4))

    def run(communicator):
        for model in (t5, mamba):
            with pytest.raises(PolyaccelError) as caught:
                apply_context_parallel(model, communicator, RING)
            assert caught.value.value == type(model).__name__
        with pytest.raises(PolyaccelError) as caught:
            apply_context_parallel(torch.nn.Linear(2, 2), communicator, RING)
        assert caught.value.value == "Linear"
        model = tiny("llama").train()
        apply_context_parallel(model, communicator, RING)
        with pytest.raises(PolyaccelError) as caught:
            apply_context_parallel(model, communicator, RING)
        assert "remove()" in caught.value.hint
        ids = torch.ones(1, 8, dtype=torch.int64)
        with pytest.raises(PolyaccelError) as caught:
            model(ids, attention_mask=torch.ones(1, 1, 8, 8))
        assert caught.value.value == (1, 1, 8, 8)
        assert "attention_mask" in str(caught.value)
        with pytest.raises(PolyaccelError) as caught:
            model(ids, labels=torch.ones(1, dtype=torch.int64))
        assert caught.value.value == (1,)
        with pytest.raises(PolyaccelError) as caught:
            model(ids, colours=torch.ones(1, 8))
        assert caught.value.value == "colours"

    run_threads(2, run)
