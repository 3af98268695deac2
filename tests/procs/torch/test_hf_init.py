"""Hugging Face models built and loaded inside zero.Init."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

import polyaccel
from polyaccel import zero
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.deferred_init.log import return_holes
from polyaccel.torch.deferred_init.values import is_deferred, prepare, value_of

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
)

TOKENS = torch.arange(18).view(2, 9)
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS = {
    "gpt2": lambda: GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=120, n_positions=64, **ENDS),
    "llama": lambda: LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=120, **ENDS,
    ),
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def config(request) -> PretrainedConfig:
    return CONFIGS[request.param]()


def both(build):
    """What `build` gives outside and inside zero.Init, from the same seed."""
    models, states = [], []
    with torch.random.fork_rng():
        for enabled in (False, True):
            torch.manual_seed(3)
            with zero.Init(enabled=enabled):
                models.append(build())
            states.append(torch.get_rng_state())
    assert torch.equal(*states)
    return models


def assert_same(found: torch.nn.Module, wanted: torch.nn.Module) -> None:
    """Equal parameters and buffers, and equal results once the parameters are in memory."""
    prepare(found)
    tensors = dict(wanted.named_parameters()), dict(found.named_parameters())
    assert list(tensors[0]) == list(tensors[1])
    for name, parameter in tensors[1].items():
        value = value_of(parameter)
        assert value.dtype == tensors[0][name].dtype
        assert torch.equal(value, tensors[0][name]), name
        parameter.data = value
    for ours, theirs in zip(found.buffers(), wanted.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        logits = [model.eval()(TOKENS).logits for model in (found, wanted)]
    assert torch.equal(*logits)


def test_from_config_gives_the_values_of_an_ordinary_build(config):
    wanted, found = both(lambda: AutoModelForCausalLM.from_config(config))
    deferred = [name for name, parameter in found.named_parameters() if is_deferred(parameter)]
    assert {name for name, parameter in found.named_parameters() if parameter.dim() == 2} <= {*deferred}
    tied = [model.lm_head.weight is model.get_input_embeddings().weight for model in (wanted, found)]
    assert tied[0] is tied[1]
    assert_same(found, wanted)


def test_from_pretrained_reads_lazily_and_initialises_what_the_files_lack(config, tmp_path):
    saved = AutoModelForCausalLM.from_config(config)
    saved.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    wanted, found = both(lambda: AutoModelForCausalLM.from_pretrained(tmp_path))
    assert_same(found, wanted)
    assert_same(*both(lambda: AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)))

    def with_new_head() -> torch.nn.Module:
        return AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=40)

    wanted, found = both(with_new_head)
    assert is_deferred(found.score.weight)
    assert_same(found, wanted)


def anonymous_mib() -> float:
    """Memory of this process that is no file's, once malloc has returned what is free."""
    gc.collect()
    return_holes()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux's /proc")
def test_loaded_parameters_stay_in_their_files_until_they_are_placed(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
    saved = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=8000, **ENDS))
    own = sum(parameter.nbytes for parameter in saved.parameters()) / 2**20
    saved.save_pretrained(tmp_path, max_shard_size="20MB")
    del saved

    def work(communicator) -> tuple[float, float]:
        start = anonymous_mib()
        with zero.Init():
            model = AutoModelForCausalLM.from_pretrained(tmp_path)
        loaded = anonymous_mib()
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        engine, *_ = polyaccel.initialize(model=model, config=config)
        placed = anonymous_mib()
        engine.zero.close()
        return loaded - start, placed - start

    loaded, placed = run_threads(1, work)[0]
    assert own > 90
    assert loaded < 0.2 * own
    assert placed < own + 40  # code that is loaded on first use too


def train(communicator, model: torch.nn.Module) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5000},
    }
    engine, *_ = polyaccel.initialize(model=model.eval(), config=config)
    losses = []
    for _ in range(3):
        loss = engine(TOKENS, labels=TOKENS).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def test_both_kinds_train_sharded(config, tmp_path):
    builds = [both(lambda: AutoModelForCausalLM.from_config(config)) for _ in range(2)]  # one model for each rank
    losses = []
    for kind in range(2):
        losses.append(run_threads(2, lambda c, kind=kind: train(c, builds[c.rank][kind])))
    assert losses[0] == losses[1]
    assert losses[0][0][-1] < losses[0][0][0]
