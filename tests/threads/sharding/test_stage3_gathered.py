"""Parameters made whole for a while: what is read, what is written back, and what is refused, at every stage."""

from __future__ import annotations

import pytest
import torch
from parity_models import batch, make_config, on_threads, snapshot
from stage3_models import Gpt, seeded, token_loss
from torch import nn

import polyaccel
from polyaccel import zero
from polyaccel.errors import CommError, ShardingError

STAGES = (0, 1, 2, 3)
BF16 = {"bf16": {"enabled": True}}
ALL_SHARDED = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 64}
gpt = seeded(Gpt)


def engine_of(model: nn.Module, stage: int, **changes) -> polyaccel.TorchEngine:
    keys = {**ALL_SHARDED, **changes.pop("zero", {})}
    return polyaccel.initialize(model=model, config=make_config(stage, zero=keys, **changes))[0]


def train_step(engine: polyaccel.TorchEngine, step: int, rank: int) -> float:
    loss = token_loss(engine, step, 0, rank)
    engine.backward(loss)
    engine.step()
    return loss.item()


def whole(engine: polyaccel.TorchEngine) -> dict[str, torch.Tensor]:
    with zero.GatheredParameters(engine.module.parameters()):
        return snapshot(engine.module)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_whole_inside_and_hidden_outside(stage):
    def work(communicator, model):
        wanted = snapshot(model)
        engine = engine_of(model, stage)
        assert {name: p.shape for name, p in model.named_parameters()} == {n: v.shape for n, v in wanted.items()}
        inside = whole(engine)
        assert all(torch.equal(inside[name], wanted[name]) for name in wanted)
        assert engine.zero.params.gathered.live_numel == 0
        if stage == 3:
            with pytest.raises(ShardingError) as caught:
                model.position.weight.sum()
            assert caught.value.value == "position.weight"

    on_threads(2, work, gpt)


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_the_modifier_wrote_counts_on_all_ranks_and_in_the_next_update(stage, precision):
    """The same change made before the engine was built must give the same training."""

    def change(model, rank):
        with torch.no_grad():
            model.head.weight.mul_(2.0)
            model.blocks[1].wide.bias.data[3] = 7.0 + rank

    def afterwards(communicator, model):
        engine = engine_of(model, stage, **precision)
        with zero.GatheredParameters([model.head.weight, model.blocks[1].wide.bias], modifier_rank=1):
            if communicator.rank == 1:
                change(model, 1)
        losses = [train_step(engine, step, communicator.rank) for step in range(2)]
        return losses, whole(engine)

    def before(communicator, model):
        model.to(torch.bfloat16 if precision else torch.float32)
        change(model, 1)
        model.float()
        engine = engine_of(model, stage, **precision)
        losses = [train_step(engine, step, communicator.rank) for step in range(2)]
        return losses, whole(engine)

    def rounded():
        model = gpt()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        return model

    build = rounded if precision else gpt
    for found, wanted in zip(on_threads(2, afterwards, build), on_threads(2, before, build), strict=True):
        assert found[0] == wanted[0]
        assert all(torch.equal(found[1][name], wanted[1][name]) for name in wanted[1])


@pytest.mark.parametrize("stage", STAGES)
def test_untouched_master_weights_keep_their_precision(stage):
    """Parameters that share a bucket with a changed one, and those that were open but not changed, are not rounded."""

    def work(communicator, model, opens):
        engine = engine_of(model, stage, zero={"reduce_bucket_size": 10**9}, **BF16)
        if opens:
            with zero.GatheredParameters(model.parameters(), modifier_rank=0):
                pass
        for step in range(2):
            train_step(engine, step, communicator.rank)
        return [polyaccel.utils.safe_get_full_fp32_param(p) for p in model.parameters()]

    opened, left_alone = on_threads(2, work, gpt, True)[0], on_threads(2, work, gpt, False)[0]
    assert all(torch.equal(*pair) for pair in zip(opened, left_alone, strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_a_change_without_a_modifier_is_an_error_on_every_rank(stage):
    def change(model, only_if):
        with zero.GatheredParameters([model.embed.weight, model.scale]):
            if only_if:
                nn.init.ones_(model.embed.weight)

    def work(communicator, model):
        engine = engine_of(model, stage)
        before = whole(engine)
        with pytest.raises(ShardingError) as caught:
            change(model, only_if=communicator.rank == 1)
        assert caught.value.value == ["embed.weight"]
        assert "rank 1" in str(caught.value)
        if stage == 3:  # nothing was lost, nothing spoilt stays about
            after = whole(engine)
            assert all(torch.equal(after[name], before[name]) for name in before)
            train_step(engine, 0, communicator.rank)
        else:
            with pytest.raises(ShardingError) as caught:
                train_step(engine, 0, communicator.rank)
            assert caught.value.value == "embed.weight"
            assert "ranks [1]" in str(caught.value)

    on_threads(2, work, gpt)


def test_a_change_of_a_neighbour_is_an_error_too():
    def work(communicator, model):
        engine_of(model, 3, zero={"reduce_bucket_size": 10**9})
        with (
            pytest.raises(ShardingError) as caught,
            zero.GatheredParameters([model.blocks[0].norm.weight], modifier_rank=0),
        ):
            nn.init.ones_(model.blocks[0].wide.bias)
        assert caught.value.value == ["blocks.0.wide.bias"]

    on_threads(2, work, gpt)


@pytest.mark.parametrize("checks", [True, False])
def test_sanity_checks_see_changes_that_version_counters_do_not(checks):
    def work(communicator, model):
        engine_of(model, 3, zero={"enable_sanity_checks": checks})
        with zero.GatheredParameters([model.shift]):
            model.shift.view(-1).data.add_(1.0)

    if checks:
        with pytest.raises(ShardingError) as caught:
            on_threads(2, work, gpt)
        assert caught.value.value == ["shift"]
    else:
        on_threads(2, work, gpt)


@pytest.mark.parametrize("stage", STAGES)
def test_contexts_nest_and_are_entered_again(stage):
    def work(communicator, model):
        engine = engine_of(model, stage)
        outer = zero.GatheredParameters(model.parameters())
        inner = zero.GatheredParameters(model.scale, modifier_rank=0)
        for value in (2.0, 3.0):
            with outer:
                with inner:
                    if communicator.rank == 0:
                        model.scale.data.fill_(value)
                assert model.scale.item() == value
                assert model.head.weight.sum().isfinite()
        if stage == 3:
            assert engine.zero.params.gathered.live_numel == 0
        assert whole(engine)["scale"].item() == 3.0

    on_threads(2, work, gpt)


def test_strangers_are_left_alone_and_disabled_does_nothing():
    def work(communicator, model):
        engine_of(model, 3)
        stranger = nn.Parameter(torch.zeros(2))
        with zero.GatheredParameters([stranger], modifier_rank=0):
            stranger.data.add_(1.0)
        assert stranger.tolist() == [1.0, 1.0]
        with zero.GatheredParameters(model.parameters(), enabled=False), pytest.raises(ShardingError):
            model.scale.item()
        with pytest.raises(ShardingError) as caught:
            zero.GatheredParameters(model.scale, modifier_rank=2).__enter__()
        assert caught.value.value == 2
        assert all(part in str(caught.value) for part in ("modifier_rank", "rank 2"))

    on_threads(2, work, gpt)


def test_an_exception_inside_writes_nothing_back():
    def fail(model):
        with zero.GatheredParameters(model.parameters(), modifier_rank=0):
            nn.init.zeros_(model.embed.weight)
            raise KeyError("mine")

    def work(communicator, model):
        engine = engine_of(model, 3)
        before = whole(engine)
        with pytest.raises(KeyError):
            fail(model)
        after = whole(engine)
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert train_step(engine, 0, communicator.rank) > 0

    on_threads(2, work, gpt)


def test_an_update_inside_is_an_error_that_changes_nothing():
    def work(communicator, model):
        engine = engine_of(model, 3)
        engine.backward(token_loss(engine, 0, 0, communicator.rank))
        with zero.GatheredParameters(model.scale):
            before = model.scale.item()
            with pytest.raises(ShardingError) as caught:
                engine.step()
            assert caught.value.value == [30]
            assert model.scale.item() == before
        engine.step()
        assert engine.global_steps == 1
        assert whole(engine)["scale"].item() != before

    on_threads(2, work, gpt)


def test_a_change_between_forward_and_backward_is_noticed():
    def work(communicator, model):
        engine = engine_of(model, 3)
        loss = token_loss(engine, 0, 0, communicator.rank)
        with zero.GatheredParameters(model.scale, modifier_rank=0):
            model.scale.data.fill_(1.0)
        with pytest.raises(ShardingError) as caught:
            engine.backward(loss)
        assert "engine.step()" in str(caught.value)

    on_threads(2, work, gpt)


class Renormed(Gpt):
    """Its embedding rescales rows of its weight in each forward."""

    def __init__(self):
        super().__init__()
        self.embed.max_norm = 0.5


def test_a_parameter_changed_in_forward_is_an_error_at_the_update():
    def work(communicator, model):
        engine = engine_of(model, 3)
        engine.backward(token_loss(engine, 0, 0, communicator.rank))
        with pytest.raises(ShardingError) as caught:
            engine.step()
        assert caught.value.value == ["embed.weight"]

    on_threads(2, work, seeded(Renormed))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_whole_parameters_may_be_changed_in_place_between_steps(stage):
    """Master weights follow what a user writes into 16-bit parameters."""

    def work(communicator, model):
        engine = engine_of(model, stage, **BF16)
        train_step(engine, 0, communicator.rank)
        with torch.no_grad():
            model.scale.fill_(4.0)
        with zero.GatheredParameters(model.scale):  # which takes no offence at what was written before
            pass
        train_step(engine, 1, communicator.rank)
        assert abs(model.scale.item() - 4.0) < 0.1

    on_threads(2, work, gpt)


def test_ranks_generate_different_lengths_from_an_unwrapped_model():
    def work(communicator, model):
        engine = engine_of(model, 3)
        train_step(engine, 0, communicator.rank)
        plain = gpt()
        with zero.unwrap_model_for_generation(engine) as generator, torch.no_grad():
            assert generator is model
            plain.load_state_dict(snapshot(model), strict=False)
            tokens = batch(0, 0, communicator.rank, size=1)[0][None]
            for _ in range(2 + 2 * communicator.rank):  # of other lengths on other ranks
                tokens = torch.cat([tokens, model.logits(tokens)[:, -1:].argmax(-1)], 1)
                assert torch.equal(model.logits(tokens), plain.logits(tokens))
        assert engine.zero.params.gathered.live_numel == 0
        with pytest.raises(ShardingError):
            model.scale.item()
        return train_step(engine, 1, communicator.rank)

    assert all(loss > 0 for loss in on_threads(2, work, gpt))


def test_ranks_that_generate_apart_without_unwrapping_are_told_where_they_part():
    """One goes on to train while the other still generates."""

    def work(communicator, model):
        engine = engine_of(model, 3)
        with torch.no_grad():
            for _ in range(1 + communicator.rank):
                token_loss(engine, 0, 0, communicator.rank)
        for step in range(2):
            train_step(engine, step, communicator.rank)

    with pytest.raises(CommError) as caught:
        on_threads(2, work, gpt)
    assert caught.value.value == [-1, -3]
