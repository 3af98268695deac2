"""The config's Muon where ranks have blocks of matrices or experts, by head, and with states off the device.

Compared with the paper's formula in float64.
"""

from __future__ import annotations

import copy

import pytest
import torch
from paper_muon import SETTINGS, PaperMuon
from parity_models import make_config
from transformer_models import trained_by, trained_plainly, transformer_model

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads


def trained(model, kind, ranks, stage, *, axis=1, zero=None, params=None, **sections):
    """Losses, norms and weights of each rank; `axis` neighbours share a batch."""
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    for each, own in zip(
        [one for made in copies for one in made.parameters()], [*model.parameters()] * ranks, strict=True
    ):
        vars(each).update(vars(own))  # which copies have not
    config = make_config(
        stage,
        zero={"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30, **(zero or {})},
        optimizer={"type": "Muon", "params": SETTINGS | (params or {})},
        gradient_clipping=1.0,
        **sections,
    )

    def go(communicator):
        engine, *_ = polyaccel.initialize(model=copies[communicator.rank], config=config)
        found = trained_by(engine, kind, communicator.rank // axis)
        weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return *found, weights

    return run_threads(ranks, go)


def plain(model, kind, ranks, parts=None):
    names = [name for name, _ in model.named_parameters()]
    return trained_plainly(model, kind, ranks, lambda parameters: PaperMuon(names, list(parameters), parts or {}))


def compare(found, wanted, axis=1, atol=2e-5):
    losses, norms, weights = wanted
    for rank, (own, of_norms, state) in enumerate(found):
        assert own == pytest.approx(losses[rank // axis], rel=1e-4)
        assert of_norms == pytest.approx(norms, rel=1e-3)
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], rtol=0.0, atol=atol)


@pytest.mark.parametrize(
    ("kind", "tensor", "data", "stage"),
    [("llama", 2, 1, 0), ("llama", 2, 2, 2), ("gpt2", 3, 1, 1), ("qwen3", 2, 1, 3), ("mixtral", 2, 1, 2)],
)
def test_tensor_ranks_gather_what_they_cut(kind, tensor, data, stage):
    model = transformer_model(kind)
    found = trained(model, kind, tensor * data, stage, axis=tensor, tensor_parallel={"autotp_size": tensor})
    compare([(losses, norms, {}) for losses, norms, _ in found], plain(model, kind, data), tensor)


@pytest.mark.parametrize(("kind", "experts", "data", "stage"), [("mixtral", 2, 1, 0), ("qwen3_moe", 2, 2, 3)])
def test_each_expert_is_a_matrix(kind, experts, data, stage):
    model = transformer_model(kind)
    section = {"enabled": True, "autoep_size": experts}
    found = trained(model, kind, experts * data, stage, expert_parallel=section)
    compare(found, plain(model, kind, experts * data))


@pytest.mark.parametrize(("tensor", "ranks", "stage"), [(1, 2, 2), (2, 2, 1), (1, 1, 3)])
def test_heads_are_orthogonalised_alone(tensor, ranks, stage):
    model = transformer_model("llama")
    rows = {"q_proj": (6, 4), "k_proj": (3, 4), "v_proj": (3, 4)}
    parts = {
        f"model.layers.{layer}.self_attn.{name}.weight": [(at * size, at * size + size, 0, 24) for at in range(count)]
        for layer in range(2)
        for name, (count, size) in rows.items()
    }
    section = {"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}
    found = trained(model, "llama", ranks, stage, axis=tensor, params={"per_head_muon": True}, **section)
    wanted = plain(model, "llama", ranks // tensor, parts)
    if tensor > 1:
        found = [(losses, norms, {}) for losses, norms, _ in found]
    compare(found, wanted, tensor)


def test_blocks_are_matrices_of_their_own_where_the_config_says_so():
    model, parts = transformer_model("gpt2", n_embd=24, n_head=4), {}
    for name, one in model.named_parameters():
        rows, columns = one.shape if one.dim() == 2 else (0, 0)
        if name.endswith("c_proj.weight"):
            parts[name] = [(0, rows // 2, 0, columns), (rows // 2, rows, 0, columns)]
        elif name.endswith("c_fc.weight"):
            parts[name] = [(0, rows, 0, columns // 2), (0, rows, columns // 2, columns)]
        one.use_muon = name in parts
    params, section = {"tp_mode": "blockwise"}, {"autotp_size": 2}
    found = trained(model, "gpt2", 2, 1, axis=2, params=params, tensor_parallel=section)
    names = [name if name in parts else f"embed.{name}" for name, _ in model.named_parameters()]  # that is AdamW's
    wanted = trained_plainly(model, "gpt2", 1, lambda parameters: PaperMuon(names, list(parameters), parts))
    compare([(losses, norms, {}) for losses, norms, _ in found], wanted, 2)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 3])
def test_states_off_the_device_change_no_bit(device, stage, tmp_path):
    model = transformer_model("llama")
    offload = {"offload_optimizer": {"device": device, "nvme_path": str(tmp_path)}}
    found, wanted = (trained(model, "llama", 2, stage, zero=zero) for zero in (offload, {}))
    for (_, _, ours), (_, _, theirs) in zip(found, wanted, strict=True):
        assert {name for name, value in theirs.items() if not torch.equal(ours[name], value)} == set()


def test_heads_that_no_config_states_are_refused():
    model = torch.nn.Linear(4, 4)

    def go(_):
        config = make_config(1, optimizer={"type": "Muon", "params": {"per_head_muon": True}})
        with pytest.raises(ConfigError) as caught:
            polyaccel.initialize(model=model, config=config)
        assert caught.value.problems[0].key == "optimizer.params.per_head_muon"

    run_threads(1, go)
