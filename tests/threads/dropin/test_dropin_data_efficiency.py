"""Configs of DeepSpeed's data efficiency library, and the names that its scripts use, over the drop-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd, save_without_random_ltd
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
)
from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
    batch_by_seqlens,
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed,
    scale_lr,
)
from torch import Tensor, nn

from polyaccel.data import DataAnalysis, IndexedDataset, vocabulary_rarity
from polyaccel.errors import ConfigError, PolyaccelError

LENGTH, WORDS = 32, 40
TOKENS = np.random.default_rng(0).integers(0, WORDS, (200, LENGTH)) ** 2 // WORDS


def sampling(folder: Path, **seqlen: Any) -> dict[str, Any]:
    """The curriculum of DeepSpeed's GPT example (ds_config_gpt_TEMPLATE.json), with small numbers."""
    rarity = {
        "index_to_sample_path": f"{folder}/voc/voc_index_to_sample_percentile_merged",
        "index_to_metric_path": f"{folder}/voc/voc_index_to_metric",
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        "min_difficulty": 1,
        "max_difficulty": 100,
        "schedule_type": "fixed_root",
        "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 1, "root_degree": 2},
    }
    length = {
        "difficulty_type": "value",
        "clustering_type": "single_cluster",
        "min_difficulty": 8,
        "max_difficulty": LENGTH,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 8},
    }
    curriculum = {
        "enabled": True,
        "data_cluster_path": f"{folder}/clusters",
        "curriculum_metrics": {"voc": rarity, "seqlen": length | seqlen},
    }
    return {"enabled": True, "num_epochs": 1, "num_workers": 0, "curriculum_learning": curriculum}


def routing(order: str = "batch_seq_dim") -> dict[str, Any]:
    """The token dropping of the same example."""
    ltd = {
        "enabled": True,
        "total_layer_num": 4,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": [1, 2],
        "model_mask_name": "attention_mask",
        "model_type": "decoder",
        "hidden_state_order": order,
        "random_ltd_schedule": {
            "min_value": 8,
            "max_value": LENGTH,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 4, "seq_per_step": 8},
        },
    }
    return {"enabled": True, "random_ltd": ltd}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("analysis")
    analysis = DataAnalysis(TOKENS, found, metrics={"voc": vocabulary_rarity(np.bincount(TOKENS.flat))})
    analysis.map()
    analysis.reduce()
    return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.seen: list[int] = []

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        self.seen.append(hidden.shape[1])
        weights = attention_mask[0, 0].float()
        return hidden + self.mix(weights @ hidden / weights.sum(-1, keepdim=True))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, length = self.embed(tokens), tokens.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask)
        return nn.functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def start(efficiency: dict[str, Any], **named: Any) -> Any:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "data_efficiency": {"enabled": True, "seed": 1234, **efficiency},
    }
    return deepspeed.initialize(model=Words(), config=config, **named)


def test_the_gpt_examples_config_runs(folder: Path) -> None:
    both = {"data_sampling": sampling(folder), "data_routing": routing()}
    engine, _, loader, _ = start(both, training_data=TOKENS)
    assert engine.data_efficiency_enabled()
    assert engine.curriculum_learning_enabled()
    assert engine.random_ltd_enabled()
    assert engine.random_ltd_config()["total_layer_num"] == 4
    engine.set_data_post_process_func(lambda batch, state: batch[:, : state["current_difficulties"]["seqlen"]])
    assert convert_to_random_ltd(engine, Layer) is engine
    with pytest.raises(ConfigError):
        convert_to_random_ltd(engine, nn.Linear)
    rare = vocabulary_rarity(np.bincount(TOKENS.flat))
    rarities = sorted(rare(one) for one in TOKENS)
    lengths = []
    for step, batch in zip(range(8), loader, strict=False):
        if batch.shape[1] == LENGTH:
            share = min(1.0, (1 + 99 * ((step + 1) / 10) ** 0.5) / 100)
            assert max(rare(one.numpy()) for one in batch) <= rarities[int(200 * share)]
        lengths.append(batch.shape[1])
        engine.backward(engine(batch))
        engine.step()
    assert lengths == [8, 16, 16, 24, 24, 32, 32, 32]  # 8 + 24 t / 6, in multiples of 8
    assert engine.module.layers[0].seen == lengths
    assert engine.module.layers[1].seen == [8, 8, 16, 24, 24, 32, 32, 32]  # at most 8 + 24 t / 4, t from 0
    assert set(save_without_random_ltd(engine)) == set(Words().state_dict())


def test_a_custom_schedule_is_set_by_deepspeeds_name(folder: Path) -> None:
    engine, _, loader, _ = start({"data_sampling": sampling(folder, schedule_type="custom")}, training_data=TOKENS)
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 3 * step})
    engine.set_data_post_process_func(lambda batch, state: state["current_difficulties"]["seqlen"])
    assert [found for _, found in zip(range(3), loader, strict=False)] == [3, 6, 9]


def test_what_is_not_there_is_refused(folder: Path) -> None:
    batches = {"dynamic_batching": {"enabled": True, "max_tokens": 100}}
    with pytest.raises(ConfigError):
        start({"data_sampling": sampling(folder) | batches})  # both choose the samples
    engine = start({"data_sampling": sampling(folder)})[0]
    with pytest.raises(PolyaccelError):
        engine.set_data_post_process_func(None)
    with pytest.raises(ConfigError):
        convert_to_random_ltd(engine, Layer)


def test_token_files_by_deepspeeds_names(tmp_path: Path) -> None:
    builder = MMapIndexedDatasetBuilder(f"{tmp_path}/data.bin", dtype=torch.int32)
    builder.add_item(torch.tensor([1, 2]))
    builder.add_item_numpy(np.array([3]))
    builder.end_document()
    with pytest.raises(PolyaccelError):
        builder.finalize(f"{tmp_path}/other.idx")
    builder.finalize(f"{tmp_path}/data.idx")
    data = MMapIndexedDataset(f"{tmp_path}/data", skip_warmup=True)
    assert [one.tolist() for one in data[:]] == [[1, 2], [3]]
    assert (data.size(0), data.get_doc_idx().tolist()) == (2, [0, 2])
    assert isinstance(data, IndexedDataset)


LENGTHS = [3, 5, 2, 9, 4, 4, 1, 7, 8, 2, 6, 3, 12]


def test_groups_are_deepspeeds() -> None:
    """Its own function gives these for LENGTHS[:-1] and one sample more, which it loses (0.19.5 to 0.19.8)."""
    groups, sizes, longest = batch_by_seqlens(LENGTHS, max_tokens=10, effective_batch_size=2)
    assert groups == [(0, [0, 1, 2]), (0, [3]), (1, [4, 5, 6]), (1, [7]), (2, [8, 9]), (2, [10, 11])]
    assert (sizes, longest) == ([4, 4, 4], [9, 7, 8])
    ids = [11, 0, 4, 5, 7]
    groups, sizes, longest = batch_by_seqlens(LENGTHS, 10, ids, sequence_picking_order="seqlen", max_batch_size=2)
    assert (groups, sizes, longest) == ([(0, [11, 0]), (1, [4, 5]), (2, [7])], [2, 2, 1], [3, 4, 7])
    assert [scale_lr(4, 16, 0.5, method) for method in ("linear", "sqrt", "none", None)] == [2.0, 1.0, 0.5, 0.5]
    with pytest.raises(PolyaccelError):
        scale_lr(4, 16, 0.5, "cubic")


def test_a_loader_and_its_schedule_by_deepspeeds_names(tmp_path: Path) -> None:
    samples = [torch.full((length, 1), float(length)) for length in LENGTHS]
    batching = {"enabled": True, "max_tokens": 10, "metrics_path": str(tmp_path), "lr_scaling_method": "linear"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.1, "warmup_type": "linear"},
        },
        "data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": batching}},
    }
    engine = deepspeed.initialize(model=nn.Linear(1, 1), config=config)[0]
    loader, schedule, arguments = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
        samples, engine, dataloader_collate_fn=torch.cat, batch_seqlens_fn=len
    )
    engine.lr_scheduler = schedule
    base, found = schedule.get_last_lr(), []
    for at, batch in enumerate(loader):
        engine.backward(engine(batch).square().mean())
        if at % 2:
            found.append(engine.get_lr()[0])
        engine.step()
    assert len(arguments["dataset"]) == len(loader) == 6
    assert base == [0.0]
    assert found == pytest.approx([0.0, 0.0, 2 * 0.1 / 4])  # WarmupLR begins twice at its minimum
    state = schedule.state_dict()
    schedule.step()
    schedule.load_state_dict(state)
    assert engine.get_lr() == pytest.approx([2 * 0.1 * 2 / 4])
