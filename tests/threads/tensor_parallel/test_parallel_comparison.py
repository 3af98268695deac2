"""Blocks are compared, whole and cut: what differs is cut by its own layout, or stays whole; the model trains right."""

from __future__ import annotations

import copy
import functools
import random
from types import MethodType

import pytest
import torch
from cut_blocks import LAYOUTS, SHARED, STATISTICS, TRANSFORMERS, VOCABULARY, CutBlocks, cut_model
from hf_models import tiny
from mixing_models import mobilebert
from pairwise import combinations
from torch import Tensor, nn
from torch.nn import functional
from transformer_models import KINDS, transformer_model
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.sharding.tensor_shard import cuts_of, local_slice
from polyaccel.torch.tensor_parallel import comparison
from polyaccel.torch.tensor_parallel.make_plan import make_plan
from polyaccel.torch.tensor_parallel.parallelize import parallelize_module

STAY_WHOLE = {
    **dict.fromkeys(STATISTICS, 2),
    "codegen of 4 heads": 2,
    "trocr": 4,
    "doge": 2,
    "gemma3n": 1,
}
"""How many blocks cannot be cut over two ranks."""


def loss_of(model: nn.Module) -> Tensor:
    ids = torch.randint(1, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(2))
    out = model(ids)
    logits = out if isinstance(out, Tensor) else out.logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def assert_trains_as_whole(model: nn.Module, ranks: int) -> int:
    """Compare loss and all gradients of one step; returns how many blocks stay whole."""
    plan = make_plan(model, ranks)
    whole = copy.deepcopy(model)
    loss = loss_of(whole)
    loss.backward()
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def run(communicator: Communicator) -> tuple[Tensor, dict[str, Tensor], dict[str, object]]:
        own = copies[communicator.rank]
        parallelize_module(own, communicator, plan)
        found = loss_of(own)
        found.backward()
        cuts = cuts_of(own)
        named = {name: cuts[p].block for name, p in own.named_parameters(remove_duplicate=False) if p in cuts}
        return found.detach(), gradients(own), named

    results = run_threads(ranks, run)
    for found, _, _ in results:
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)
    for name, wanted in gradients(whole).items():
        if name in results[0][2]:
            pairs = [(own[name], local_slice(wanted, blocks[name])) for _, own, blocks in results]
        else:
            pairs = [(torch.stack([own[name] for _, own, _ in results]).mean(0), wanted)]
        for own, part in pairs:
            bound = 1e-4 * float(wanted.abs().max()) + 1e-7
            torch.testing.assert_close(own, part, rtol=1e-4, atol=bound, msg=lambda text, name=name: f"{name}: {text}")
    return len(plan.whole)


@pytest.mark.parametrize("kind", [*SHARED, "prelu of features", *LAYOUTS, *STATISTICS, "plain", *TRANSFORMERS])
def test_a_model_trains_as_in_one_process(kind: str) -> None:
    assert assert_trains_as_whole(cut_model(kind), 2) == STAY_WHOLE.get(kind, 0)


@pytest.mark.parametrize("kind", ["prelu", "by heads", "interleaved gates", "apertus", "mvp"])
def test_three_ranks_train_as_one(kind: str) -> None:
    assert assert_trains_as_whole(cut_model(kind), 3) == 0


def test_a_parameter_of_each_feature_is_cut_with_the_features() -> None:
    model = CutBlocks("prelu of features", inner=16)
    assert assert_trains_as_whole(model, 2) == 0
    cut = {f"{one.name}.{name}" for one in make_plan(model, 2).modules for name in one.cuts}
    assert "layers.0.mlp.act.weight" in cut


def test_the_plan_names_a_block_that_stays_whole_once_and_what_is_not_proven() -> None:
    plan = make_plan(CutBlocks("softmax"), 2)
    assert set(plan.whole) == {"layers.0.mlp", "layers.1.mlp"}
    assert not any(".mlp." in each.name for each in plan.modules)
    assert sum("layers.*.mlp stays whole" in line for line in plan.table().splitlines()) == 1

    class Odd(CutBlocks):
        """A model that takes no tensor."""

        def forward(self, batch: dict[str, Tensor], extra: int) -> Tensor:
            return super().forward(batch["ids"]) * extra

    class Asking(nn.Module):
        """A block that takes two tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.fc2(self.fc1(x) * y.sum())

    model = Odd("plain")
    model.asking = Asking()
    plan = make_plan(model, 2)
    assert set(plan.unproven) == {"asking"}  # blocks of one tensor are compared all the same
    assert {"asking.fc1", "asking.fc2"} <= {each.name for each in plan.modules}


def test_words_whose_weight_another_module_reads_stay_whole() -> None:
    """MobileBERT's head multiplies by the weight of its output layer, and does not call that layer."""
    plan = make_plan(mobilebert(), 2)
    assert plan.whole.keys() == {"mobilebert.embeddings.word_embeddings"}
    assert plan.modules
    assert not {"cls.predictions.decoder", *plan.whole} & {one.name for one in plan.modules}
    assert "lm_head" in {one.name for one in make_plan(tiny("llama"), 2).modules}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("put", ["the model", "its class", "the output layer"])
def test_words_stay_whole_under_a_forward_that_a_script_gave(put: str, tied: bool) -> None:
    """As by TRL, whose losses are computed from the weight of the output layer."""
    model = transformer_model("llama", tie_word_embeddings=tied)
    give_forward(model, put)
    assert assert_trains_as_whole(model, 2) == (1 if put == "the output layer" and not tied else 2)


@pytest.mark.parametrize(("replaced", "whole"), [("q_norm", 2), ("mlp", 0), ("self_attn", 0), ("embed_tokens", 2)])
def test_modules_with_a_forward_of_a_scripts_train_as_whole(replaced: str, whole: int) -> None:
    """A class that shares a module would not be asked for it; layers inside are called as before."""
    model = transformer_model("qwen3")
    for name, module in model.named_modules():
        if name.endswith(replaced):
            module.forward = MethodType(type(module).forward, module)
    assert assert_trains_as_whole(model, 2) == whole


def give_forward(model: nn.Module, put: str) -> None:
    """Replace the forward of a model, which is copied, or that of its output layer."""
    if put == "the output layer":
        head = model.lm_head
        head.forward = MethodType(lambda self, x: functional.linear(x.float(), self.weight.float()), head)
        return

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, ids: Tensor, **kwargs: object) -> Tensor:
        return functional.linear(self.model(ids).last_hidden_state, self.lm_head.weight)

    if put == "its class":
        model.__class__ = type("Patched", (type(model),), {"__module__": type(model).__module__, "forward": forward})
    else:
        model.forward = MethodType(forward, model)


class ReadingMixtral(MixtralForCausalLM):
    """Its logits are computed by the class itself, and their dtype is read before that."""

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.model(**inputs).last_hidden_state.to(self.lm_head.weight.dtype)
        return functional.linear(hidden, self.lm_head.weight)


def test_copies_of_mixtures_that_are_large_can_be_run() -> None:
    """Grouped products refuse copies whose matrices are one short vector each."""
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=8)
    plan = make_plan(ReadingMixtral(config), 2)
    assert plan.whole.keys() == {"lm_head"}
    assert "lm_head" in {one.name for one in make_plan(MixtralForCausalLM(config), 2).modules}
    qwen = Qwen3MoeConfig(
        **sizes, num_attention_heads=8, num_key_value_heads=2, num_experts=8, moe_intermediate_size=96
    )
    model = Qwen3MoeForCausalLM(qwen)
    model.model.layers[2].self_attn.o_proj = nn.Linear(model.model.layers[2].self_attn.o_proj.in_features, 128)
    assert not make_plan(model, 2).unproven  # the attention of the last layer, which is another one, was called too


def test_nothing_of_the_script_changes_and_no_values_are_needed() -> None:
    model = CutBlocks("by heads")
    model.register_buffer("seen", torch.zeros(()))
    model.register_forward_hook(lambda *_: model.seen.add_(1))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    states, python = torch.get_rng_state(), random.getstate()
    plan = make_plan(model, 2)
    assert torch.equal(torch.get_rng_state(), states)
    assert random.getstate() == python
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())
    assert make_plan(copy.deepcopy(model).to("meta"), 2) == plan


@combinations(kind=list(KINDS), ranks=[2, 3])
def test_right_cuts_agree_narrowed_too(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_LARGE", 0)
    monkeypatch.setattr(comparison, "_NARROW", 8)
    model = transformer_model(kind)
    plan = make_plan(model, ranks)
    assert (plan.whole, plan.unproven) == ({}, {})
    assert plan == make_plan(model, ranks, compare=False)
