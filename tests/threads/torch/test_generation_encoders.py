"""`engine.generate` of models with an encoder, and of a recurrent one: the tokens of the module's own `generate`."""

from __future__ import annotations

import copy

import pytest
import torch
from parity_models import make_config, on_threads

import polyaccel

transformers = pytest.importorskip("transformers")

UNITS = {"hybrid_engine": {"enabled": True, "pin_parameters": False}}
LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
WIDTHS = {"vocab_size": 64, "d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 0}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None}


def t5():
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def bart():
    config = transformers.BartConfig(**WIDTHS, **LAYERS, **TOKENS, max_position_embeddings=64)
    return transformers.BartForConditionalGeneration(config)


def whisper():
    sizes = {"num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 64}
    off = {"suppress_tokens": None, "begin_suppress_tokens": None}
    config = transformers.WhisperConfig(**WIDTHS, **LAYERS, **TOKENS, **sizes, **off)
    return transformers.WhisperForConditionalGeneration(config)


def mamba():
    sizes = {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "pad_token_id": 0}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


def inputs_of(build, rank):
    drawn = torch.Generator().manual_seed(rank)
    if build is whisper:
        return {"input_features": torch.randn(2, 8, 100, generator=drawn)}
    return {"input_ids": torch.randint(3, 64, (2, 5 + rank), generator=drawn)}


@pytest.mark.parametrize("keys", [{}, UNITS], ids=["once", "units"])
@pytest.mark.parametrize("stage", [3, 0])
@pytest.mark.parametrize("build", [whisper, t5, bart, mamba])
def test_tokens_are_those_of_the_module(build, stage, keys):
    """Before a step and after it. Ranks have different inputs and numbers of tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        plain = build().eval()

    def train(communicator, model):
        config = make_config(stage, optimizer={"type": "AdamW", "params": {"lr": 0.1}}, **keys)
        engine = polyaccel.initialize(model=model, config=config)[0]
        twin, inputs = copy.deepcopy(plain), inputs_of(build, communicator.rank)
        asked = {**inputs, "max_new_tokens": 4 + communicator.rank, "do_sample": False}
        found = []
        for step in range(2):
            found.append(engine.generate(**asked))
            assert torch.equal(found[-1], twin.generate(**asked))
            if step == 0:
                labels = torch.full((2, 5), 7 + communicator.rank)
                named = {"input_ids": labels, "labels": labels} if build is mamba else {**inputs, "labels": labels}
                engine.backward(engine(**named).loss)
                engine.step()
                twin.load_state_dict(engine.module_state_dict())
        assert not torch.equal(*found)

    on_threads(2, train, lambda: copy.deepcopy(plain))
