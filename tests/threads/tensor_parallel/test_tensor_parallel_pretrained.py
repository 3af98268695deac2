"""Models that were loaded by `from_pretrained` inside zero.Init: each tensor rank reads its blocks from the files, and
trains what whole loading trains."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import make_config
from torch import Tensor, nn
from transformer_models import transformer_batch, transformer_model
from transformers import AutoModelForCausalLM

import polyaccel
from polyaccel import zero
from polyaccel.comm.base import Communicator
from polyaccel.core.block import Block
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.deferred_init.values import is_deferred
from polyaccel.torch.sharding.tensor_shard import cuts_of
from polyaccel.torch.tensor_parallel import parallelize
from polyaccel.torch.tensor_parallel.ranks import TensorRanks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's /proc says what is mapped")
STEPS = 2


def saved(kind: str, folder: Path, shard: str = "10GB") -> Path:
    transformer_model(kind).save_pretrained(folder, max_shard_size=shard)
    return folder


def loaded(folder: Path, **named: Any) -> nn.Module:
    with zero.Init():
        return AutoModelForCausalLM.from_pretrained(folder, **named).train()


def losses_of(model: nn.Module, kind: str) -> list[float]:
    """Of plain torch in one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**transformer_batch(kind, seed=step)).loss
        loss.backward()
        found.append(loss.item())
        optimizer.step()
    return found


def train(communicator: Communicator, copies: list[nn.Module], kind: str, stage: int) -> tuple[list[float], nn.Module]:
    config = make_config(
        stage,
        optimizer={"type": "AdamW", "params": {"lr": 2e-3}},
        tensor_parallel={"autotp_size": communicator.world_size},
    )
    mine = copies[communicator.rank]
    engine, *_ = polyaccel.initialize(model=mine, config=config)
    found = []
    for step in range(STEPS):
        loss = engine(**transformer_batch(kind, seed=step)).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return found, mine


original_taken = parallelize.local_slice


@pytest.mark.parametrize("shard", ["10GB", "20KB"], ids=["one-file", "several-files"])
@pytest.mark.parametrize(("kind", "ranks", "stage"), [("llama", 2, 3), ("llama", 3, 1), ("gpt2", 2, 0), ("gpt2", 3, 3)])
def test_ranks_read_their_blocks_and_train_the_loaded_model(
    kind: str, ranks: int, stage: int, shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(kind, tmp_path, shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "20KB")
    wanted = losses_of(AutoModelForCausalLM.from_pretrained(folder).train(), kind)
    copies = [loaded(folder) for _ in range(ranks)]
    whole = {name: p.shape for name, p in copies[0].named_parameters()}
    read: list[int] = []

    def counted(weight: Tensor, block: Block) -> Tensor:
        found = original_taken(weight, block)
        read.append(found.nbytes)
        return found

    def refused(ranks: TensorRanks, tensor: Tensor) -> None:
        raise AssertionError(f"a weight of shape {tuple(tensor.shape)} was sent whole")

    monkeypatch.setattr(parallelize, "local_slice", counted)
    monkeypatch.setattr(TensorRanks, "broadcast", refused)
    results = run_threads(ranks, train, copies, kind, stage)
    for found, _ in results:
        assert found == pytest.approx(wanted, rel=1e-5)
    parts = [
        {name: cuts_of(mine)[p] for name, p in mine.named_parameters() if p in cuts_of(mine)} for _, mine in results
    ]
    assert sum(read) == 4 * sum(whole[name].numel() for name in parts[0])


def test_weights_that_the_files_have_otherwise_are_put_together_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Mixtral's experts stand in one tensor, and one by one in its files."""
    folder = saved("mixtral", tmp_path)
    wanted = losses_of(AutoModelForCausalLM.from_pretrained(folder).train(), "mixtral")
    copies = [loaded(folder) for _ in range(2)]
    fused = {name for name, p in copies[0].named_parameters() if p.dim() == 3}
    assert fused
    assert all(is_deferred(p) for name, p in copies[0].named_parameters() if name in fused)
    caplog.set_level(logging.INFO, "polyaccel")
    for found, _ in run_threads(2, train, copies, "mixtral", 1):
        assert found == pytest.approx(wanted, rel=1e-5)
    (said,) = [each.getMessage() for each in caplog.records if "read block by block" in each.getMessage()]
    assert f"{len(fused)} whole on every rank" in said


def test_weights_of_another_type_are_whole_on_every_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved("llama", tmp_path)
    copies = [loaded(folder, dtype=torch.float64) for _ in range(2)]
    wanted = losses_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train(), "llama")
    caplog.set_level(logging.INFO, "polyaccel")
    for found, _ in run_threads(2, train, copies, "llama", 0):
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("change", ["another-checkpoint", "written-to"])
def test_ranks_that_loaded_other_values_take_the_first_ones(change: str, tmp_path: Path) -> None:
    """Files of one name and size with other values, and values that one rank has changed since."""
    folder = saved("llama", tmp_path / "first")
    wanted = losses_of(AutoModelForCausalLM.from_pretrained(folder).train(), "llama")
    other = folder
    if change == "another-checkpoint":
        other = tmp_path / "second"
        model = transformer_model("llama")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)
        model.save_pretrained(other)
    copies = [loaded(folder), loaded(other)]
    before = {name: parameter.detach().clone() for name, parameter in copies[1].named_parameters()}
    if change == "written-to":
        with torch.no_grad():
            for parameter in copies[1].parameters():
                parameter[..., -1] += 1.0
    for found, _ in run_threads(2, train, copies, "llama", 1):
        assert found == pytest.approx(wanted, rel=1e-5)
    if change == "another-checkpoint":  # a private mapping: what is sent is written into no file
        again = AutoModelForCausalLM.from_pretrained(other)
        assert all(torch.equal(parameter, before[name]) for name, parameter in again.named_parameters())


def test_a_summary_is_for_loaded_models_only() -> None:
    def work(communicator: Communicator) -> str | None:
        parameters = {"weight": nn.Parameter(torch.ones(2, 2))}
        return parallelize.WholeValues(parameters, TensorRanks(communicator)).summary()

    assert run_threads(2, work) == [None, None]
