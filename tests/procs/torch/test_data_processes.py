"""Packed documents sampled by difficulty where ranks are processes, and their continuation on one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hf_models import VOCABULARY, tiny
from parity_models import make_config

import polyaccel
from polyaccel.data import DataAnalysis, PackedDataset


def packed():
    numbers = np.random.default_rng(0)
    return PackedDataset([numbers.integers(3, VOCABULARY, size) for size in numbers.integers(2, 20, 90)], 20)


def documents_of(row):
    return int((row["position_ids"] == 0).sum())


def analyse(communicator, folder):
    analysis = DataAnalysis(packed(), folder, metrics={"documents": documents_of}, chunk=7)
    analysis.map(worker=communicator.rank, workers=communicator.world_size)
    communicator.all_gather_object(None)
    if communicator.rank == 0:
        analysis.reduce()
    communicator.all_gather_object(None)


def config_for(folder, micro):
    metric = {
        "index_to_sample_path": f"{folder}/documents/documents_index_to_sample",
        "index_to_metric_path": f"{folder}/documents/documents_index_to_metric",
        "difficulty_type": "percentile",
        "min_difficulty": 20,
        "max_difficulty": 100,
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 10},
    }
    curriculum = {"enabled": True, "curriculum_metrics": {"documents": metric}}
    sampling = {"enabled": True, "curriculum_learning": curriculum}
    zero = {"stage3_param_persistence_threshold": 0}
    config = make_config(3, zero=zero, data_efficiency={"enabled": True, "data_sampling": sampling})
    return config | {"train_micro_batch_size_per_gpu": micro}


def train(config, steps, load="", save=""):
    model = tiny("llama", dtype=torch.float32).train()
    engine = polyaccel.initialize(model=model, training_data=packed(), config=config)[0]
    if load:
        engine.load_checkpoint(load)
    batches, losses, found = iter(engine.training_dataloader), [], []
    for _ in range(steps):
        batch = next(batches)
        loss = engine(**batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        found.append(batch["input_ids"])
        losses.append((loss.item(), int((batch["labels"] != -100).sum())))
    if save:
        engine.save_checkpoint(save)
    engine.destroy()
    return losses, torch.cat(found)


def train_here(communicator, folder):
    analyse(communicator, folder)
    first = train(config_for(folder, 2), 3, save=f"{folder}/saved")
    return first, train(config_for(folder, 2), 3, load=f"{folder}/saved")


def test_two_ranks_sample_as_one_does(rank_pool, tmp_path):
    ranks = rank_pool(2).run(train_here, str(tmp_path))
    config = config_for(tmp_path, 4)
    for part, load in ((0, ""), (1, f"{tmp_path}/saved")):
        losses, samples = train(config, 3, load=load)
        of_ranks = torch.stack([rank[part][1].view(3, 2, -1) for rank in ranks], 1).flatten(0, 2)
        assert torch.equal(of_ranks, samples)
        if part == 0:  # the first step has the same weights
            pairs = [rank[0][0][0] for rank in ranks]
            mean = sum(loss * tokens for loss, tokens in pairs) / sum(tokens for _, tokens in pairs)
            assert mean == pytest.approx(losses[0][0], rel=1e-5)
