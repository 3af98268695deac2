"""`engine.generate`: the tokens of the module's own `generate`, and a training that is as if it had not been called."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from pairwise import combinations
from parity_models import assert_bitwise, drawn_from, make_config, on_threads, snapshot
from proof_verdicts import pass_on_verdicts, prove_as_users_do
from torch import nn

import polyaccel
from polyaccel.accelerators.detect import host_accelerator
from polyaccel.engine.policies.generation import GenerationPolicy
from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.torch.generation.adapters import fusable_layers
from polyaccel.torch.generation.generates import seeded
from polyaccel.torch.verify.first_step import FirstStepProof

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from transformer_models import transformer_batch, transformer_model  # noqa: E402 - imports transformers

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
SMALL = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 30}
UNITS = {"hybrid_engine": {"enabled": True, "pin_parameters": False}}
TARGETS = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}
GREEDY = {"do_sample": False}


def build(kind="gpt2", adapters="none", **sizes):
    """A model with dropout in training, so that only evaluation mode gives the same tokens twice."""
    model = transformer_model(kind, **({"attn_pdrop": 0.1, "resid_pdrop": 0.1} if kind == "gpt2" else {}), **sizes)
    if adapters != "none":
        of_kind = {"target_modules": TARGETS[kind], "fan_in_fan_out": kind == "gpt2", "use_dora": adapters == "DoRA"}
        settings = peft.LoraConfig(r=2, init_lora_weights=False, **of_kind)
        torch.manual_seed(3)
        model = peft.get_peft_model(model, settings)
    return model


def engine_of(model, stage, **keys):
    config = make_config(stage, zero=SMALL if stage else {}, **keys)
    return polyaccel.initialize(model=model, config=config)[0]


def prompt_of(rank):
    return {"input_ids": transformer_batch("gpt2", seed=50 + rank, length=4)["input_ids"]}


def backward(engine, step, rank):
    loss = engine(**transformer_batch("gpt2", seed=10 * step + rank)).loss
    engine.backward(loss)


def whole_twin(engine, plain):
    """`plain` with the present weights of `engine`, to be evaluated."""
    state = engine.module_state_dict()
    types = {parameter.dtype for parameter in engine.module.parameters()}
    twin = copy.deepcopy(plain).to(types.pop())
    twin.load_state_dict(state)
    return twin.eval()


def test_modes():
    """Of parts, which are not all the model's own, and after an error."""
    model = build()
    engine = engine_of(model, 0)
    model.transformer.h[0].eval()
    modes = [part.training for part in model.modules()]
    seen = []
    model.transformer.register_forward_hook(lambda *_: seen.append((model.training, torch.is_grad_enabled())))
    tokens = engine.generate(**prompt_of(0), max_new_tokens=2, **GREEDY)
    assert set(seen) == {(False, False)}
    assert not tokens.requires_grad
    assert [part.training for part in model.modules()] == modes
    with pytest.raises(ZeroDivisionError):
        engine.generate(**prompt_of(0), max_new_tokens=1, custom_generate=lambda *_, **__: 1 // 0)
    assert [part.training for part in model.modules()] == modes
    assert torch.is_grad_enabled()


@combinations(
    kind=["gpt2", "llama"],
    stage=[0, 1, 2, 3],
    world=[1, 2, 3],
    adapters=["none", "LoRA"],
    gathers=["once", "units"],
    precision=["fp32", "bf16", "fp16"],
)
def test_tokens_are_those_of_the_module_and_training_is_unaffected(kind, stage, world, adapters, gathers, precision):
    keys = {**(UNITS if gathers == "units" else {}), **({} if precision == "fp32" else {precision: {"enabled": True}})}
    plain = build(kind, adapters).eval()

    def train(communicator, model, *, generates):
        engine = engine_of(model.eval(), stage, gradient_accumulation_steps=2, **keys)
        rank = communicator.rank

        def compare():
            if generates:
                wanted = whole_twin(engine, plain)
                asked = {**prompt_of(rank), "max_new_tokens": 2 + 2 * rank, "min_new_tokens": 2 + 2 * rank, **GREEDY}
                found = engine.generate(**asked)
                assert torch.equal(found, wanted.generate(**asked))
                assert found.shape[1] == 6 + 2 * rank

        compare()
        for micro in range(4):
            backward(engine, micro, rank)
            if micro == 2:  # of the second step, whose first gradients are there
                compare()
            engine.step()
        compare()
        engine.destroy()
        return snapshot(engine.module)

    make = partial(build, kind, adapters)
    with_rollouts = on_threads(world, partial(train, generates=True), make)
    without = on_threads(world, partial(train, generates=False), make)
    assert_bitwise(with_rollouts[0], without[0])


def test_a_seed_draws_the_same_tokens_and_leaves_the_generators_alone():
    engine = engine_of(build(), 0)
    draw = partial(engine.generate, **prompt_of(0), max_new_tokens=8, do_sample=True)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draw(seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    own = draw()
    assert not torch.equal(torch.get_rng_state(), state)
    assert torch.equal(draw(seed=4), first)
    assert not torch.equal(draw(seed=5), first)
    torch.manual_seed(1)
    assert torch.equal(draw(), own)


@pytest.mark.parametrize("how", ["of the config", "of transformers"])
def test_the_cache_is_in_use_where_blocks_are_recomputed(how):
    model = build("llama")
    model.config.use_cache = False  # as scripts do for recomputation
    keys = {"activation_checkpointing": {"enabled": True}, "verify": "off"} if how == "of the config" else {}
    if how == "of transformers":
        model.activation_checkpointing_enable()
    engine = engine_of(model, 2, **keys)
    lengths = []
    model.model.embed_tokens.register_forward_hook(lambda _, args, __: lengths.append(args[0].shape[1]))
    engine.generate(**prompt_of(0), max_new_tokens=3, **GREEDY)
    assert lengths == [4, 1, 1]
    assert model.config.use_cache is False
    backward(engine, 0, 0)
    engine.step()


@pytest.mark.parametrize(
    ("kind", "stage", "adapters", "keys"),
    [
        ("gpt2", 0, "LoRA", {}),
        ("llama", 1, "DoRA", {}),
        ("llama", 2, "LoRA", {"bf16": {"enabled": True}}),
        ("gpt2", 3, "LoRA", {}),
        ("llama", 3, "LoRA", UNITS),
    ],
)
def test_fused_adapters_leave_every_bit_of_the_base_weights(kind, stage, adapters, keys):
    is_fused = keys is not UNITS

    def train(communicator, model, *, generates):
        engine = engine_of(model.eval(), stage, **keys)
        seen = []
        layers = fusable_layers(model)
        layers[-1].register_forward_hook(lambda layer, *_: seen.append(layer.merged))
        for step in range(2):
            if generates:
                wanted = whole_twin(engine, plain)
                if is_fused:
                    wanted.merge_adapter()
                asked = {**prompt_of(0), "max_new_tokens": 3, **GREEDY}
                assert torch.equal(engine.generate(**asked, fuse_adapters=True), wanted.generate(**asked))
                assert seen == [is_fused] * 3
                with pytest.raises(ZeroDivisionError):
                    engine.generate(**asked, fuse_adapters=True, custom_generate=lambda *_, **__: 1 // 0)
                assert fusable_layers(model) == layers
            backward(engine, step, communicator.rank)
            engine.step()
            seen.clear()
        engine.destroy()
        return snapshot(engine.module)

    make = partial(build, kind, adapters)
    plain = make().eval()
    with_rollouts, without = (
        on_threads(1 + (stage > 1), partial(train, generates=choice), make)[0] for choice in (True, False)
    )
    assert_bitwise(with_rollouts, without)


@pytest.mark.parametrize("keys", [{}, UNITS], ids=["once", "units"])
def test_gathers_are_exact_where_those_of_training_are_quantised(keys):
    def train(communicator, model, *, generates):
        config = make_config(3, zero={**SMALL, "zero_quantized_weights": True}, **keys)
        engine = polyaccel.initialize(model=model.eval(), config=config)[0]
        for step in range(2):
            backward(engine, step, communicator.rank)
            engine.step()
            if generates:
                wanted = whole_twin(engine, model_of_zero)
                asked = {**prompt_of(0), "max_new_tokens": 2, "output_logits": True, "return_dict_in_generate": True}
                mine = engine.generate(**asked, **GREEDY, own_decoder=False)  # whose logits are bits of the module's
                logits = [mine.logits, wanted.generate(**asked, **GREEDY).logits]
                assert torch.equal(*map(torch.stack, logits))
        engine.destroy()
        return snapshot(engine.module)

    model_of_zero = build()
    with_rollouts, without = (on_threads(2, partial(train, generates=choice), build)[0] for choice in (True, False))
    assert_bitwise(with_rollouts, without)


@pytest.mark.parametrize(("kind", "stage", "world", "keys"), [("llama", 2, 2, {}), ("gpt2", 3, 4, UNITS)])
def test_tensor_ranks_generate_what_one_rank_does(kind, stage, world, keys):
    """Data ranks have other prompts, and end at other tokens."""

    def work(communicator, model):
        cut = {"tensor_parallel": {"autotp_size": 2}, "verify": "off"}
        engine = engine_of(model.eval(), stage, **cut, **keys)
        row = communicator.rank // 2
        asked = {**prompt_of(row), "max_new_tokens": 2 + 2 * row, **GREEDY}
        for step in range(2):
            wanted = whole_twin(engine, build(kind)).generate(**asked)
            assert torch.equal(engine.generate(**asked), wanted)
            backward(engine, step, row)
            engine.step()

    on_threads(world, work, partial(build, kind))


def test_ranks_that_draw_together_follow_the_first_of_them():
    class Follower:
        rank = 1

        def broadcast_object(self, value):
            with torch.random.fork_rng():
                torch.manual_seed(9)
                return host_accelerator().rng_state()

    with drawn_from(9):
        wanted = torch.rand(3)
    state = torch.get_rng_state()
    with seeded(host_accelerator(), None, Follower()):
        assert torch.equal(torch.rand(3), wanted)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("stage", [0, 3])
def test_it_generates_while_other_states_are_offloaded(stage):
    def work(communicator, model):
        engine = engine_of(model, stage)
        wanted = engine.generate(**prompt_of(0), max_new_tokens=3, **GREEDY)
        backward(engine, 0, communicator.rank)
        engine.zero_grad()
        engine.offload_states(include=["optim_states"])
        assert torch.equal(engine.generate(**prompt_of(0), max_new_tokens=3, **GREEDY), wanted)
        engine.reload_states()
        engine.offload_states()
        with pytest.raises(ShardingError):
            engine.generate(**prompt_of(0), max_new_tokens=3, **GREEDY)
        engine.reload_states()
        assert torch.equal(engine.generate(**prompt_of(0), max_new_tokens=3, **GREEDY), wanted)

    on_threads(2 if stage == 3 else 1, work, build)


def failing_on_one(communicator, model, keys):
    engine = engine_of(model, 3, **keys)

    def fail(_, scores):
        if communicator.rank == 1:
            raise ZeroDivisionError("a reward of nothing")
        return scores

    expected = ZeroDivisionError if communicator.rank == 1 else PolyaccelError
    with pytest.raises(expected) as caught:
        engine.generate(**prompt_of(0), max_new_tokens=4, logits_processor=[fail], **GREEDY)
    if communicator.rank != 1:
        assert caught.value.value == 1
        assert "rank 1: ZeroDivisionError: a reward of nothing" in str(caught.value)
    backward(engine, 0, communicator.rank)
    engine.step()
    return engine.generate(**prompt_of(0), max_new_tokens=4, **GREEDY)


@pytest.mark.parametrize("keys", [{}, UNITS], ids=["once", "units"])
def test_a_rank_that_fails_is_named_and_training_goes_on(keys):
    first, *others = on_threads(3, failing_on_one, build, keys)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("stage", "keys"), [(0, {}), (2, {}), (3, {}), (3, UNITS)], ids=["0", "2", "3", "3 units"])
def test_a_change_by_generation_is_an_error_that_names_the_parameter(stage, keys):
    def fuse(model, *inputs, undoes, **named):
        """As a library fuses an adapter: through `.data`, in a forward pass where parameters are gathered for those."""
        weight = model.transformer.h[1].attn.c_attn.weight

        def add(*_):
            kept = weight.data.clone()
            weight.data += 1
            if undoes:
                weight.data.copy_(kept)

        handle = model.transformer.h[1].attn.register_forward_pre_hook(add)
        model.forward(input_ids=named.get("input_ids", inputs[0] if inputs else None))
        handle.remove()
        return inputs

    def work(communicator, model):
        engine = engine_of(model, stage, **keys)
        generate = partial(engine.generate, **prompt_of(0), max_new_tokens=1)
        generate(custom_generate=partial(fuse, undoes=True))
        last = communicator.rank == communicator.world_size - 1
        with pytest.raises(ShardingError) as caught:
            generate(custom_generate=partial(fuse, undoes=not last))
        assert caught.value.value == ["transformer.h.1.attn.c_attn.weight"]

    on_threads(2 if stage == 3 else 1, work, build)


def test_ranks_with_other_weights_do_not_generate():
    def work(communicator, model):
        engine = engine_of(model, 3)
        if communicator.rank == 1:
            model.transformer.ln_f.bias.data += 1  # small enough to be whole on every rank
        with pytest.raises(ShardingError) as caught:
            engine.generate(**prompt_of(0), max_new_tokens=1)
        assert caught.value.value == "transformer.ln_f.bias"
        assert "ranks [0] and ranks [1]" in str(caught.value)

    on_threads(2, work, build)


def test_memory_that_one_rank_lacks_makes_all_gather_unit_by_unit(monkeypatch):
    def work(communicator, model, plain):
        engine = engine_of(model, 3)
        gathered = engine.zero.params.gathered
        total = sum(param.bucket.numel for param in engine.zero.params if param.is_sharded)
        asked = {**prompt_of(0), "max_new_tokens": 3, **GREEDY}
        wanted = plain.generate(**asked)
        if communicator.rank == 1:
            allocate, calls = gathered.pool._allocate, []

            def allocate_less(numel, dtype):
                calls.append(numel)
                if len(calls) == 3:
                    raise MemoryError
                return allocate(numel, dtype)

            gathered.pool._allocate = allocate_less
        assert torch.equal(engine.generate(**asked), wanted)
        assert gathered.peak_numel < total
        assert torch.equal(engine.generate(**asked), wanted)
        assert gathered.peak_numel == total
        assert gathered.live_numel == 0
        gathered.peak_numel = 0
        engine._module_settings = replace(engine._module_settings, generation=GenerationPolicy(most_numel=total - 1))
        assert torch.equal(engine.generate(**asked), wanted)
        assert gathered.peak_numel < total

    deep = partial(build, n_layer=7)  # more than the units that training may hold at once
    on_threads(2, work, deep, deep().eval())


def live_tensors():
    gc.collect()
    return [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]


def nbytes_beside(others):
    """The bytes of the tensors that are not among ``others``: those that tests before this one left."""
    known = {id(one) for one in others}
    storages = {}
    for one in live_tensors():
        if id(one) not in known:
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(("count", "keys"), [(20, {}), (100, {}), (100, UNITS)], ids=["20", "100", "100 units"])
def test_many_rollouts_hold_what_two_hold(count, keys):
    left = live_tensors()  # held, so that none is freed during the test and its place taken by a new one

    def work(communicator, model):
        engine = engine_of(model, 3, **keys)
        held = []
        for more in (2, count - 2):
            for _ in range(more):
                engine.generate(**prompt_of(0), max_new_tokens=1 + communicator.rank, **GREEDY)
            communicator.barrier()
            if communicator.rank == 0:
                held.append((nbytes_beside(left), engine.zero.memory.measured()))
            communicator.barrier()
        return held

    first, last = on_threads(2, work, build)[0]
    assert last == first


def test_a_sequence_that_may_be_too_long_is_refused_on_all_ranks():
    def work(communicator, model, stage):
        engine = engine_of(model, stage, hybrid_engine={"enabled": True, "max_out_tokens": 9})
        assert engine.generate(**prompt_of(0), max_new_tokens=5, min_new_tokens=5, **GREEDY).shape[1] == 9
        with pytest.raises(PolyaccelError) as caught:
            engine.generate(**prompt_of(0), max_new_tokens=5 + communicator.rank, **GREEDY)
        assert caught.value.value == (10 if communicator.rank == 1 else 1)
        for asked in ({}, {"max_length": 10}, {"generation_config": transformers.GenerationConfig(max_new_tokens=6)}):
            with pytest.raises(PolyaccelError):
                engine.generate(**prompt_of(0), **asked)

    on_threads(2, work, build, 3)


def test_a_module_without_generate_is_refused():
    engine = engine_of(nn.Linear(2, 2), 0)
    with pytest.raises(PolyaccelError) as caught:
        engine.generate(torch.ones(1, 2))
    assert caught.value.value == "Linear"


def test_a_rollout_is_no_batch_of_the_first_step_s_proof(monkeypatch, tmp_path):
    verdicts, taken = [], []
    prove_as_users_do(monkeypatch, tmp_path)
    pass_on_verdicts(monkeypatch, FirstStepProof, verdicts.append)
    prove = FirstStepProof._prove
    monkeypatch.setattr(
        FirstStepProof, "_prove", lambda self, engine: taken.append(len(self._taken)) or prove(self, engine)
    )
    engine = engine_of(build("llama"), 0, verify="always")
    engine.generate(**prompt_of(0), max_new_tokens=2, **GREEDY)
    backward(engine, 0, 0)
    engine.step()
    assert taken == [1]
    assert verdicts[0].is_proven
