"""What a script may do to gradients between the backward pass and the update: each row is a statement, and either plain
torch's training follows or an error that names the parameter and the hint.

The model has tied, frozen, unused and odd-sized parameters, in buckets so small that few share one.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from gradient_statements import STATEMENTS, gradients, halve
from pairwise import combinations
from parity_models import (
    assert_bitwise,
    assert_close,
    batch,
    grouped,
    grouped_engine,
    on_threads,
    parity_model,
    relative_distance,
    snapshot,
    train_on_threads,
    train_plainly,
)
from stage_cases import STAGES, config_at
from torch.nn.utils import clip_grad_norm_

from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.utils import safe_get_full_grad, safe_set_full_grad
from polyaccel.zero import GatheredParameters

STEPS = 2
BF16 = {"bf16": {"enabled": True}}


@combinations(
    statement=[pytest.param(statement, id=name) for name, statement in STATEMENTS.items()],
    stage=list(STAGES),
    world=[2, 3, 1],
    accumulation=[1, 2],
    precision=[pytest.param({}, id="fp32"), pytest.param(BF16, id="bf16")],
)
def test_what_a_script_does_to_gradients_counts(statement, stage, world, accumulation, precision):
    config = config_at(stage, accumulation=accumulation, **precision)
    dtype = torch.bfloat16 if precision else None
    plain = train_plainly(world, STEPS, accumulation=accumulation, param_dtype=dtype, before_update=statement)
    run = train_on_threads(world, config, STEPS, before_update=statement)
    if not precision:
        assert_close(run.params, plain.params)
        assert run.norms == pytest.approx(plain.norms, rel=1e-5)
    elif any(plain.norms):
        assert relative_distance(run.params, plain.params, snapshot(parity_model())) < 0.03
        assert run.norms == pytest.approx(plain.norms, rel=0.03)
    else:
        assert_close(run.params, plain.params, 0.0)


def engine_at(model, stage, accumulation=1, **changes):
    return grouped_engine(model, config_at(stage, accumulation=accumulation, **changes))


def run(engine, step=0, micro=0):
    engine.backward(engine(*batch(step, micro, engine.communicator.rank)))


@pytest.mark.parametrize("stage", STAGES)
def test_the_gradient_that_is_seen(stage):
    """At stage 0 it is the whole one, the same tensor each time, and gone after the update."""

    def look(communicator, model):
        engine = engine_at(model, stage)
        assert all(parameter.grad is None for parameter in model.parameters())
        run(engine)
        wide = model.wide.weight
        seen, whole = wide.grad, safe_get_full_grad(wide)
        assert float(seen.norm()) == pytest.approx(float(whole.norm()), rel=1e-6)
        assert (seen.shape, seen.dtype, seen.device) == (whole.shape, whole.dtype, whole.device)
        if stage == "stage 0":
            assert wide.grad is seen
            assert torch.equal(seen, whole)
            assert model.unused.grad is None
        assert model.frozen.grad is None
        wide.grad = None
        assert wide.grad is None
        engine.zero_grad()
        run(engine)
        assert wide.grad is not None
        model.unused.grad, before = model.unused.grad, model.unused.detach().clone()
        engine.step()
        assert torch.equal(model.unused, before)  # zeros of no rank are no gradient, assigned or not
        assert wide.grad is None

    on_threads(2, look, parity_model)


def added_up(gradient):
    sums = torch.zeros(33, 6)
    torch._foreach_add_([sums], [gradient])
    return sums


READ = {
    "p.grad.sum()": lambda gradient: gradient.sum(),
    "p.grad.abs().max()": lambda gradient: gradient.abs().max(),
    "p.grad.mean(dim=0)": lambda gradient: gradient.mean(dim=0),
    "p.grad.norm(dim=0)": lambda gradient: gradient.norm(dim=0),
    "(2 * p.grad).norm()": lambda gradient: (2 * gradient).norm(),
    "p.grad.view(-1)": lambda gradient: gradient.view(-1) + 0,
    "p.grad[0]": lambda gradient: gradient[0].clone(),
    "p.grad.t().split(2)": lambda gradient: gradient.t().split(2)[1].contiguous(),
    "torch.isfinite(p.grad)": lambda gradient: torch.isfinite(gradient).all(),
    "p.grad > p.grad.mean()": lambda gradient: (gradient > gradient.mean()).sum(),
    "torch.cat": lambda gradient: torch.cat([gradient.flatten(), gradient.reshape(-1)]),
    "torch.histc": lambda gradient: torch.histc(gradient.float(), 5),
    "torch.zeros_like(p.grad)": lambda gradient: torch.zeros_like(gradient),
    "tensor.add_(p.grad)": lambda gradient: torch.zeros(gradient.shape).add_(gradient),
    "torch._foreach_add_": added_up,
    "torch.mul(out=)": lambda gradient: torch.mul(gradient, 2, out=torch.zeros(33, 6)),
    "p.grad.tolist()": lambda gradient: torch.tensor(gradient.tolist()),
    "p.grad.numpy()": lambda gradient: torch.tensor(gradient.detach().cpu().numpy()),
    "p.grad + a larger tensor": lambda gradient: gradient + torch.ones(2, 33, 6),
    "p.grad.double()": lambda gradient: gradient.double().square().sum(),
}
"""Statements that read, of which a slice would answer for itself."""


@pytest.mark.parametrize("stage", ["stage 1", "stage 2", "stage 3"])
def test_statements_that_read_get_the_whole_gradient(stage):
    def read(communicator, model):
        engine = engine_at(model, stage)
        run(engine)
        whole = safe_get_full_grad(model.wide.weight)
        for name, ask in READ.items():
            found, wanted = ask(model.wide.weight.grad), ask(whole)
            assert torch.equal(found, wanted), name
            assert found.dtype is wanted.dtype, name
        before = torch.isfinite(model.wide.weight.grad).all()
        model.wide.weight.grad.mul_(float("nan") if communicator.rank == 1 else 1.0)
        return bool(before), bool(torch.isfinite(model.wide.weight.grad).all())

    for before, after in on_threads(2, read, parity_model):
        assert before
        assert not after  # the other rank's slice has the value that is not finite


REFUSED = {
    "p.grad.normal_()": lambda gradient: gradient.normal_(),
    "p.grad.view(-1).mul_(2)": lambda gradient: gradient.view(-1).mul_(2),
    "p.grad[0] = 0": lambda gradient: gradient.__setitem__(0, 0),
    "p.grad.t().copy_(p.grad.t())": lambda gradient: gradient.t().copy_(gradient.t()),
    "torch.mul(out=p.grad)": lambda gradient: torch.mul(torch.ones(33, 6), 2, out=gradient),
    "pickle": lambda gradient: pickle.dumps(gradient),
}
"""Statements that change more than a slice can change, and what would write a slice to a file."""


@pytest.mark.parametrize("ask", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("stage", ["stage 1", "stage 3"])
def test_changes_that_a_slice_cannot_do_are_refused_by_name(stage, ask):
    def refused(communicator, model):
        engine = engine_at(model, stage)
        run(engine)
        before = safe_get_full_grad(model.wide.weight)
        with pytest.raises(ShardingError) as caught:
            ask(model.wide.weight.grad)
        assert caught.value.value == "wide.weight"
        assert "safe_get_full_grad" in caught.value.hint
        assert torch.equal(safe_get_full_grad(model.wide.weight), before)
        with pytest.raises(ShardingError) as caught:
            model.twice.bias.grad.add_(model.narrow.bias.grad)
        assert caught.value.value == ("narrow.bias", "twice.bias")
        assert not model.wide.weight.grad.numpy().flags.writeable

    on_threads(2, refused, parity_model)


@pytest.mark.parametrize("stage", ["stage 0", "stage 1", "stage 2"])
@pytest.mark.parametrize("alone", [False, True], ids=["two ranks", "one rank"])
def test_before_the_last_micro_batch(stage, alone):
    """Where every pass reduces, and where there is one rank, the gradient is what has accumulated; else it is this
    rank's own sum, and refused."""

    def look(communicator, model):
        engine = engine_at(model, stage, accumulation=2)
        run(engine)
        if stage == "stage 2" or alone:
            halve(model)
        else:
            with pytest.raises(ShardingError) as caught:
                halve(model)
            assert caught.value.value == "scale"
            assert "after the last backward pass" in caught.value.hint
            with pytest.raises(ShardingError) as caught:
                model.wide.weight.grad = torch.zeros(33, 6)
            assert caught.value.value == "wide.weight"
        model.narrow.bias.grad = None  # forgets what has accumulated, at every stage
        engine.step()
        run(engine, micro=1)
        engine.step()
        return snapshot(model)

    def plainly(world, factor):
        model = parity_model()
        optimizer = torch.optim.AdamW(grouped(model), lr=1e-2)
        for micro in range(2):
            (sum(model(*batch(0, micro, rank)) for rank in range(world)) / world / 2).backward()
            if micro == 0:
                torch._foreach_mul_(gradients(model), factor)
                model.narrow.bias.grad = None
        optimizer.step()
        return snapshot(model)

    world = 1 if alone else 2
    wanted = plainly(world, 0.5 if stage == "stage 2" or alone else 1.0)
    for params in on_threads(world, look, parity_model):
        assert_close(params, wanted)


@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_may_convert_its_modules_to_the_type_that_they_have(stage):
    """It reads gradients for nothing (Switch Transformers' router), also within an accumulation and backward pass."""

    def trained(communicator, model, converts):
        engine = engine_at(model, stage, accumulation=2, activation_checkpointing={"enabled": True, "blocks": ["wide"]})
        if converts:
            model.wide.register_forward_pre_hook(lambda module, _: module.to(torch.float32) and None)
        for micro in (0, 1):
            run(engine, micro=micro)
            engine.step()
        with GatheredParameters(list(model.parameters())):
            return snapshot(model)

    wanted, found = (on_threads(2, trained, parity_model, converts) for converts in (False, True))
    for own, theirs in zip(found, wanted, strict=True):
        assert_bitwise(own, theirs)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_of_the_script_s_own_without_a_backward_pass(stage):
    """`p.grad = g; engine.step()` trains; parameters without a gradient are left alone, and a backward pass adds."""

    def user_grad_edits(communicator, model):
        engine = engine_at(model, stage)
        model.wide.weight.grad = torch.linspace(-1.0, 1.0, 198).view(33, 6)
        model.unused.grad = torch.ones(5)
        engine.step()
        model.wide.weight.grad = torch.ones(33, 6)
        run(engine)
        engine.step()
        engine.destroy()
        return snapshot(model)

    model = parity_model()
    optimizer = torch.optim.AdamW(grouped(model), lr=1e-2)
    model.wide.weight.grad = torch.linspace(-1.0, 1.0, 198).view(33, 6)
    model.unused.grad = torch.ones(5)
    optimizer.step()
    optimizer.zero_grad()
    model.wide.weight.grad = torch.ones(33, 6)
    (sum(model(*batch(0, 0, rank)) for rank in range(2)) / 2).backward()
    optimizer.step()
    for params in on_threads(2, user_grad_edits, parity_model):
        assert_close(params, snapshot(model))


@pytest.mark.parametrize("stage", ["stage 0", "stage 1", "stage 3"])
@pytest.mark.parametrize("verb", ["changed", "dropped"])
def test_ranks_that_do_different_things_are_told(stage, verb):
    def differ(communicator, model):
        engine = engine_at(model, stage)
        run(engine)
        if communicator.rank == 1:
            model.wide.weight.grad = None if verb == "dropped" else torch.zeros(33, 6)
        with pytest.raises(ShardingError) as caught:
            engine.step()
        assert caught.value.value == "wide.weight"
        assert verb in str(caught.value)
        engine.zero_grad()
        run(engine)
        engine.step()  # and the engine goes on

    on_threads(2, differ, parity_model)


def test_ranks_that_change_replicated_gradients_differently_are_told():
    def differ(communicator, model):
        engine = engine_at(model, "stage 0")
        run(engine)
        model.wide.weight.grad.mul_(1.0 + communicator.rank)
        with pytest.raises(ShardingError) as caught:
            engine.step()
        assert caught.value.value == "wide.weight"

    on_threads(2, differ, parity_model)


def test_a_rank_that_only_looks_is_welcome_at_stage_0():
    def look(communicator, model):
        engine = engine_at(model, "stage 0")
        run(engine)
        if communicator.rank == 0:
            assert float(model.wide.weight.grad.norm()) > 0.0
        engine.step()
        return snapshot(model)

    looked, elsewhere = on_threads(2, look, parity_model)
    assert_bitwise(looked, elsewhere)
    assert_close(looked, train_plainly(2, 1).params)


@pytest.mark.parametrize("stage", ["stage 0", "stage 2"])
def test_a_second_backward_pass_is_reduced_before_gradients_are_looked_at(stage):
    """At stages 0 and 1 it comes after the reduction; `safe_get_full_grad` reduces it, on all ranks."""

    def twice(communicator, model):
        engine = engine_at(model, stage)
        run(engine)
        run(engine, micro=1)
        if stage == "stage 0":
            with pytest.raises(ShardingError) as caught:
                clip_grad_norm_(model.parameters(), 0.1)
            assert caught.value.value == "scale"
            assert "safe_get_full_grad" in caught.value.hint
            for parameter in model.parameters():
                safe_get_full_grad(parameter)
        clip_grad_norm_(model.parameters(), 0.1)
        engine.step()
        return snapshot(model)

    def loss_fn(model, step, micro, rank):
        return model(*batch(0, 0, rank)) + model(*batch(0, 1, rank))

    for params in on_threads(2, twice, parity_model):
        assert_close(params, train_plainly(2, 1, clip=0.1, loss_fn=loss_fn).params)


def test_a_gradient_that_was_looked_at_before_another_rank_s_late_part_was_reduced():
    def twice(communicator, model):
        engine = engine_at(model, "stage 0")
        run(engine)
        with engine.no_sync():
            if communicator.rank == 1:
                run(engine, micro=1)
        if communicator.rank == 0:
            assert model.wide.weight.grad is not None
        with pytest.raises(ShardingError) as caught:
            engine.step()
        assert caught.value.value == "wide.weight"

    on_threads(2, twice, parity_model)


def test_gradients_with_a_loss_scale_are_refused():
    def scaled(communicator, model):
        engine = engine_at(model, "stage 0", fp16={"enabled": True, "initial_scale_power": 4})
        run(engine)
        with pytest.raises(ShardingError) as caught:
            clip_grad_norm_(model.parameters(), 0.1)
        assert caught.value.value == "scale"
        assert '"gradient_clipping"' in caught.value.hint
        assert safe_get_full_grad(model.wide.weight) is not None
        engine.zero_grad()
        assert model.wide.weight.grad is None

    on_threads(1, scaled, parity_model)


@pytest.mark.parametrize("given", [torch.zeros(3), "a gradient", torch.zeros(33, 6).to_sparse()], ids=str)
def test_a_gradient_of_another_shape_or_kind_is_refused(given):
    def assign(communicator, model):
        engine_at(model, "stage 1")
        with pytest.raises(ShardingError) as caught:
            model.wide.weight.grad = given
        assert "'wide.weight'" in str(caught.value)

    on_threads(1, assign, parity_model)


# Hooks.


def halve_one(parameter):
    parameter.grad.mul_(0.5)


def test_hooks_change_gradients_and_see_them_in_torch_s_order():
    """A tensor's hook is given the gradient. A post-accumulate hook from before `initialize` sees it in `.grad` and may
    change it there; a later one comes after the engine has taken it, and is told so."""

    def hooked(communicator, model):
        model.wide.weight.register_hook(lambda gradient: gradient * 2)
        model.narrow.weight.register_post_accumulate_grad_hook(halve_one)
        engine = engine_at(model, "stage 2")
        run(engine)
        engine.step()
        model.twice.bias.register_post_accumulate_grad_hook(halve_one)
        with pytest.raises(PolyaccelError) as caught:
            run(engine)
        assert caught.value.value == "twice.bias"
        assert "register_hook" in caught.value.hint
        return snapshot(model)

    def change(model):
        model.wide.weight.grad.mul_(2)
        model.narrow.weight.grad.mul_(0.5)

    for params in on_threads(2, hooked, parity_model):
        assert_close(params, train_plainly(2, 1, before_update=change).params)


# Through `polyaccel.utils`.


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_is_set_right_after_the_backward_pass(stage):
    """While its reduction is under way, and for a parameter that had none."""

    def set_both(communicator, model):
        engine = engine_at(model, stage)
        run(engine)
        safe_set_full_grad(model.wide.weight, torch.ones(33, 6))
        engine.step()
        engine.destroy()
        return snapshot(model)

    def change(model):
        model.wide.weight.grad = torch.ones(33, 6)

    for params in on_threads(2, set_both, parity_model):
        assert_close(params, train_plainly(2, 1, before_update=change).params)
