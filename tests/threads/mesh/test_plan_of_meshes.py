"""`polyaccel plan` for ranks that share layers and sequences: the bytes that the engine then allocates."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformer_models import transformer_model
from transformers import LlamaConfig, LlamaForCausalLM

import polyaccel
from polyaccel.cli.main import main
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.zero.plan.memory import estimate_memory
from polyaccel.zero.plan.traffic import step_traffic

SIZES = {
    "vocab_size": 67,
    "hidden_size": 56,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "num_key_value_heads": 7,
}


@pytest.mark.parametrize("stage", [1, 3])
def test_the_plan_of_shared_layers_is_what_the_engine_allocates(stage, tmp_path, capsys):
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    main(["plan", str(tmp_path / "ds.json"), str(tmp_path), "-n", "4", "--tensor", "2", "--json"])
    said = json.loads(capsys.readouterr().out)
    planned = next(each for each in said["settings"] if each["is_own"])["memory_nbytes"]["device"]
    torch.manual_seed(0)
    models = [LlamaForCausalLM(LlamaConfig(**SIZES)) for _ in range(4)]
    assert said["model"]["numel"] == sum(one.numel() for one in models[0].parameters())

    def of_rank(communicator):
        tree = {**config, "tensor_parallel": {"autotp_size": 2}}
        engine, *_ = polyaccel.initialize(model=models[communicator.rank], config=tree)
        rows = estimate_memory(engine.zero.plan).rows
        engine.destroy()
        return {row.purpose.value: row.nbytes for row in rows if row.place.value == "device"}

    for found in run_threads(4, of_rank):
        for purpose in ("parameters", "master weights", "optimizer states", "gradients"):
            assert planned[purpose] == found[purpose], purpose


@pytest.mark.parametrize(("stage", "experts", "tensor"), [(1, 2, 1), (3, 2, 1), (2, 3, 1), (3, 2, 2)])
def test_experts_are_planned_over_the_ranks_that_have_them(stage, experts, tensor, tmp_path, capsys):
    """Stacks over `expert_data`, all else over `data`."""
    model = transformer_model("mixtral")
    model.config.architectures = ["MixtralForCausalLM"]
    model.config.save_pretrained(tmp_path)
    ranks = 2 * experts * tensor
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
        "expert_parallel": {"enabled": True, "autoep_size": experts},
        "tensor_parallel": {"autotp_size": tensor},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    main(["plan", str(tmp_path / "ds.json"), str(tmp_path), "-n", str(ranks), "--json"])
    said = json.loads(capsys.readouterr().out)
    planned = next(each for each in said["settings"] if each["is_own"])
    assert said["model"]["numel"] == sum(one.numel() for one in model.parameters())
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def of_rank(communicator):
        engine, *_ = polyaccel.initialize(model=copies[communicator.rank], config=config)
        plan = engine.zero.plan
        engine.destroy()
        rows = {row.purpose.value: row.nbytes for row in estimate_memory(plan).rows if row.place.value == "device"}
        return rows, step_traffic(plan).total_numel

    for found, traffic in run_threads(ranks, of_rank):
        for purpose in ("parameters", "master weights", "optimizer states", "gradients"):
            assert planned["memory_nbytes"]["device"][purpose] == found[purpose], purpose
        assert planned["traffic"]["total_numel"] == traffic


def test_a_number_of_parameters_says_nothing_of_experts(tmp_path, capsys):
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "mesh": {"expert": 2}}))
    assert main(["plan", str(tmp_path / "ds.json"), "64M", "-n", "4"]) == 1
    assert "how many of 64M parameters are those of experts, which 2 ranks share" in capsys.readouterr().err


def test_a_number_of_parameters_is_cut_evenly(tmp_path, capsys):
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8}))
    whole, shared = [], []
    for options, into in (([], whole), (["--tensor", "2", "--sequence", "2"], shared)):
        main(["plan", str(tmp_path / "ds.json"), "64M", "-n", "8", "--json", *options])
        into.append(json.loads(capsys.readouterr().out))
    nbytes = [each[0]["settings"][0]["memory_nbytes"]["device"]["parameters"] for each in (whole, shared)]
    assert nbytes[1] == pytest.approx(nbytes[0] / 2, rel=1e-3)
    assert whole[0]["checkpoint_nbytes"] == shared[0]["checkpoint_nbytes"]
