"""Large models are proven in a small model of their structure, and errors in them are found there."""

from __future__ import annotations

import pytest
import torch
from parity_models import on_threads
from planted_change import plant
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import polyaccel
from polyaccel.errors import VerificationError
from polyaccel.torch.rewrites.cuts import TensorParallel
from polyaccel.torch.verify import first_step
from polyaccel.torch.verify.first_step import FirstStepProof
from polyaccel.torch.verify.shrunk_model import ShrunkModel
from polyaccel.torch.verify.untouched import NotProvenError

SIZES = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "bos_token_id": 998, "eos_token_id": 999}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("POLYACCEL_VERIFY")
    monkeypatch.setattr(first_step, "_LARGE", 1000)


def llama(_=None):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))


def train(ranks, model):
    config = {"verify": "always", "mesh": {"tensor": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = polyaccel.initialize(model=model, config={**config, "train_micro_batch_size_per_gpu": 2})
    ids = torch.randint(0, 1000, (2, 12), generator=torch.Generator().manual_seed(0))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.destroy()


@pytest.fixture
def proofs(monkeypatch):
    found = []
    monkeypatch.setattr(FirstStepProof, "_conclude", lambda self, engine, proof, seconds: found.append(proof))
    return found


def test_a_large_model_is_proven_in_its_small_form(proofs):
    on_threads(2, train, llama)
    assert [one.is_proven for one in proofs] == [True, True], proofs
    assert proofs[0].acted["tensor_parallel"]


def test_an_error_in_a_large_model_is_found_in_its_small_form(monkeypatch):
    def double(model):
        model.model.layers[1].mlp.down_proj.weight.register_hook(lambda one: 2 * one)

    plant(monkeypatch, TensorParallel, double)
    with pytest.raises(VerificationError) as error:
        on_threads(2, train, llama)
    assert error.value.value == "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("build", [llama, lambda: MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS))])
def test_counts_stay_and_widths_share_one_factor(build):
    with torch.device("meta"):
        large = build()
    before = torch.get_rng_state()
    small = ShrunkModel(large).module
    assert torch.equal(torch.get_rng_state(), before)
    ours, theirs = small.config, large.config
    for name in ("num_attention_heads", "num_key_value_heads", "num_local_experts", "num_experts_per_tok"):
        assert getattr(ours, name, None) == getattr(theirs, name, None)
    assert ours.hidden_size * 4 == theirs.hidden_size
    assert ours.intermediate_size * 4 == theirs.intermediate_size
    assert ours.num_hidden_layers == 2
    assert ours.vocab_size % 64 == theirs.vocab_size % 64
    assert {ours.bos_token_id, ours.eos_token_id} <= set(range(ours.vocab_size // 2, ours.vocab_size))


def test_a_model_with_another_structure_than_its_config_is_refused():
    model = llama()
    model.model.layers[0].mlp.more = torch.nn.Linear(2, 2)
    with pytest.raises(NotProvenError):
        ShrunkModel(model)
    with pytest.raises(NotProvenError):
        ShrunkModel(torch.nn.Linear(2, 2))
