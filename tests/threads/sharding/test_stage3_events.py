"""Strange orders of events at stage 3: what deviates is served, what fails is undone, what cannot work says so."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from parity_models import assert_bitwise, batch, make_config, on_threads, snapshot
from stage3_models import CASES, WIDTH, Block, Gpt, Wandering, seeded, token_loss
from torch import nn

import polyaccel
from polyaccel import zero
from polyaccel.errors import CommError, PolyaccelError, ShardingError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.sharding.sharded import ShardedParameter

ZERO = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 0}
gpt = seeded(Gpt)


def engine_of(model: nn.Module, stage: int = 3, **changes) -> polyaccel.TorchEngine:
    keys = {**ZERO, **changes.pop("zero", {})}
    return polyaccel.initialize(model=model, config=make_config(stage, zero=keys, **changes))[0]


def train(engine, steps, rank) -> None:
    for step in steps:
        engine.backward(token_loss(engine, step, 0, rank))
        engine.step()


def finish(engine) -> dict[str, torch.Tensor]:
    module = engine.module
    engine.destroy()
    return snapshot(module)


def both_stages(work, build=gpt, world=2):
    """`work(engine, rank)` at stages 2 and 3; parameters and what it returns must be equal."""

    def run(communicator, model, stage):
        engine = engine_of(model, stage)
        told = work(engine, communicator.rank)
        return told, finish(engine)

    (two, three) = (on_threads(world, run, build, stage) for stage in (2, 3))
    for (told_2, params_2), (told_3, params_3) in zip(two, three, strict=True):
        assert told_2 == told_3
        assert_bitwise(params_3, params_2)


def test_evaluation_and_generation_between_steps():
    def work(engine, rank):
        told = []
        for step in range(3):
            train(engine, [step], rank)
            engine.eval()
            with torch.no_grad():
                told.append(token_loss(engine, 9, 9, rank).item())
                tokens = batch(0, 0, 0, size=2)[0][None]
                for _ in range(2):  # a method of the module, not its forward
                    tokens = torch.cat([tokens, engine.module.logits(tokens)[:, -1:].argmax(-1)], 1)
            told.append(tokens.tolist())
            engine.train()
        return told

    both_stages(work, seeded(Callable))


class Callable(Gpt):
    """All parameters belong to parts that `logits` calls, so that it works outside of `forward`."""

    def __init__(self):
        super().__init__()
        del self.scale, self.shift, self.unused

    def logits(self, tokens):
        hidden = self.embed(tokens) + self.position(torch.arange(tokens.shape[-1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def test_forwards_without_backward_and_a_second_model_pass_before_it():
    """Two forwards under way, backward in either order, and a forward that nothing follows."""

    def work(engine, rank):
        for step in range(2):
            first, second = token_loss(engine, step, 0, rank), token_loss(engine, step, 1, rank)
            token_loss(engine, step, 2, rank)
            engine.backward(second)
            engine.backward(first)
            engine.step()

    both_stages(work)


def test_backward_through_one_graph_twice():
    def work(engine, rank):
        for step in range(2):
            loss = token_loss(engine, step, 0, rank)
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            engine.step()

    both_stages(work)


def test_plain_backward_and_no_sync():
    def work(engine, rank):
        engine.set_gradient_accumulation_boundary(False)
        with engine.no_sync():
            token_loss(engine, 0, 0, rank).backward()
        engine.step()
        engine.set_gradient_accumulation_boundary(True)
        token_loss(engine, 0, 1, rank).backward()
        engine.step()
        return engine.global_steps

    both_stages(work)


def test_saved_tensors_hooks_of_the_user_around_and_inside():
    class Saving(Gpt):
        def run_block(self, block, hidden):
            with torch.autograd.graph.save_on_cpu():
                return block(hidden)

    def work(engine, rank):
        for step in range(2):
            with torch.autograd.graph.save_on_cpu():
                loss = token_loss(engine, step, 0, rank)
            engine.backward(loss)
            engine.step()

    both_stages(work, seeded(Saving))


def test_a_view_that_a_layer_keeps_for_its_backward():
    """Kept beside autograd, where nobody can see it: its memory must not serve another bucket."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight):
            ctx.transposed = weight.t()
            ctx.save_for_backward(hidden)
            return hidden @ ctx.transposed

        @staticmethod
        def backward(ctx, gradient):
            (hidden,) = ctx.saved_tensors
            return gradient @ ctx.transposed.t(), gradient.flatten(0, 1).t() @ hidden.flatten(0, 1)

    class Keeping(Block):
        def forward(self, hidden):
            return hidden + Product.apply(torch.tanh(Product.apply(hidden, self.wide.weight)), self.narrow.weight)

    def work(engine, rank):
        train(engine, range(3), rank)

    both_stages(work, seeded(lambda: Gpt(make_block=Keeping)))


@pytest.mark.parametrize("case", ["gpt", "recomputed", "reentrant", "experts"])
def test_training_keeps_no_gathered_memory(case):
    """Nothing that a step leaves behind refers to it, so it serves the next bucket."""

    def work(communicator, model):
        engine = engine_of(model)
        pool = engine.zero.params.gathered.pool
        forgotten = []
        pool.forget = forgotten.append
        train(engine, range(2), communicator.rank)
        assert forgotten == []

    on_threads(2, work, CASES[case].build)


@pytest.mark.parametrize("reentrant", [True, False])
def test_one_checkpoint_around_several_units(reentrant):
    class Chunked(Gpt):
        def logits(self, tokens):
            hidden = self.embed(tokens)
            hidden.requires_grad_()
            run = lambda start: self.blocks[1](self.blocks[0](start))  # noqa: E731
            hidden = torch.utils.checkpoint.checkpoint(run, hidden, use_reentrant=reentrant)
            return self.head(self.blocks[2](hidden))

    def work(engine, rank):
        train(engine, range(3), rank)

    both_stages(work, seeded(Chunked))


def test_parameters_used_outside_of_their_modules():
    """In a function of the parent, of another unit, and as declared by the user."""

    class Borrowing(Block):
        lender = ()

        def forward(self, hidden):
            return super().forward(hidden) + hidden @ self.lender[0].wide.weight[:WIDTH]

    class Lending(Gpt):
        def __init__(self):
            super().__init__(make_block=Borrowing)
            for block in self.blocks:
                block.lender = (self.blocks[0],)  # hidden from torch in a tuple
            zero.register_external_parameter(self.blocks[1], self.blocks[0].wide.weight)

    def work(engine, rank):
        train(engine, range(3), rank)

    both_stages(work, seeded(Lending))


def test_outputs_that_cannot_be_watched():
    """No hook says when such a block's backward begins; autograd itself asks for its weights."""

    class Opaque:
        def __init__(self, hidden):
            self.hidden = hidden

    class Closed(Block):
        def forward(self, hidden):
            return Opaque(super().forward(hidden))

    class Opening(Gpt):
        def run_block(self, block, hidden):
            return block(hidden).hidden

    def work(engine, rank):
        train(engine, range(3), rank)

    both_stages(work, seeded(lambda: Opening(make_block=Closed)))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_declared_parameter_is_gathered_with_its_user(when):
    def work(communicator, model):
        declare = lambda: zero.register_external_parameter(model.blocks[2], model.position.weight)  # noqa: E731
        if when == "before":
            declare()
        engine = engine_of(model)
        if when == "after":
            declare()
        hidden = torch.zeros(1, 2, WIDTH)
        seen = []
        model.blocks[2].norm.register_forward_hook(lambda *_: seen.append(type(model.position.weight)))
        with torch.no_grad():
            model.blocks[2](hidden)
            zero.unregister_external_parameter(model.blocks[2], model.position.weight)
            model.blocks[2](hidden)
        assert seen[0] is not ShardedParameter
        assert seen[1] is ShardedParameter
        train(engine, range(2), communicator.rank)

    on_threads(2, work, gpt)


def test_an_exception_in_forward_leaves_nothing_behind():
    class Fragile(Gpt):
        fails = False

        def run_block(self, block, hidden):
            if self.fails and block is self.blocks[1]:
                block.wide.weight.sum()  # inside the parent: gathered for it
                raise KeyError("mine")
            return block(hidden)

    def work(engine, rank):
        train(engine, [0], rank)
        engine.module.fails = True
        with pytest.raises(KeyError):
            token_loss(engine, 1, 0, rank)
        with pytest.raises(KeyError), torch.no_grad():
            token_loss(engine, 1, 0, rank)
        engine.module.fails = False
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        train(engine, [1, 2], rank)

    both_stages(work, seeded(Fragile))


def test_an_exception_in_backward_can_be_started_over():
    class Failing(torch.autograd.Function):
        fails = True

        @staticmethod
        def forward(ctx, hidden):
            return hidden.clone()

        @staticmethod
        def backward(ctx, gradient):
            if Failing.fails:
                raise KeyError("mine")
            return gradient

    class Fragile(Gpt):
        def run_block(self, block, hidden):
            return Failing.apply(block(hidden))

    def work(engine, rank):
        loss = token_loss(engine, 0, 0, rank)
        with pytest.raises(KeyError):
            engine.backward(loss)
        with pytest.raises(PolyaccelError) as caught:
            engine.step()
        assert "engine.zero_grad()" in str(caught.value)
        engine.zero_grad()
        engine.communicator.barrier()
        Failing.fails = False
        train(engine, [0, 1], rank)
        engine.communicator.barrier()
        Failing.fails = True

    both_stages(work, seeded(Fragile))


def test_a_gather_that_fails_in_backward_is_told_and_nothing_hides_it():
    """Even in the middle of a unit of several buckets."""

    def work(communicator, model):
        engine = engine_of(model)
        train(engine, [0], communicator.rank)
        all_gather = engine.communicator.all_gather
        gathers = []

        def fail(*args, **rest):
            gathers.append(rest.get("bucket"))
            if engine.zero.reducer.in_backward and len(gathers) == fails_at:
                raise CommError("the line is cut")
            return all_gather(*args, **rest)

        engine.communicator.all_gather = fail
        loss = token_loss(engine, 1, 0, communicator.rank)
        fails_at = len(gathers) + 2
        with pytest.raises(CommError) as caught:
            engine.backward(loss)
        assert caught.value.message == "the line is cut"
        engine.communicator.all_gather = all_gather
        engine.zero_grad()
        train(engine, [1], communicator.rank)
        assert engine.zero.params.gathered.live_numel == 0

    on_threads(2, work, gpt)


def test_a_skipped_update_learns_no_order_of_two_steps(caplog):
    """An overflow ends a step too."""

    def work(communicator, model):
        config = {"fp16": {"enabled": True, "loss_scale": 4.0}, "zero": {"log_trace_cache_warnings": True}}
        engine = engine_of(model, **config)
        for step in range(4):
            loss = token_loss(engine, step, 0, communicator.rank)
            engine.backward(loss * float("inf") if step == 1 else loss)
            engine.step()
        assert engine.skipped_steps == 1

    with caplog.at_level(logging.WARNING, logger="polyaccel"):
        on_threads(2, work, gpt)
    assert "another order" not in caplog.text


@pytest.mark.parametrize("warns", [True, False])
def test_an_order_that_deviates_is_told(caplog, warns):
    def work(communicator, model):
        engine = engine_of(model, zero={"log_trace_cache_warnings": warns})
        train(engine, range(4), communicator.rank)

    with caplog.at_level(logging.INFO, logger="polyaccel"):
        on_threads(1, work, seeded(Wandering))
    told = [record for record in caplog.records if "another order" in record.message]
    assert [record.levelname for record in told] == (["WARNING"] * 3 if warns else ["INFO"])


def test_what_is_gathered_stays_within_the_bound():
    """The bound is what the root and the largest unit need at once; without one, much more is kept."""

    def work(communicator, model, bound):
        keys = {"stage3_max_reuse_distance": 10**9, "stage3_prefetch_bucket_size": 10**9}
        if bound:
            keys["stage3_max_live_parameters"] = bound
        engine = engine_of(model, zero={**keys, "reduce_bucket_size": 10**9})
        units = {}
        for bucket in engine.zero.layout.buckets:
            units[bucket.kind.unit] = units.get(bucket.kind.unit, 0) + bucket.numel
        gathering = engine.zero.params.gathered
        peaks = []
        for step in range(3):
            train(engine, [step], communicator.rank)
            peaks.append(gathering.peak_numel)
        assert gathering.live_numel == 0
        return peaks, units

    peaks, units = on_threads(2, work, gpt, None)[0]
    need = units.pop("") + max(units.values())
    assert len(units) == 3
    assert peaks[-1] > need  # prefetching and keeping do take more when they may
    for bound in (need, need + 100):
        peaks, _ = on_threads(2, work, gpt, bound)[0]
        assert peaks[0] > 0
        assert max(peaks) <= bound


def test_a_bound_below_one_bucket_becomes_that_bucket_and_is_told(caplog):
    def work(communicator, model, bound):
        engine = engine_of(model, zero={"stage3_max_live_parameters": bound})
        train(engine, range(2), communicator.rank)
        largest = max(bucket.numel for bucket in engine.zero.layout.buckets if not bucket.kind.persistent)
        engine.destroy()
        return snapshot(model), largest

    with caplog.at_level(logging.WARNING, logger="polyaccel"):
        trained, largest = on_threads(2, work, gpt, 5)[0]
    told = f"stage3_max_live_parameters = 5 is less than the {largest} elements of the bucket of "
    assert told in caplog.text
    assert f"{largest} it is" in caplog.text
    assert_bitwise(trained, on_threads(2, work, gpt, 10**9)[0][0])


def test_an_engine_without_an_optimizer_runs_and_frees():
    plain = gpt()

    def work(communicator, model):
        config = make_config(3, zero=ZERO)
        del config["optimizer"]
        engine = polyaccel.initialize(model=model, config=config)[0]
        tokens, targets = batch(0, 0, 0)
        with torch.no_grad():
            for _ in range(2):
                loss = engine(tokens[None], targets[None])
        assert torch.equal(loss, plain(tokens[None], targets[None]))
        inputs = torch.zeros(1, 2, WIDTH, requires_grad=True)
        for _ in range(2):  # gradients of inputs need no optimizer
            (gradient,) = torch.autograd.grad(model.blocks[0](inputs).square().sum(), inputs)
        (wanted,) = torch.autograd.grad(plain.blocks[0](inputs).square().sum(), inputs)
        assert torch.equal(gradient, wanted)
        assert engine.zero.params.gathered.live_numel == 0

    on_threads(2, work, gpt)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_without_an_optimizer_holds_parameters_and_nothing_else(stage):
    """A model to compare with, say: no master weights and no memory for gradients."""

    def work(communicator, model):
        config = make_config(stage, zero=ZERO, bf16={"enabled": True})
        del config["optimizer"]
        engine = polyaccel.initialize(model=model, config=config)[0]
        with torch.no_grad():
            assert token_loss(engine, 0, 0, 0).isfinite()
        assert all(place.master_is_view for place in engine.zero.params)
        assert not list(engine.zero.reducer.buckets)
        assert all(value.dtype is torch.bfloat16 for value in engine.module_state_dict().values())

    on_threads(2, work, gpt)


def test_a_frozen_model_is_sharded_too():
    def work(communicator, model):
        model.requires_grad_(False)
        model.head.weight.requires_grad_(True)
        engine = engine_of(model)
        train(engine, range(2), communicator.rank)
        own = sum(place.own.numel for place in engine.zero.params)
        whole = sum(place.bucket.numel for place in engine.zero.params)
        assert own == whole // 2
        return finish(engine)

    start = snapshot(gpt())
    params = on_threads(2, work, gpt)[0]
    assert [name for name in start if not torch.equal(params[name], start[name])] == ["embed.weight"]


def test_old_graphs_are_refused_after_an_update():
    def work(communicator, model):
        engine = engine_of(model)
        stale = token_loss(engine, 0, 0, communicator.rank)
        train(engine, [1], communicator.rank)
        with pytest.raises(ShardingError) as caught:
            engine.backward(stale)
        assert "engine.step()" in str(caught.value)

    on_threads(2, work, gpt)


def test_reading_on_one_rank_alone_is_an_error_and_no_hang():
    def work(communicator, model):
        engine = engine_of(model)
        train(engine, [0], communicator.rank)
        if communicator.rank == 1:
            with pytest.raises(ShardingError) as caught:
                model.scale.item()
            assert caught.value.value == "scale"
            assert "GatheredParam" in str(caught.value)
        assert "sharded" in repr(model.blocks[0].wide.weight)
        assert "(25, 8)" in repr(model.blocks[0].wide.weight)
        assert sum(parameter.numel() for parameter in model.parameters()) == sum(p.numel() for p in plain.parameters())
        train(engine, [1], communicator.rank)

    plain = gpt()
    on_threads(2, work, gpt)


def test_whatever_does_not_ask_for_values_is_answered_as_for_a_whole_parameter():
    plain = gpt().blocks[0].wide.weight
    attributes = (
        "shape",
        "ndim",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "is_leaf",
        "nbytes",
        "itemsize",
        "is_cpu",
    )
    attributes += (
        "is_cuda",
        "is_sparse",
        "is_sparse_csr",
        "is_quantized",
        "is_nested",
        "grad_fn",
        "retains_grad",
        "name",
    )
    methods = ("size", "numel", "nelement", "dim", "stride", "element_size", "is_contiguous", "storage_offset")
    methods += (
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_conj",
        "is_neg",
        "dim_order",
        "__len__",
    )

    def work(communicator, model):
        engine = engine_of(model)
        parameter = model.blocks[0].wide.weight
        assert isinstance(parameter, nn.Parameter)
        for name in attributes:
            assert getattr(parameter, name) == getattr(plain, name), name
        for name in methods:
            assert getattr(parameter, name)() == getattr(plain, name)(), name
        assert parameter.is_same_size(plain)
        with pytest.raises(ShardingError) as caught:
            _ = parameter.data
        assert caught.value.value == "blocks.0.wide.weight"
        assert engine.zero.params.gathered.peak_numel == 0

    on_threads(2, work, gpt)


def test_a_parameter_whose_engine_is_gone_says_so():
    def work(communicator):
        scale = engine_of(gpt()).module.scale
        gc.collect()
        with pytest.raises(ShardingError) as caught:
            scale.item()
        assert caught.value.value == "scale"

    run_threads(1, work)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_that_nobody_holds_is_freed(stage):
    def work(communicator):
        engine = engine_of(gpt(), stage)
        train(engine, range(1), 0)
        witness = weakref.ref(engine.zero)
        del engine
        gc.collect()
        assert witness() is None

    run_threads(1, work)
