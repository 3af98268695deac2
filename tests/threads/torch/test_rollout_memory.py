"""What a rollout takes and how long: the cache of keys and values next to whole parameters, and times of both parts."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from parity_models import make_config, on_threads

import polyaccel
from polyaccel.torch.generation.lengths import cache_nbytes

transformers = pytest.importorskip("transformers")
from transformer_models import transformer_batch, transformer_model  # noqa: E402 - imports transformers

SMALL = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 30}


def held_nbytes(cache):
    """Bytes of all tensors of a cache, those of an encoder among them."""
    parts = [getattr(cache, name) for name in ("self_attention_cache", "cross_attention_cache") if hasattr(cache, name)]
    return sum(layer.keys.nbytes + layer.values.nbytes for one in parts or [cache] for layer in one.layers)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("gpt2", {"max_new_tokens": 5}),
        ("llama", {"max_length": 11, "num_return_sequences": 2, "do_sample": True}),
        ("llama", {"max_new_tokens": 4, "num_beams": 3}),
        ("t5", {"max_new_tokens": 5, "min_new_tokens": 5}),
    ],
)
def test_the_cache_is_as_large_as_is_said(kind, named):
    """The last token has no keys and values yet."""
    torch.manual_seed(0)
    if kind == "t5":
        sizes = {"d_model": 16, "d_kv": 4, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2, "d_ff": 16}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=128, decoder_start_token_id=0, **sizes)
        )
    else:
        model = transformer_model(kind)
    model.generation_config.eos_token_id = None
    ids = transformer_batch("gpt2", seed=1, length=6)["input_ids"]
    said = cache_nbytes(model, (ids,), named, batch_size=None, dtype=torch.float32)
    output = model.eval().generate(ids, **named, return_dict_in_generate=True)
    found = held_nbytes(output.past_key_values)
    longest = output.sequences.shape[1] + (ids.shape[1] if kind == "t5" else 0)
    assert found < said
    assert said * (longest - 1) // longest == found
    half = cache_nbytes(model, (ids,), named, batch_size=1, dtype=torch.bfloat16)
    assert half * 2 * len(ids) == said
    assert cache_nbytes(model, (ids,), {**named, "use_cache": False}, batch_size=None, dtype=torch.float32) == 0
    assert cache_nbytes(torch.nn.Linear(1, 1), (ids,), named, batch_size=None, dtype=torch.float32) == 0


def test_a_large_cache_makes_ranks_gather_unit_by_unit(monkeypatch):
    """The same free memory holds the parameters next to a small batch, and not next to a large one."""

    def work(communicator, model):
        engine = polyaccel.initialize(model=model, config=make_config(3, zero=SMALL))[0]
        gathered = engine.zero.params.gathered
        total = sum(param.bucket.numel for param in engine.zero.params if param.is_sharded)
        free = 4 * total * 2 * communicator.world_size  # both ranks' parameters are half of it
        stats = SimpleNamespace(free_nbytes=free + 40_000, total_nbytes=None)
        monkeypatch.setattr(type(engine.accelerator), "memory_stats", lambda *_: stats)
        prompt = transformer_batch("gpt2", length=4)["input_ids"]
        peaks = []
        for ids in (prompt[:1], prompt.repeat(100, 1)):
            communicator.barrier()
            gathered.peak_numel = 0
            engine.generate(ids, max_new_tokens=2, do_sample=False)
            peaks.append(gathered.peak_numel == total)
        return peaks

    assert on_threads(2, work, partial(transformer_model, "gpt2", n_layer=7)) == [[True, False]] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_times_of_a_rollout_are_events(tmp_path, stage):
    config = {**make_config(stage, zero=SMALL if stage else {}), "run_dir": str(tmp_path / "run")}
    engine = polyaccel.initialize(model=transformer_model("gpt2"), config=config)[0]
    assert engine.rollout_times is None
    engine.generate(transformer_batch("gpt2", length=4)["input_ids"], max_new_tokens=2, do_sample=False)
    times = engine.rollout_times
    assert times.generate_s > 0
    assert times.hand_over_s > 0
    engine.destroy()
    lines = [json.loads(line) for file in (tmp_path / "run").rglob("*.jsonl") for line in file.read_text().splitlines()]
    found = {line["tag"]: line["value"] for line in lines if str(line.get("tag")).startswith("rollout/")}
    assert found == {"rollout/hand_over_s": times.hand_over_s, "rollout/generate_s": times.generate_s}
