"""Hugging Face models and PEFT adapters at stage 3: the same numbers, whole files."""

from __future__ import annotations

import os

import pytest
import torch
from parity_models import batch, make_config, on_threads, train_on_threads
from safetensors.torch import load_file
from stage3_models import assert_same_run, seeded

import polyaccel
from polyaccel import zero

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

SMALL = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 0}


def gpt2():
    config = transformers.GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=3, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config)


def llama():
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=17, max_position_embeddings=16, num_key_value_heads=1, **sizes)
    return transformers.LlamaForCausalLM(config)


def mixtral():
    """More experts in a layer than layers."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=17, num_key_value_heads=1, num_local_experts=5, **sizes)
    return transformers.MixtralForCausalLM(config)


MODELS = {"gpt2": seeded(gpt2), "llama": seeded(llama), "mixtral": seeded(mixtral)}


def language_loss(model, step, micro, rank):
    tokens = batch(step, micro, rank, size=6)[0][None]
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_they_train_as_at_stage_2(name, checkpointing):
    def build():
        model = MODELS[name]()
        if checkpointing:
            model.activation_checkpointing_enable()
        return model

    runs = []
    for zero_keys in ({"stage": 2}, SMALL, {**SMALL, "stage3_prefetch_bucket_size": 0}):
        config = make_config(3, accumulation=2, gradient_clipping=0.5, zero=zero_keys)
        runs.append(train_on_threads(2, config, 2, build=build, loss_fn=language_loss))
    for run in runs[1:]:
        assert_same_run(run, runs[0])


@pytest.mark.parametrize("ahead", [{}, {"stage3_prefetch_bucket_size": 0}], ids=["ahead", "on demand"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_they_train_alike_wherever_their_states_rest(tmp_path, name, ahead):
    def train(params, states):
        path = {"nvme_path": str(tmp_path)}
        tiers = {"offload_param": {**path, **params}, "offload_optimizer": {**path, "device": states}}
        config = make_config(3, gradient_clipping=0.5, zero={**SMALL, **ahead, **tiers})
        return train_on_threads(2, config, 2, build=MODELS[name], loss_fn=language_loss)

    wanted = train({"device": "none"}, "none")
    assert_same_run(train({"device": "cpu"}, "cpu"), wanted)
    assert_same_run(train({"device": "nvme", "max_in_cpu": 0}, "nvme"), wanted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_they_generate_in_step_and_apart(name):
    """In step all ranks generate as many tokens; from an unwrapped model each as many as it likes."""

    def work(communicator, model, plain):
        engine = polyaccel.initialize(model=model, config=make_config(3, zero=SMALL))[0]
        tokens = batch(0, 0, communicator.rank, size=3)[0][None]
        in_step = engine.module.generate(tokens, max_new_tokens=3, do_sample=False)
        assert torch.equal(in_step, plain.generate(tokens, max_new_tokens=3, do_sample=False))
        with zero.unwrap_model_for_generation(engine) as model:
            apart = model.generate(tokens, max_new_tokens=1 + 2 * communicator.rank, do_sample=False)
        assert apart.shape[1] == 4 + 2 * communicator.rank
        engine.backward(language_loss(engine, 0, 0, communicator.rank))
        engine.step()

    on_threads(2, work, MODELS[name], MODELS[name]())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_save_pretrained_writes_whole_files(tmp_path, name):
    def work(communicator, model):
        engine = polyaccel.initialize(model=model, config=make_config(3, zero=SMALL))[0]
        state = engine.module_state_dict()
        if communicator.rank == 0:
            engine.module.save_pretrained(tmp_path, state_dict=state)
        communicator.barrier()

    on_threads(2, work, MODELS[name])
    wanted = MODELS[name]()
    loaded = type(wanted).from_pretrained(tmp_path)
    assert [key for key, value in wanted.state_dict().items() if not torch.equal(loaded.state_dict()[key], value)] == []


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
def test_a_peft_adapter_is_saved_whole(tmp_path):
    peft = pytest.importorskip("peft")

    def build():
        return peft.get_peft_model(
            gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        )

    build = seeded(build)

    def work(communicator, model):
        engine = polyaccel.initialize(model=model, config=make_config(3, zero=SMALL))[0]
        wanted = peft.get_peft_model_state_dict(build_wanted)
        engine.module.save_pretrained(tmp_path / str(communicator.rank))
        for step in range(2):
            engine.backward(language_loss(engine, step, 0, communicator.rank))
            engine.step()
        return wanted

    build_wanted = build()
    wanted = on_threads(2, work, build)[0]
    for rank in range(2):
        saved = load_file(tmp_path / str(rank) / "adapter_model.safetensors")
        assert saved.keys() == wanted.keys()
        assert all(torch.equal(saved[name], wanted[name]) for name in wanted)
