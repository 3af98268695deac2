"""Generation where ranks are processes over gloo: the decoder, an inference engine with tensor ranks, exact
log-probabilities, and a rank that is killed in a rollout."""

from __future__ import annotations

import os
import signal
from functools import wraps

import pytest
import torch
from parity_models import make_config

import polyaccel
from polyaccel.errors import LaunchError
from polyaccel.testkit.ranks.procs import RankPool

pytest.importorskip("transformers")
from transformer_models import transformer_batch, transformer_model

PATIENCE_S = 240.0
ZERO = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 10}
GREEDY = {"max_new_tokens": 5, "do_sample": False}
PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11]]


def infer_here(communicator, kind):
    """Logits and tokens of two tensor ranks, and those of the untouched model."""
    model = transformer_model(kind).eval()
    prompt = transformer_batch(kind, length=5)["input_ids"]
    with torch.no_grad():
        wanted = model(prompt).logits, model.generate(prompt, **GREEDY)
    engine = polyaccel.init_inference(transformer_model(kind), tensor_parallel={"tp_size": 2})
    found = engine(prompt).logits, engine.generate(prompt, **GREEDY)
    parts = sum(parameter.numel() for parameter in engine.module.parameters())
    return wanted, found, parts < sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_two_tensor_ranks_infer_what_the_model_does(rank_pool, kind):
    for (logits, tokens), (found, texts), is_split in rank_pool(2).run(infer_here, kind):
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(texts, tokens)
        assert is_split


def decode_here(communicator, stage):
    """Tokens of the decoder for a list of prompts, after a step, and those of the module's own method one by one."""
    engine = polyaccel.initialize(model=transformer_model("llama"), config=make_config(stage, zero=ZERO))[0]
    engine.backward(engine(**transformer_batch("llama", seed=communicator.rank)).loss)
    engine.step()
    prompts = PROMPTS[communicator.rank :]  # ranks have unequally many
    found = engine.generate(prompts, batch_size=2, **GREEDY)
    longest = max(map(len, PROMPTS))  # and so many calls, which stage 3 takes part in
    own = [
        engine.generate(torch.tensor([one]), own_decoder=False, **GREEDY)[0] for one in (*prompts, *PROMPTS)[:longest]
    ]
    return all(torch.equal(text, wanted) for text, wanted in zip(found, own, strict=False)), len(found) == len(prompts)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_decoder_has_the_tokens_of_the_module(rank_pool, stage):
    assert rank_pool(2).run(decode_here, stage) == [(True, True)] * 2


def exact_here(communicator, stage):
    """The logits of sampled tokens, and those of training on the same sequences; and logits of a common prompt."""
    config = {**make_config(stage, zero=ZERO if stage else {}), "generation": {"exact": True}}
    engine = polyaccel.initialize(model=transformer_model("llama").eval(), config=config)[0]
    pairs = []
    for step in range(2):
        prompt = transformer_batch("llama", seed=5 * step + communicator.rank, length=3 + communicator.rank)[
            "input_ids"
        ]
        asked = {"do_sample": True, "eos_token_id": None, "max_new_tokens": 4, "output_logits": True}
        out = engine.generate(prompt, return_dict_in_generate=True, **asked)
        trained = engine(input_ids=out.sequences).logits
        sampled = torch.stack(out.logits, 1)
        pairs.append(torch.equal(trained[:, prompt.shape[1] - 1 : -1].detach(), sampled))
        engine.backward(trained.log_softmax(-1)[..., 0].mean())
        engine.step()
    with torch.no_grad():
        common = engine(input_ids=transformer_batch("llama", length=4)["input_ids"]).logits
    return pairs, common


def test_exact_log_probabilities(rank_pool):
    pool = rank_pool(2)
    results = [result for stage in (0, 3) for result in pool.run(exact_here, stage)]
    assert [pairs for pairs, _ in results] == [[True, True]] * 4
    assert all(torch.equal(common, results[0][1]) for _, common in results)


def killed_here(communicator, stage, prompts, hybrid_engine):
    """Rank 1 is killed at its second pass of a rollout; at stages without gathers rank 0 finds it in its step."""
    from polyaccel.torch.generation.decode.model import Decoder

    config = {**make_config(stage, zero=ZERO), "hybrid_engine": hybrid_engine}
    engine = polyaccel.initialize(model=transformer_model("gpt2"), config=config)[0]
    calls = []

    def count(step):
        @wraps(step)  # transformers looks at the arguments
        def counted(*inputs, **named):
            calls.append(step)
            if communicator.rank == 1 and len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*inputs, **named)

        return counted

    Decoder.step = count(Decoder.step)
    engine.module.prepare_inputs_for_generation = count(engine.module.prepare_inputs_for_generation)
    ids = prompts if prompts is not None else transformer_batch("gpt2", length=4)["input_ids"]
    engine.generate(ids, batch_size=None if prompts is None else 1, max_new_tokens=4, do_sample=False)
    for _ in range(2):
        engine.backward(engine(**transformer_batch("gpt2")).loss)
        engine.step()


@pytest.mark.parametrize(
    ("stage", "prompts", "pins"), [(0, None, True), (2, PROMPTS, True), (3, PROMPTS, True), (3, PROMPTS, False)]
)
def test_a_rank_that_is_killed_in_a_rollout_is_named(stage, prompts, pins):
    section = {"enabled": True, "pin_parameters": pins}
    with (
        RankPool(2, backend="gloo", comm_timeout_s=PATIENCE_S, grace_s=PATIENCE_S) as pool,
        pytest.raises(LaunchError) as caught,
    ):
        pool.run(killed_here, stage, prompts, section, timeout_s=PATIENCE_S)
    assert caught.value.value == (1, -9)
    reports = "\n".join(caught.value.__notes__)
    assert "rank 0 raised CommError" in reports
    assert "ranks [1] did not take part" in reports
