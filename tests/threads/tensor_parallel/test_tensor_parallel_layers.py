"""Modules that ranks share stay the modules that they were: classes, hooks, names, memory, copies, ties."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformer_models import transformer_batch, transformer_model

from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.errors import ShardingError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.sharding.tensor_shard import cuts_of
from polyaccel.torch.tensor_parallel.layers import ShardSpec, SharedTail, shared_as
from polyaccel.torch.tensor_parallel.make_plan import make_plan
from polyaccel.torch.tensor_parallel.parallelize import parallelize_module
from polyaccel.torch.tensor_parallel.ranks import TensorRanks
from polyaccel.torch.tensor_parallel.regions import Regions


def on_ranks(model: nn.Module, body: Any, ranks: int = 2, **options: Any) -> list[Any]:
    """`body(a copy of the model, its recording communicator)` on every rank, after it was cut."""
    plan = make_plan(model, ranks, **options)
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def cut(communicator: Communicator) -> Any:
        recording = RecordingCommunicator(communicator, watch_s=None)
        mine = copies[communicator.rank]
        parallelize_module(mine, recording, plan)
        return body(mine, recording)

    return run_threads(ranks, cut)


def test_classes_names_and_parameters_stay_and_hooks_run() -> None:
    model = transformer_model("gpt2")
    kinds = {name: type(module) for name, module in model.named_modules()}
    names = [name for name, _ in model.named_parameters()]
    optimizer_holds = list(model.parameters())
    seen: list[str] = []
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, args, out: seen.append(str(out.shape[-1])))

    def body(communicator: Communicator) -> None:
        parallelize_module(model, communicator, make_plan(model, 1))

    run_threads(1, body)
    assert all(isinstance(module, kinds[name]) for name, module in model.named_modules())
    assert [name for name, _ in model.named_parameters()] == names
    assert all(one is other for one, other in zip(model.parameters(), optimizer_holds, strict=True))
    model(**transformer_batch("gpt2"))
    assert seen == ["112"]


def test_each_rank_keeps_memory_of_its_blocks_alone_and_tied_weights_stay_one() -> None:
    def body(model: nn.Module, communicator: Communicator) -> int:
        tied = model.get_input_embeddings().weight
        assert tied is model.get_output_embeddings().weight
        assert model.get_input_embeddings().parallel_cuts == model.get_output_embeddings().parallel_cuts
        for parameter, found in cuts_of(model).items():
            assert parameter.untyped_storage().nbytes() == found.block.numel * parameter.element_size()
            assert parameter.is_contiguous()
        return tied.shape[0]

    assert on_ranks(transformer_model("qwen3"), body, 3) == [23, 22, 22]


def test_a_model_on_the_meta_device_is_cut_there() -> None:
    def body(model: nn.Module, communicator: Communicator) -> None:
        assert all(p.is_meta and p.shape == each.block.local_shape for p, each in cuts_of(model).items())

    on_ranks(transformer_model("t5").to("meta"), body)


def test_a_layer_exchanges_once_forward_and_once_backward_for_each_of_its_halves() -> None:
    """Query, key and value read one input, and so do gate and up: the gradients of each go together."""
    batch = transformer_batch("llama")

    def body(model: nn.Module, communicator: RecordingCommunicator) -> int:
        before = dict(communicator.recorder.calls)
        model.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state.sum().backward()
        calls = communicator.recorder.calls
        return calls["all_reduce"] - before.get("all_reduce", 0)

    assert on_ranks(transformer_model("llama"), body) == [1 + 2 * (2 + 2)] * 2  # the embedding, and two layers


def test_nothing_is_kept_of_an_input_once_all_have_read_it() -> None:
    batch = transformer_batch("llama")

    def body(model: nn.Module, communicator: Communicator) -> None:
        model(**batch).loss.backward()
        shares = [module.share.input for module in model.modules() if hasattr(module, "share")]
        assert all(share._given is None for share in shares)

    on_ranks(transformer_model("llama"), body)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_recomputed_activations_give_the_same_gradients(kind: str) -> None:
    batch = transformer_batch(kind)

    def body(model: nn.Module, communicator: Communicator) -> None:
        grads = []
        for checkpoint in (False, True):
            if checkpoint:
                model.activation_checkpointing_enable()
            model.zero_grad()
            model(**batch, use_cache=False).loss.backward()
            grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        for name, grad in grads[0].items():
            assert torch.equal(grads[1][name], grad), name

    on_ranks(transformer_model(kind), body)


def test_a_copy_of_a_cut_model_computes_the_same() -> None:
    batch = transformer_batch("phi3")

    def body(model: nn.Module, communicator: Communicator) -> None:
        twin = copy.deepcopy(model)
        assert torch.equal(twin(**batch).loss, model(**batch).loss)
        own = model.model.layers[0].self_attn
        assert (own.config.num_attention_heads, own.config.num_key_value_heads) == (3, 1)
        assert twin.model.layers[0].self_attn.config.num_attention_heads == 3
        model.config._attn_implementation = "eager"
        assert own.config._attn_implementation == "eager"
        assert isinstance(own.config, type(model.config))

    on_ranks(transformer_model("phi3"), body)


def test_autocast_computes_in_its_type() -> None:
    batch = transformer_batch("llama")
    model = transformer_model("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = copy.deepcopy(model)(**batch).loss.item()

    def body(mine: nn.Module, communicator: Communicator) -> tuple[float, torch.dtype]:
        kinds: list[torch.dtype] = []
        mine.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, out: kinds.append(out.dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mine(**batch).loss
        loss.backward()
        assert all(p.grad.dtype is torch.float32 for p in mine.parameters())
        return loss.item(), kinds[0]

    for loss, kind in on_ranks(model, body):
        assert kind is torch.bfloat16
        assert loss == pytest.approx(wanted, rel=1e-2)


def test_logits_may_stay_cut_for_a_loss_that_takes_them_so() -> None:
    model, batch = transformer_model("qwen2"), transformer_batch("qwen2")
    whole = copy.deepcopy(model)
    out = whole(**batch, num_items_in_batch=11)
    out.loss.backward()

    def body(mine: nn.Module, communicator: Communicator) -> None:
        found = mine(**batch, num_items_in_batch=11)
        assert found.logits.shape[-1] in (23, 22)
        torch.testing.assert_close(found.loss, out.loss)
        torch.testing.assert_close(mine(**batch).loss, whole(**batch).loss)
        found.loss.backward()
        norm = "model.norm.weight"
        torch.testing.assert_close(mine.get_parameter(norm).grad, whole.get_parameter(norm).grad, rtol=1e-4, atol=1e-5)

    on_ranks(model, body, 3, gather_logits=False)
    with pytest.raises(ShardingError) as caught:
        make_plan(transformer_model("bert"), 2, gather_logits=False)
    assert caught.value.value == "BertForMaskedLM"
    assert caught.value.hint == "leave tensor_parallel.vocab_parallel_lm_head out"


def test_outputs_that_all_heads_share_have_the_sum_of_their_gradients() -> None:
    weight, x = torch.randn(5, 4), torch.randn(3, 4)
    factors = [torch.randn(3, 2) for _ in range(2)]
    wanted = torch.autograd.grad(
        (functional.linear(x, w := weight.clone().requires_grad_())[:, 3:] * sum(factors)).sum(), w
    )[0]

    def body(communicator: Communicator) -> torch.Tensor:
        ranks = TensorRanks(communicator)
        layer = nn.Linear(4, 5, bias=False)
        layer.weight.data = weight.clone()
        shared_as(layer, SharedTail, ShardSpec(ranks, Regions(ranks), rows=((3, 2),)))
        (layer(x)[:, 3:] * factors[ranks.rank]).sum().backward()
        return layer.weight.grad

    for found in run_threads(2, body):
        torch.testing.assert_close(found, wanted)


def test_a_model_is_cut_once_and_by_the_plan_of_all() -> None:
    model = transformer_model("llama")
    plans = [make_plan(model, 2), make_plan(transformer_model("qwen2"), 2), make_plan(model, 3)]

    def refusals(communicator: Communicator) -> list[str]:
        found = []
        for plan in plans[1:]:
            with pytest.raises(ShardingError) as caught:
                parallelize_module(model, communicator, plan)
            found.append(str(caught.value))
        mine = copy.deepcopy(model)
        parallelize_module(mine, communicator, plans[0])
        with pytest.raises(ShardingError) as caught:
            parallelize_module(mine, communicator, plans[0])
        assert caught.value.value == "LlamaForCausalLM"
        other = copy.deepcopy(model)
        differing = make_plan(model, 2, gather_logits=communicator.rank == 0)
        with pytest.raises(ShardingError) as caught:
            parallelize_module(other, communicator, differing)
        assert len(caught.value.value) == 2
        return found

    for found in run_threads(2, refusals):
        assert "one of another model" in found[0]
        assert "a plan for 3 tensor ranks" in found[1]
