"""Unmodified models of transformers, trained by one key of the config, at every stage, against plain torch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hf_models import VOCABULARY, tiny
from pairwise import combinations
from parity_models import SMALL_BUCKET, assert_close, make_config, snapshot

import polyaccel
from polyaccel.comm.init.threads import run_threads
from polyaccel.errors import ConfigError, PolyaccelError

STEPS = 3
LENGTH = 21
EPS = 1e-5  # Adam divides by it where a gradient is nothing but rounding, whose sign it would follow else


def batch_of(step: int, micro: int, place: int) -> dict[str, Any]:
    """The micro-batch of one data-parallel place: packed documents, and labels in the first half only now and then."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + place)
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    positions = torch.cat([torch.arange(8), torch.arange(LENGTH - 8)]).expand(2, -1)
    labels = ids.clone()
    if (step + micro) % 2:
        labels[:, 5:] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "use_cache": False}


def train_plainly(model: torch.nn.Module, data: int, accumulation: int, clip: float) -> tuple[list[float], list[float]]:
    """The mean losses and the norms of a training of AdamW on the mean of all micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            for place in range(data):
                loss = model(**batch_of(step, micro, place)).loss / (data * accumulation)
                loss.backward()
                total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


@combinations(
    method=["ulysses", "ring"],
    stage=[0, 1, 2, 3],
    data=[1, 2],
    sequence=[2, 3],
    model=["llama", "gpt2"],
    accumulation=[1, 2],
    clip=[0.0, 0.3],
)
def test_training_is_that_of_one_rank(method, stage, data, sequence, model, accumulation, clip):
    start = tiny(model, dtype=torch.float32).train()
    plain = deepcopy(start)
    losses, norms = train_plainly(plain, data, accumulation, clip)
    zero = {"reduce_bucket_size": SMALL_BUCKET, "stage3_param_persistence_threshold": 4}
    config = make_config(stage, accumulation=accumulation, gradient_clipping=clip, zero=zero)
    config["train_micro_batch_size_per_gpu"] = 2
    config["optimizer"]["params"] |= {"weight_decay": 0.01, "eps": EPS}
    config |= {"sequence_parallel_size": sequence, "sequence_parallel": {"method": method}}
    models = [deepcopy(start) for _ in range(data * sequence)]

    def run(communicator):
        own = models[communicator.rank]
        engine, *_ = polyaccel.initialize(model=own, model_parameters=own.parameters(), config=config)
        place, seen, found = communicator.rank // sequence, [], []
        for step in range(STEPS):
            for micro in range(accumulation):
                loss = engine(**batch_of(step, micro, place)).loss
                engine.backward(loss)
                engine.step()
                seen.append(float(loss.detach()))
            found.append(engine.get_global_grad_norm())
        engine.destroy()
        return seen, found, snapshot(own)

    ranks = run_threads(data * sequence, run)
    for seen, found, params in ranks:
        assert found == pytest.approx(norms, rel=1e-5)
        assert seen == ranks[0][0] or data > 1
        assert_close(params, snapshot(plain), 1e-5)
    means = [sum(seen[at] for seen, _, _ in ranks) / len(ranks) for at in range(STEPS * accumulation)]
    of_steps = [sum(means[at : at + accumulation]) / accumulation for at in range(0, len(means), accumulation)]
    assert of_steps == pytest.approx(losses, rel=1e-5)


def test_the_loader_gives_all_ranks_of_a_sequence_one_batch():
    start = tiny("llama", dtype=torch.float32).train()
    samples = [{"input_ids": row, "labels": row} for row in torch.randint(3, VOCABULARY, (8, 12))]
    config = {**make_config(2), "train_micro_batch_size_per_gpu": 1, "mesh": {"sequence": 2}}

    def run(communicator):
        engine, _, loader, _ = polyaccel.initialize(model=deepcopy(start), training_data=samples, config=config)
        batches = [batch["input_ids"].tolist() for batch in loader]
        losses = [float(engine.train_batch()) for _ in range(2)]
        engine.destroy()
        return batches, losses

    ranks = run_threads(4, run)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert len(ranks[0][0]) == 4
    assert sorted(ranks[0][0] + ranks[2][0]) == sorted([one["input_ids"].tolist()] for one in samples)


def test_a_model_that_cuts_its_sequences_itself_is_left_alone_and_another_one_is_named():
    config = {**make_config(0), "sequence_parallel_size": 2}

    def run(communicator):
        own = torch.nn.Linear(3, 3)
        with pytest.raises(PolyaccelError) as caught:
            polyaccel.initialize(model=own, config=config)
        assert caught.value.value == "Linear"
        polyaccel.initialize(model=own, config={**config, "sequence_parallel": {"method": "manual"}})[0].destroy()
        with pytest.raises(ConfigError) as caught:
            polyaccel.initialize(model=own, config={**config, "sequence_parallel": {"method": "rings"}})
        assert [(problem.key, problem.value) for problem in caught.value.problems] == [
            ("sequence_parallel.method", "rings")
        ]

    run_threads(2, run)
