"""Rollouts of eleven architectures: tokens of the module's own `generate`, at stages, on data and tensor ranks, with
adapters and fused ones. Most cases are left to `make test-slow`."""

from __future__ import annotations

import copy
from functools import cache, partial
from itertools import product

import pytest
import torch
from parity_models import make_config, on_threads

import polyaccel

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from decoder_models import model_of  # noqa: E402 - imports transformers
from transformer_models import VOCABULARY, transformer_batch  # noqa: E402 - imports transformers

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
TARGETS = {
    **{kind: ["q_proj", "v_proj"] for kind in ("llama", "mistral", "qwen2", "qwen3", "mixtral", "opt", "gemma")},
    "phi": ["q_proj", "fc1"],
    "phi3": ["qkv_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "gpt_neox": ["query_key_value", "dense_4h_to_h"],
}
CASES = [
    f"{kind}-{stage}-{world}-{tensor}"
    for kind, stage, world, tensor in product(sorted(TARGETS), (0, 2, 3), (1, 2), (1, 2))
]
ASKED = {"max_new_tokens": 6, "do_sample": False}


@cache
def model_with(kind: str, adapters: bool) -> torch.nn.Module:
    """Made once a kind: cases copy it."""
    model = model_of(kind, **({"output_router_logits": False} if kind == "mixtral" else {}))
    if adapters:
        torch.manual_seed(3)
        lora = peft.LoraConfig(
            r=2, init_lora_weights=False, target_modules=TARGETS[kind], fan_in_fan_out=kind == "gpt2"
        )
        model = peft.get_peft_model(model, lora).eval()
    return model


def prompts():
    """Of uneven lengths, padded on the left."""
    ids = torch.randint(1, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row in range(3):
        mask[row, :row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logits_are_those_of_the_module(case):
    """Before and after a step; with adapters apart and fused, and without any."""
    kind, *numbers = case.split("-")
    stage, world, tensor = map(int, numbers)
    keys = {"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}
    zero = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 30} if stage else {}

    def compare(engine, plain, adapters):
        twin = copy.deepcopy(plain).eval()
        twin.load_state_dict(engine.module_state_dict())
        asked = {**prompts(), **ASKED}
        wanted = twin.generate(**asked)
        for fuses in (False, True) if adapters else (False,):
            found = engine.generate(**asked, fuse_adapters=fuses)
            assert torch.equal(found, wanted), f"fused: {fuses}"
        engine.eval()
        with torch.no_grad():
            logits, own = (one(input_ids=wanted).logits for one in (engine, twin))
        torch.testing.assert_close(logits, own, rtol=1e-5, atol=1e-5)

    def train(communicator, model, plain, adapters):
        engine = polyaccel.initialize(model=model, config=make_config(stage, zero=zero, **keys))[0]
        compare(engine, plain, adapters)
        engine.backward(engine(**transformer_batch(kind, seed=communicator.rank // tensor)).loss)
        engine.step()
        compare(engine, plain, adapters)
        engine.destroy()

    for adapters in (False, True):
        plain = model_with(kind, adapters)
        on_threads(world * tensor, partial(train, plain=plain, adapters=adapters), partial(copy.deepcopy, plain))
