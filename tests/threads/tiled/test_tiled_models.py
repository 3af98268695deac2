"""Models of transformers that compute losses and feed-forward layers in tiles by one key, against plain torch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hf_models import SIZES, VOCABULARY, tiny
from mixing_models import mixing
from pairwise import combinations
from parity_models import SMALL_BUCKET, drawn_from, make_config, snapshot
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Gemma2Config,
    Gemma2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MobileViTConfig,
)
from transformers.models.mobilevit.modeling_mobilevit import MobileViTAttention

import polyaccel
from polyaccel.comm.init.threads import run_threads
from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.torch.settings import TileSettings
from polyaccel.torch.sharding.tensor_shard import cuts_of, local_slice
from polyaccel.torch.tiled.models import TiledModel, find_chunks, find_mlps

LENGTH = 21
TILED = {"enabled": True, "loss_tokens": 5, "mlp_tokens": 8}


def batch_of(place: int, length: int = LENGTH) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(place))
    labels = ids.clone()
    labels[:, :4] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def gradients_of(model: nn.Module, data: int) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of the mean over the batches of `data` places."""
    loss = sum(model(**batch_of(place)).loss for place in range(data)) / data
    assert isinstance(loss, Tensor)
    loss.backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return loss.item(), found


@combinations(
    stage=[0, 1, 2, 3],
    data=[1, 2],
    sequence=[1, 2],
    tensor=["whole", "logits gathered", "logits cut"],
    model=["llama", "tied llama", "gpt2"],
    recomputes=[False, True],
)
def test_training_in_tiles_is_training_without(stage, data, sequence, tensor, model, recomputes):
    start = tiny(model.split()[-1], dtype=torch.float32, tie_word_embeddings=model != "llama").train()
    plain = deepcopy(start)
    loss, gradients = gradients_of(plain, data)
    zero = {"reduce_bucket_size": SMALL_BUCKET, "stage3_param_persistence_threshold": 4}
    config: dict[str, Any] = {**make_config(stage, zero=zero), "train_micro_batch_size_per_gpu": 2}
    config |= {"tiled_compute": TILED, "activation_checkpointing": {"enabled": recomputes}}
    config |= {"sequence_parallel_size": sequence}
    share, cuts_logits = sequence, tensor == "logits cut" and model != "gpt2"  # whose head is not cut
    if tensor != "whole":
        share *= 2
        config |= {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": cuts_logits}}

    def run(communicator):
        own = deepcopy(start)
        engine, *_ = polyaccel.initialize(model=own, model_parameters=own.parameters(), config=config)
        outputs = engine(**batch_of(communicator.rank // share))
        assert outputs.logits is None
        engine.backward(outputs.loss)
        found = {name: polyaccel.utils.safe_get_full_grad(parameter) for name, parameter in own.named_parameters()}
        engine.step()
        with torch.no_grad():
            evaluated = engine.eval()(**batch_of(communicator.rank // share))
        engine.destroy()
        words = cuts_of(own)[own.lm_head.weight].block.local_shape[0] if cuts_logits else VOCABULARY
        assert evaluated.logits.shape[-1] == words
        return outputs.loss.item(), found, own

    ranks = run_threads(data * share, run)
    assert sum(one for one, _, _ in ranks) / len(ranks) == pytest.approx(loss, abs=1e-6)
    for _, found, own in ranks:
        assert found.keys() == gradients.keys()
        cuts, parameters = cuts_of(own), dict(own.named_parameters())
        for name, gradient in found.items():
            cut = cuts.get(parameters[name])
            wanted = gradients[name] if cut is None else local_slice(gradients[name], cut.block)
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
        assert not any("forward" in module.__dict__ for module in own.modules())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_whole_logits_are_never_there(kind):
    model = tiny(kind, dtype=torch.float32).train()
    tiled = TiledModel(model, TileSettings(loss_tokens=5, mlp_tokens=8))
    largest = Largest()
    with largest:
        model(**batch_of(0)).loss.backward()
    assert largest.of_words == 5 * VOCABULARY
    tiled.release()
    plain = Largest()
    with plain:
        assert model(**batch_of(0)).logits is not None
    assert plain.of_words == 2 * LENGTH * VOCABULARY


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the elements of the largest result with a number for each word, but for the weight itself, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.of_words = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if type(out) is Tensor and out.dim() and func is not torch.ops.aten.t.default and out.shape[-1] == VOCABULARY:
            self.of_words = max(self.of_words, out.numel())
        return out


def test_what_a_model_does_with_each_logit_is_done_in_tiles_too():
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 0.5}
    torch.manual_seed(5)
    start = Gemma2ForCausalLM(Gemma2Config(**sizes)).train()
    loss, gradients = gradients_of(deepcopy(start), 1)
    tiled = TiledModel(start, TileSettings(loss_tokens=5))
    outputs = start(**batch_of(0), num_items_in_batch=torch.tensor(7))
    assert outputs.loss.item() == pytest.approx(loss * 34 / 7, abs=1e-5)
    found, mine = gradients_of(start, 1)
    tiled.release()
    assert found == pytest.approx(loss, abs=1e-6)
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_sixteen_bit_model_trains_in_tiles(dtype):
    start = tiny("llama", dtype=torch.float32).train()
    config: dict[str, Any] = {**make_config(2), "train_micro_batch_size_per_gpu": 2, dtype: {"enabled": True}}

    def losses_with(**more: Any) -> list[float]:
        def run(communicator):
            engine, *_ = polyaccel.initialize(model=deepcopy(start), config={**config, **more})
            found = []
            for _ in range(4):
                loss = engine(**batch_of(0)).loss
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            engine.destroy()
            return found

        return run_threads(1, run)[0]

    plain, tiled = losses_with(), losses_with(tiled_compute=TILED)
    assert tiled == pytest.approx(plain, rel=5e-3)
    assert tiled[-1] < tiled[0]


def test_a_layer_whose_output_the_model_changes_in_place_is_tiled():
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    config = Llama4TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, intermediate_size_mlp=48, **experts)
    model = Llama4ForCausalLM(config).train()
    with drawn_from(5), torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    loss, wanted = gradients_of(deepcopy(model), 1)
    tiled = TiledModel(model, TileSettings(loss=False, mlp_tokens=8))
    assert "model.layers.1.feed_forward.shared_expert" in tiled.module_names
    found = gradients_of(model, 1)
    assert found[0] == pytest.approx(loss, abs=1e-6)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_a_copy_of_a_tiled_model_is_an_ordinary_one():
    model = tiny("llama", dtype=torch.float32).train()
    tiled = TiledModel(model, TileSettings(loss_tokens=5, mlp_tokens=8))
    copy = deepcopy(model)
    assert copy(**batch_of(0)).logits.shape == (2, LENGTH, VOCABULARY)
    assert model(**batch_of(0)).logits is None
    tiled.release()
    assert snapshot(copy).keys() == snapshot(model).keys()


def test_whoever_asks_for_logits_is_named():
    model = tiny("llama", dtype=torch.float32).train()
    TiledModel(model, TileSettings(loss_tokens=5))
    model.lm_head.register_forward_hook(lambda module, args, out: out.argmax(-1) if isinstance(out, Tensor) else None)
    with pytest.raises(PolyaccelError) as caught:
        model(**batch_of(0))
    assert caught.value.value == "argmax"
    assert "tiled_compute.loss" in str(caught.value)


def test_feed_forward_layers_are_found_by_structure():
    assert list(find_mlps(tiny("llama"))) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert list(find_mlps(tiny("gpt2"))) == ["transformer.h.0.mlp", "transformer.h.1.mlp"]
    assert list(find_mlps(tiny("llama"), ("*.1.mlp",))) == ["model.layers.1.mlp"]
    assert find_mlps(tiny("bert")) == {}
    chunks = find_chunks(tiny("bert"))
    assert {name: method for name, (_, method) in chunks.items()} == {
        f"bert.encoder.layer.{at}": "feed_forward_chunk" for at in (0, 1)
    }


def test_layers_whose_tokens_interact_are_left_whole_or_refused_by_name():
    model = mixing("shift in a feed-forward layer")
    assert list(find_mlps(model)) == ["model.layers.1.mlp"]
    with pytest.raises(ConfigError) as caught:
        find_mlps(model, ("*.mlp",))
    assert [one.key for one in caught.value.problems] == ["tiled_compute.mlps"]
    config = MobileViTConfig(num_attention_heads=2)
    attention = nn.ModuleList(nn.Sequential(MobileViTAttention(config, 8)) for _ in range(2))
    assert find_mlps(attention) == {}  # linear layers of one argument alone, as a feed-forward layer has them


def labelled_words(masked: bool) -> nn.Module:
    """A model that computes its loss by torch's cross entropy of its logits, and they have a bias of their own."""
    torch.manual_seed(1)
    if masked:
        return tiny("bert", dtype=torch.float32).train()
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0, "vocab_size": VOCABULARY}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    model = BartForConditionalGeneration(BartConfig(**sizes, **heads)).train()
    model.final_logits_bias.normal_()
    return model


@pytest.mark.parametrize("masked", [True, False])
def test_a_loss_by_cross_entropy_is_computed_in_tiles(masked):
    model = labelled_words(masked)
    plain = deepcopy(model)
    loss, wanted = gradients_of(plain, 2)
    tiled = TiledModel(model, TileSettings(loss_tokens=5, mlp_tokens=8, mlp=masked))
    assert tiled.module_names == ("", *(f"bert.encoder.layer.{at}" for at in (0, 1) if masked))
    assert model(**batch_of(0)).logits is None
    model.zero_grad()
    found_loss, found = gradients_of(model, 2)
    assert found_loss == pytest.approx(loss, abs=1e-6)
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        torch.testing.assert_close(found[name], one, msg=name)
    tiled.release()
    assert not [name for name, one in model.named_modules() if {"forward", "feed_forward_chunk"} & set(vars(one))]


def test_a_cross_entropy_that_tiles_do_not_have_is_refused():
    model = labelled_words(masked=False)
    TiledModel(model, TileSettings(loss_tokens=5, mlp=False))
    model.lm_head.register_forward_hook(
        lambda module, args, out: nn.functional.cross_entropy(out.view(-1, VOCABULARY), args[0][..., 0].view(-1))
    )
    with pytest.raises(PolyaccelError) as caught:
        model(**batch_of(0))
    assert "cross_entropy" in str(caught.value.value)


@pytest.mark.parametrize(
    ("tiled", "key"),
    [({}, "tiled_compute.loss"), ({"loss": False}, "tiled_compute.mlp"), ({"loss": False, "mlps": ["Mlp"]}, "mlps")],
)
def test_a_model_without_what_is_to_be_tiled_is_refused_by_the_key(tiled, key):
    config = {**make_config(0), "tiled_compute": {"enabled": True, **tiled}}

    def run(communicator):
        with pytest.raises(ConfigError) as caught:
            polyaccel.initialize(model=nn.Sequential(nn.Linear(4, 4)), config=config)
        assert key in str(caught.value)

    run_threads(1, run)
