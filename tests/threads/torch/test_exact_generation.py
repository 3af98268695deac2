"""`"generation": {"exact": true}`: logits of sampled tokens have the bits of those that training computes."""

from __future__ import annotations

import inspect

import pytest
import torch
from pairwise import combinations
from parity_models import make_config, on_threads
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import polyaccel
from polyaccel.config import load_config
from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.torch.exact.operations import ExactOperations

transformers = pytest.importorskip("transformers")
from transformer_models import VOCABULARY, transformer_model  # noqa: E402 - imports transformers

SMALL = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 30}
MIXTURES = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"]
KINDS = ["llama", "llama_two_keys", "qwen2", "qwen3", "gpt2", "phi3", "gpt_neox", *MIXTURES]
NEW = 5


def engine_of(model, stage=0, **keys):
    config = make_config(stage, zero=SMALL if stage else {}, generation={"exact": True}, **keys)
    return polyaccel.initialize(model=model.eval(), config=config)[0]


def drawn_prompts(seed: int) -> tuple[Tensor, Tensor]:
    """Prompts of 1 to 5 rows, padded on the left to lengths that differ."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = (int(torch.randint(1, 6, (), generator=generator)) for _ in range(2))
    words = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(words)
    for row in range(1, rows):
        mask[row, : int(torch.randint(0, length, (), generator=generator))] = 0
    return words * mask, mask


def logits_of_training(engine, sequences: Tensor, mask: Tensor) -> Tensor:
    """Logits of a forward pass with gradients, as a script computes them."""
    named = {"input_ids": sequences, "attention_mask": mask}
    if "position_ids" in inspect.signature(engine.module.forward).parameters:
        named["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    logits: Tensor = engine(**named).logits
    assert logits.requires_grad
    return logits


def require_equal_bits(engine, seed: int) -> None:
    """Sample for drawn prompts, and compare with training on the batch and on one of its sequences alone."""
    prompts, mask = drawn_prompts(seed)
    asked = {"do_sample": True, "eos_token_id": None, "max_new_tokens": NEW, "output_logits": True}
    out = engine.generate(prompts, attention_mask=mask, return_dict_in_generate=True, seed=seed, **asked)
    sampled = torch.stack(out.logits, 1)
    start, whole = prompts.shape[1], torch.cat([mask, mask.new_ones(len(mask), NEW)], 1)
    trained = logits_of_training(engine, out.sequences, whole)[:, start - 1 : -1]
    assert torch.equal(trained.to(sampled.dtype), sampled)
    row = seed % len(prompts)
    first = int((mask[row] == 0).sum())  # without its padding
    alone = logits_of_training(engine, out.sequences[row : row + 1, first:], whole[row : row + 1, first:])
    assert torch.equal(alone[0, start - first - 1 : -1].to(sampled.dtype), sampled[row])


@combinations(
    kind=KINDS, stage=[0, 2, 3], world=[1, 2], precision=["fp32", "bf16", "autocast"], recomputes=[False, True]
)
def test_sampled_logits_are_those_of_training(kind, stage, world, precision, recomputes):
    if kind in MIXTURES and precision == "bf16":
        precision = "autocast"  # torch's own gradient of grouped products needs longer rows
    keys = {"bf16": {"bf16": {"enabled": True}}, "autocast": {"torch_autocast": {"enabled": True}}}.get(precision, {})
    if recomputes:
        keys["activation_checkpointing"] = {"enabled": True}

    def work(communicator, model):
        engine = engine_of(model, stage, **keys)
        for step in range(2):
            require_equal_bits(engine, 7 * step + communicator.rank)
            words = drawn_prompts(30 + step)[0]
            logits = logits_of_training(engine, words, torch.ones_like(words))
            engine.backward(logits.float().log_softmax(-1)[..., 0].mean())
            engine.step()
        engine.destroy()

    changes = {"output_router_logits": False} if kind == "mixtral" else {}  # transformers' own fails for padded prompts
    on_threads(world, work, lambda: transformer_model(kind, **changes))


@pytest.mark.parametrize("first", [0, 10, 20, 30, 40])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_fifty_drawn_batches(kind, first):
    engine = engine_of(transformer_model(kind))
    for seed in range(first, first + 10):
        require_equal_bits(engine, 1000 + seed)


def test_a_pass_that_backward_runs_again_has_the_same_bits():
    """The blocks of a script's own `checkpoint`, in a backward pass that the engine does not run."""
    model = transformer_model("llama")
    engine = engine_of(model)
    seen = []
    model.model.layers[0].mlp.register_forward_hook(lambda part, inputs, output: seen.append(output.detach().clone()))
    block = model.model.layers[0]
    hidden = torch.randn(3, 4, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    angles = model.model.rotary_emb(hidden, torch.arange(4)[None])
    with set_checkpoint_early_stop(False):
        checkpoint(block, hidden, position_embeddings=angles, use_reentrant=False).sum().backward()
    block(hidden[:1], position_embeddings=angles)
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0][:1], seen[2])
    engine.destroy()
    assert not model._forward_hooks
    assert not block._forward_pre_hooks


def test_a_kernel_whose_sums_depend_on_the_number_of_rows_is_found_by_the_first_rollout(monkeypatch):
    right = ExactOperations.bmm
    monkeypatch.setattr(ExactOperations, "bmm", lambda self, *of: right(self, *of) * (1 + 1e-6 * (of[0].shape[1] > 3)))
    engine = engine_of(transformer_model("llama"))
    with pytest.raises(PolyaccelError) as caught:
        engine.generate(torch.tensor([[5, 6, 7], [0, 8, 9]]), max_new_tokens=2, do_sample=False)
    assert len(caught.value.value) == 2


def test_longer_and_other_rollouts_are_compared_again(monkeypatch):
    """Products of the first rollout are right; only more rows, or a call of another kind, have other sums."""
    engine = engine_of(transformer_model("llama"))
    prompts, asked = torch.tensor([[5, 6, 7]]), {"do_sample": False, "eos_token_id": None}
    engine.generate(prompts, max_new_tokens=2, **asked)
    right = ExactOperations.bmm
    monkeypatch.setattr(ExactOperations, "bmm", lambda self, *of: right(self, *of) * (1 + 1e-6 * (of[0].shape[1] > 3)))
    for changes in ({"max_new_tokens": 6}, {"max_new_tokens": 2, "repetition_penalty": 1.5}):
        with pytest.raises(PolyaccelError) as caught:
            engine.generate(prompts, **asked, **changes)
        assert len(caught.value.value) == 2


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_sequence_are_refused(kind):
    model = transformer_model("llama")
    model.model.rotary_emb.rope_type = kind
    with pytest.raises(PolyaccelError) as caught:
        engine_of(model).generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    assert caught.value.value == kind


def test_a_rollout_that_cannot_be_compared_is_logged(caplog):
    engine = engine_of(transformer_model("llama"))
    with caplog.at_level("WARNING", logger="polyaccel"):
        engine.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, num_beams=2, do_sample=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_tiles_are_exact_and_a_compiled_model_is_refused():
    engine = engine_of(transformer_model("llama"), tiled_compute={"enabled": True})
    require_equal_bits(engine, 0)
    words = torch.tensor([[5, 6, 7]])
    engine.train()
    engine.backward(engine(input_ids=words, labels=words).loss)
    engine.compile(backend="eager")
    with pytest.raises(PolyaccelError) as caught:
        engine(input_ids=words)
    assert caught.value.value == "LlamaForCausalLM"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
def test_fused_adapters_are_refused():
    """Training does not compute with them."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(transformer_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    engine = engine_of(model)
    require_equal_bits(engine, 1)
    with pytest.raises(PolyaccelError):
        engine.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, fuse_adapters=True)


def test_cut_sequences_and_jax_are_refused():
    for axis in ("sequence", "pipe"):
        with pytest.raises(ConfigError) as caught:
            load_config({"train_batch_size": 1, "mesh": {axis: 2}, "generation": {"exact": True}})
        assert [problem.key for problem in caught.value.problems] == ["generation.exact"]
