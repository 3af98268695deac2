"""Several adapters of PEFT in one engine: two active ones, others that take turns, their own files, exact mode."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from parity_models import make_config, on_threads

import polyaccel
from polyaccel.errors import PolyaccelError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from safetensors.torch import load_file  # noqa: E402 - comes with transformers
from transformer_models import transformer_batch, transformer_model  # noqa: E402 - imports transformers

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
NAMES = ("default", "second")
STEPS = 3
ASKED = {"max_new_tokens": 4, "do_sample": False}


def build(dora=False):
    model = transformer_model("llama")
    torch.manual_seed(3)
    model = peft.get_peft_model(model, lora_of(["q_proj", "v_proj"], dora))
    model.add_adapter("second", lora_of(["q_proj", "down_proj"], dora))
    activate(model, NAMES)
    return model


def lora_of(targets, dora):
    return peft.LoraConfig(r=2, init_lora_weights=False, use_dora=dora, target_modules=targets)


def activate(model, names):
    model.base_model.set_adapter([*names])


def engine_of(model, stage, **keys):
    zero = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 0} if stage else {}
    return polyaccel.initialize(model=model, config=make_config(stage, zero=zero, **keys))[0]


def prompt():
    return {"input_ids": transformer_batch("llama", seed=1, length=4)["input_ids"]}


def plain_losses(dora, world):
    model = build(dora)
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


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_train_and_each_generates(stage, dora, tmp_path):
    """Together as in plain torch; alone, both, and fused with the tokens of the same model outside of the engine."""

    def train(communicator, model):
        engine = engine_of(model, stage)
        losses = []
        for step in range(STEPS):
            loss = engine(**transformer_batch("llama", seed=10 * step + communicator.rank)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if step == 1:
                compare(engine, model)
        send(engine, model, communicator)
        engine.destroy()
        return losses

    def compare(engine, model):
        twin = build(dora)
        twin.load_state_dict(engine.module_state_dict())
        for names in ((NAMES[0],), (NAMES[1],), NAMES):
            for one in (model, twin):
                activate(one, names)
            wanted = twin.eval().generate(**prompt(), **ASKED)
            for fuses in (False, True):
                assert torch.equal(engine.generate(**prompt(), **ASKED, fuse_adapters=fuses), wanted)

    def send(engine, model, communicator):
        """Each adapter alone, under the names of its own files."""
        state = engine.module_state_dict()
        for name in NAMES:
            model.set_adapter(name)
            folder = tmp_path / name
            engine.send_weights(folder, adapters_only=True)
            if communicator.rank == 0:
                saved = load_file(folder / "adapter_model.safetensors")
                own = peft.get_peft_model_state_dict(model, state, adapter_name=name)
                assert saved.keys() == own.keys()
                assert all(torch.equal(saved[key], own[key]) for key in saved)
                assert (folder / "adapter_config.json").exists()

    found = on_threads(2, train, partial(build, dora))[0]
    assert found == pytest.approx(plain_losses(dora, 2), rel=1e-5)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_adapters_take_turns(stage):
    """The one that is not active gets no gradients; its values rest while the other trains."""

    def train(communicator, model):
        engine = engine_of(model, stage)
        for name, other in (NAMES, NAMES[::-1]):
            model.set_adapter(name)
            before = {key: one.clone() for key, one in engine.module_state_dict().items() if "lora" in key}
            loss = engine(**transformer_batch("llama", seed=communicator.rank)).loss
            engine.backward(loss)
            engine.step()
            after = engine.module_state_dict()
            changed = {key for key, one in before.items() if not torch.equal(one, after[key])}
            assert changed
            assert not any(f".{other}." in key for key in changed)
        engine.destroy()

    on_threads(2, train, build)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_holds_the_trained_adapters_alone(stage, tmp_path):
    def save(communicator, model):
        engine = engine_of(model, stage)
        engine.backward(engine(**transformer_batch("llama", seed=communicator.rank)).loss)
        engine.step()
        engine.save_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
        state = {key: one.clone() for key, one in engine.module_state_dict().items()}
        engine.destroy()
        return state

    def load(communicator, model):
        engine = engine_of(model, 2)
        engine.load_checkpoint(str(tmp_path), load_module_strict=False)
        state = {key: one.clone() for key, one in engine.module_state_dict().items()}
        engine.destroy()
        return state

    wanted = on_threads(2, save, build)[0]
    found = on_threads(1, load, build)[0]
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    start = build().state_dict()
    assert {
        name for name in NAMES for key in wanted if f".{name}." in key and not torch.equal(start[key], wanted[key])
    } == {*NAMES}


def test_exact_mode_takes_two_adapters_and_no_norms_of_weights():
    engine = engine_of(build().eval(), 2, generation={"exact": True})
    asked = {**ASKED, "return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    out = engine.generate(**prompt(), **asked)
    for rows in (slice(0, 2), slice(1, 2)):
        sequences = out.sequences[rows]
        logits = engine(input_ids=sequences, attention_mask=torch.ones_like(sequences)).logits
        assert torch.equal(logits[:, 3:-1], torch.stack(out.logits, 1)[rows])
    engine.destroy()
    engine = engine_of(build(dora=True).eval(), 2, generation={"exact": True})
    with pytest.raises(PolyaccelError):
        engine.generate(**prompt(), **ASKED)
