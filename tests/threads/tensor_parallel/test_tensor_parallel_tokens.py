"""Models whose tensor ranks share the tokens between attention and feed-forward layers: losses, logits and gradients
are those of one rank, whatever the length, and what autograd keeps between regions is a part."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from pairwise import combinations
from parity_models import make_config
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformer_models import trained_plainly, transformer_batch, transformer_model
from transformers.models.llama.modeling_llama import LlamaMLP

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.errors import ConfigError, ShardingError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.sharding.tensor_shard import cuts_of
from polyaccel.torch.tensor_parallel.make_plan import make_plan
from polyaccel.torch.tensor_parallel.parallelize import local_slice, parallelize_module

KINDS = ["llama", "llama_two_keys", "gpt2", "qwen3", "phi3", "gpt_neox"]
STEPS = 3


def run(model: nn.Module, kind: str, **batch: int) -> dict[str, Any]:
    """A forward and a backward pass: loss, logits, gradients by name."""
    out = model(**transformer_batch(kind, **batch))
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), "grads": grads}


def on_ranks(model: nn.Module, ranks: int, body: Any, *, shared: bool = True) -> list[Any]:
    """`body(copy of the model, cut; communicator)` on every rank."""
    plan = make_plan(model, ranks, share_tokens=shared)
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def cut(communicator: Communicator) -> Any:
        parallelize_module(copies[communicator.rank], communicator, plan)
        return body(copies[communicator.rank], communicator)

    return run_threads(ranks, cut)


def assert_same(results: list[Any], wanted: dict[str, Any]) -> None:
    """Each rank has the whole loss and logits, and its block of the gradient of what is cut; of the others the mean of
    the ranks' is the whole gradient."""
    for found, _ in results:
        torch.testing.assert_close(found["loss"], wanted["loss"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["logits"], wanted["logits"], rtol=1e-5, atol=2e-5)
        assert found["grads"].keys() == wanted["grads"].keys()
    for name, whole in wanted["grads"].items():
        bound = 1e-5 * max(float(whole.abs().max()), 1.0)
        close = {"rtol": 1e-5, "atol": bound, "msg": lambda text, name=name: f"{name}: {text}"}
        if name in results[0][1]:
            for found, blocks in results:
                torch.testing.assert_close(found["grads"][name], local_slice(whole, blocks[name]), **close)
        else:
            mean = torch.stack([found["grads"][name] for found, _ in results]).mean(0)
            torch.testing.assert_close(mean, whole, **close)


def blocks_of(model: nn.Module) -> dict[str, Any]:
    found = cuts_of(model)
    return {name: found[p].block for name, p in model.named_parameters(remove_duplicate=False) if p in found}


@combinations(ranks=[2, 3, 4], length=[8, 9, 3], kind=KINDS)
def test_a_model_that_shares_tokens_is_the_whole_one(kind: str, ranks: int, length: int) -> None:
    """Three tokens over four ranks are not shared: every rank has them all."""
    model = transformer_model(kind)
    wanted = run(copy.deepcopy(model), kind, length=length)
    assert_same(on_ranks(model, ranks, lambda mine, _: (run(mine, kind, length=length), blocks_of(mine))), wanted)


class InPlace(LlamaMLP):
    """It changes its input, and the outputs of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        x *= 0.5
        gate, up = self.gate_proj(x), self.up_proj(x)
        out: Tensor = self.down_proj(self.act_fn(gate.add_(0.1)).mul_(up.mul_(2.0)))
        return out.add_(1.0)


@pytest.mark.parametrize("shared", [False, True])
def test_tensors_may_be_changed_in_place(shared: bool) -> None:
    model = transformer_model("llama")
    for layer in model.model.layers:
        layer.mlp.__class__ = InPlace
    wanted = run(copy.deepcopy(model), "llama", rows=2, length=8)
    assert_same(
        on_ranks(model, 2, lambda own, _: (run(own, "llama", rows=2, length=8), blocks_of(own)), shared=shared), wanted
    )


def test_passes_of_other_lengths_recompute_with_their_own() -> None:
    """Two passes before either backward, with activations that are recomputed: each has its own number of tokens."""
    model = transformer_model("llama", use_cache=False)

    def both(mine: nn.Module, _: Any = None) -> Any:
        losses = [mine(**transformer_batch("llama", seed, length=length)).loss for seed, length in ((1, 9), (2, 6))]
        for loss in losses:
            loss.backward()
        found = {"loss": sum(losses).detach(), "logits": torch.zeros(())}
        return found | {"grads": {name: p.grad for name, p in mine.named_parameters()}}

    wanted = both(copy.deepcopy(model))
    for reentrant in (False, True):
        again = copy.deepcopy(model)
        again.activation_checkpointing_enable({"use_reentrant": reentrant})
        assert_same(on_ranks(again, 2, lambda mine, c: (both(mine, c), blocks_of(mine))), wanted)


def kept_nbytes(model: nn.Module, kind: str) -> int:
    """Bytes of distinct memory that autograd keeps in a forward pass, parameters aside."""
    found: dict[int, int] = {}
    held: list[Tensor] = []
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held.append(tensor)
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(transformer_batch(kind, length=32)["input_ids"])
    return sum(found.values())


def test_what_is_kept_between_regions_is_a_part() -> None:
    model = transformer_model("llama", num_hidden_layers=4, use_cache=False)
    whole = on_ranks(model, 2, lambda mine, _: kept_nbytes(mine, "llama"), shared=False)
    parts = on_ranks(model, 2, lambda mine, _: kept_nbytes(mine, "llama"))
    layer = 2 * 32 * 24 * 4  # what one norm of a layer reads: two rows of 32 tokens
    assert all(before - after > 4 * 4 * layer // 2 for before, after in zip(whole, parts, strict=True))


@pytest.mark.parametrize(
    ("kind", "tensor", "data", "stage"), [("llama", 2, 1, 3), ("llama", 3, 1, 0), ("gpt2", 2, 2, 1), ("gpt2", 3, 1, 2)]
)
def test_engines_train_what_one_rank_trains(kind: str, tensor: int, data: int, stage: int) -> None:
    model = transformer_model(kind)
    adam = partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.0)
    losses, norms, _ = trained_plainly(model, kind, data, adam, STEPS)
    config = make_config(
        stage,
        zero={"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30},
        optimizer={"type": "AdamW", "params": {"lr": 2e-3}},
        gradient_clipping=1.0,
        tensor_parallel={"autotp_size": tensor, "sequence_sharded": True},
        activation_checkpointing={"enabled": stage == 3},
    )
    copies = [copy.deepcopy(model) for _ in range(tensor * data)]

    def train(communicator: Communicator) -> tuple[list[float], list[float]]:
        engine, *_ = polyaccel.initialize(model=copies[communicator.rank], config=config)
        found, of_norms = [], []
        for step in range(STEPS):
            loss = engine(**transformer_batch(kind, seed=10 * step + communicator.rank // tensor)).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
            of_norms.append(engine.get_global_grad_norm())
        engine.destroy()
        return found, of_norms

    for rank, (found, of_norms) in enumerate(run_threads(tensor * data, train)):
        assert found == pytest.approx(losses[rank // tensor], rel=1e-5)
        assert of_norms == pytest.approx(norms, rel=1e-4)


def test_texts_are_generated_alike() -> None:
    """With a cache: the prompt is shared, the tokens that follow one by one are not."""
    model = transformer_model("llama").eval()
    prompt = transformer_batch("llama")["input_ids"]
    wanted = model.generate(prompt, max_new_tokens=4, do_sample=False)

    def generate(mine: nn.Module, _: Communicator) -> Tensor:
        return mine.generate(prompt, max_new_tokens=4, do_sample=False)  # type: ignore[operator, no-any-return]

    assert all(torch.equal(found, wanted) for found in on_ranks(model, 2, generate))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mixtral", "experts"),
        ("bert", "stands outside of it|not in a separate module"),
        ("t5", "2 lists of blocks"),
    ],
)
def test_models_that_cannot_share_tokens_are_refused(kind: str, why: str) -> None:
    with pytest.raises(ShardingError) as caught:
        make_plan(transformer_model(kind), 2, share_tokens=True)
    assert "sequence_sharded" in str(caught.value)
    assert caught.match(why)


@pytest.mark.parametrize(
    "changes", [{"tiled_compute": {"enabled": True}}, {"activation_checkpointing": {"partition_activations": True}}]
)
def test_keys_that_contradict_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        polyaccel.initialize(
            model=nn.Linear(2, 2),
            config=make_config(0, tensor_parallel={"autotp_size": 2, "sequence_sharded": True}, **changes),
        )
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("tensor_parallel.sequence_sharded", True)
    ]


def test_a_model_that_has_cut_itself_shares_no_tokens() -> None:
    config = make_config(0, tensor_parallel={"autotp_size": 2, "sequence_sharded": True})

    def body(mine: nn.Module, _: Communicator) -> bool:
        with pytest.raises(ConfigError) as caught:
            polyaccel.initialize(model=mine, config=config)
        assert [(problem.key, problem.value) for problem in caught.value.problems] == [
            ("tensor_parallel.sequence_sharded", True)
        ]
        return True

    assert on_ranks(transformer_model("llama"), 2, body) == [True, True]
