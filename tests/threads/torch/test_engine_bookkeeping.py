"""What an engine tells of a run, and what it does to the module that it was given and gives back."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from parity_models import (
    SMALL,
    VOCAB,
    assert_bitwise,
    assert_close,
    batch,
    drawn_from,
    engine_for,
    make_config,
    on_threads,
    parity_loss,
    parity_model,
    snapshot,
    train_plainly,
)
from stage_cases import stages
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polyaccel
from polyaccel.comm.default import set_thread_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.data import ShardedDataLoader
from polyaccel.zero.plan.traffic import step_traffic


@stages
def test_counters_and_figures_of_accumulated_steps(stage):
    def count(communicator, module):
        config = make_config(stage, accumulation=3, gradient_clipping=0.5, zero=SMALL)
        engine = engine_for(module, config)
        assert engine.get_global_grad_norm() is None
        assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (24, 4)
        assert (engine.gradient_accumulation_steps(), engine.gradient_clipping()) == (3, 0.5)
        assert engine.zero_optimization_stage() == stage
        losses = []
        for step in range(2):
            for micro in range(3):
                assert engine.is_gradient_accumulation_boundary() == (micro == 2)
                loss = parity_loss(engine, step, micro, communicator.rank)
                returned = engine.backward(loss)
                assert returned.item() == pytest.approx(loss.item() / 3)
                assert not returned.requires_grad
                engine.step()
                losses.append(loss.item())
                assert engine.was_step_applied() == (micro == 2)
                assert engine.micro_steps == 3 * step + micro + 1
                assert engine.global_steps == step + (micro == 2)
                assert engine.global_samples == 24 * engine.global_steps
            metrics = engine.metrics
            assert metrics.step == step + 1
            assert metrics.loss == pytest.approx(sum(losses[-3:]) / 3)
            assert metrics.grad_norm == engine.get_global_grad_norm() > 1.0
            assert metrics.grad_norm_clipped == pytest.approx(0.5, rel=1e-5)
            assert metrics.lr == (0.01,)
            assert not metrics.skipped
            assert metrics.samples == 24 * (step + 1)
        assert (engine.skipped_steps, engine.get_lr(), engine.get_loss_scale()) == (0, [0.01], 1.0)

    on_threads(2, count, parity_model)


def test_the_share_of_a_loss_has_its_dtype():
    engine = engine_for(parity_model(), make_config(2, accumulation=2, bf16={"enabled": True}))
    loss = next(engine.module.parameters()).sum()
    shared = engine.backward(loss)
    assert (loss.dtype, shared.dtype) == (torch.bfloat16, torch.bfloat16)
    assert shared.item() == pytest.approx(loss.item() / 2, rel=1e-2)


def test_the_norm_below_the_clip_is_reported_as_it_is():
    def step(communicator, module):
        engine = engine_for(module, make_config(1, gradient_clipping=1e3))
        engine.backward(parity_loss(engine, 0, 0, 0))
        engine.step()
        assert engine.metrics.grad_norm == engine.metrics.grad_norm_clipped == engine.get_global_grad_norm()

    on_threads(1, step, parity_model)


@stages
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_collectives_of_a_step_are_those_of_the_plan(stage, accumulation, world, clip):
    """Every bucket's gradients and parameters travel as planned, and besides them between ranks one small vector, or
    two: what arrived, and the norm, which updates wait for only where it clips."""

    def step(communicator, module):
        config = make_config(stage, accumulation=accumulation, zero=SMALL, gradient_clipping=clip)
        engine = engine_for(module, config)
        for step in range(3):  # the first one learns which gradients to expect
            before = len(communicator.trace)
            for micro in range(accumulation):
                engine.backward(parity_loss(engine, step, micro, communicator.rank))
                engine.step()
            calls = [call.collective for call in communicator.trace[before:]]
            moved = {"all_reduce": 0, "reduce_scatter": 0, "all_gather": 0}
            small = 0
            for call in calls:
                if call.bucket is None:
                    small += 1
                    assert call.numel < 50
                else:
                    parts = (2 if call.operation == "all_reduce" else 1) * (world - 1)
                    moved[call.operation] += parts * call.numel // world
            plan = step_traffic(engine.zero.plan)
            assert small == (0 if world == 1 else 1 if clip else 2)
            assert moved == {
                "all_reduce": plan.all_reduce_numel,
                "reduce_scatter": plan.reduce_scatter_numel,
                "all_gather": plan.all_gather_numel,
            }

    on_threads(world, step, parity_model)


@stages
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_recorder_measures_the_traffic_of_the_formula(stage, accumulation):
    """From the first step on: what the set-up sends is not a step's."""

    def step(communicator, module):
        recording = RecordingCommunicator(communicator, watch_s=None)
        set_thread_communicator(recording)
        engine = engine_for(module, make_config(stage, accumulation=accumulation, zero=SMALL))
        plan = step_traffic(engine.zero.plan)
        for step in range(2):
            recording.recorder.reset_traffic()
            before = len(recording.recorder.entries)
            for micro in range(accumulation):
                engine.backward(parity_loss(engine, step, micro, communicator.rank))
                engine.step()
            sent = recording.recorder.sent_numel
            # What ranks agree on: arrivals, and the norm, by itself where the update does not wait for it.
            calls = [entry.collective for entry in list(recording.recorder.entries)[before:]]
            small = sum(call.numel for call in calls if call.bucket is None)
            agreed = 2 * (small - small / communicator.world_size)
            assert sent["all_reduce"] == pytest.approx(plan.all_reduce_numel + agreed)
            assert sent["reduce_scatter"] == plan.reduce_scatter_numel
            assert sent["all_gather"] == plan.all_gather_numel
            assert engine.metrics.traffic_numel == pytest.approx(plan.total_numel + agreed, abs=1)

    on_threads(3, step, parity_model)


class Normalised(nn.Module):
    """Batch norm, whose running statistics differ between ranks at the start."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean.fill_(rank)
        self.norm.num_batches_tracked.fill_(rank + 3)
        self.register_buffer("strided", torch.full((2, 3), float(rank)).t())
        self.register_buffer("flag", torch.tensor(rank == 0), persistent=False)

    def forward(self, values):
        return self.norm(self.linear(values)).square().mean()


def test_parameters_and_buffers_begin_as_rank_0_s():
    def begin(communicator):
        torch.manual_seed(0)
        module = Normalised(communicator.rank)
        with torch.no_grad():
            module.linear.weight += communicator.rank
        engine = engine_for(module, make_config(1))
        assert module.norm.running_mean.tolist() == [0.0] * 4
        assert module.norm.num_batches_tracked.item() == 3
        assert module.strided.tolist() == [[0.0, 0.0]] * 3
        assert module.flag
        return snapshot(engine.module)

    first, second = run_threads(2, begin)
    assert_bitwise(second, first)


def test_batch_norm_trains_and_keeps_its_own_statistics():
    def train(communicator, module):
        engine = engine_for(module, make_config(2))
        for _ in range(2):
            engine.backward(engine(torch.randn(8, 5) + 10 * communicator.rank))
            engine.step()
        assert module.norm.num_batches_tracked.item() == 5
        return module.norm.running_mean.clone()

    means = on_threads(2, train, lambda: Normalised(0))
    assert not torch.equal(means[0], means[1])


class Mixed(nn.Module):
    """Layers in three element types."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(5, 6)
        self.brain = nn.Linear(6, 7, dtype=torch.bfloat16)
        self.wide = nn.Linear(7, 1, dtype=torch.float64)

    def forward(self, values):
        hidden = self.brain(torch.tanh(self.single(values)).bfloat16())
        return self.wide(torch.tanh(hidden.double())).square().mean()


def mixed() -> Mixed:
    with drawn_from(4):
        return Mixed()


@stages
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_module_of_several_element_types_keeps_them(stage, accumulation):
    def values(step, micro, rank):
        return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))

    def train(communicator, module):
        engine = engine_for(module, make_config(stage, accumulation=accumulation, zero={"reduce_bucket_size": 16}))
        for step in range(3):
            for micro in range(accumulation):
                engine.backward(engine(values(step, micro, communicator.rank)))
                engine.step()
        return snapshot(engine.module)

    plain = train_plainly(
        2,
        3,
        accumulation=accumulation,
        build=mixed,
        loss_fn=lambda module, step, micro, rank: module(values(step, micro, rank)),
        groups=lambda module: module.parameters(),
        make_optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0),
    )
    for params in on_threads(2, train, mixed):
        for name, tolerance in {"single": 1e-3, "brain": 2e-2, "wide": 1e-3}.items():
            ours = {fqn: tensor for fqn, tensor in params.items() if fqn.startswith(name)}
            theirs = {fqn: plain.params[fqn] for fqn in ours}
            assert {fqn: tensor.dtype for fqn, tensor in ours.items()} == {f: t.dtype for f, t in theirs.items()}
            assert_close(ours, theirs, tolerance)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_float64_training_is_not_rounded_to_float32_on_the_way(accumulation):
    """The norm of float64 gradients, which is reported in float32, and the gradients themselves under SGD."""

    def build():
        return mixed().double()

    def loss_fn(module, step, micro, rank):
        values = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(micro))
        return module.wide(torch.tanh(nn.functional.linear(module.single(values), module.brain.weight))).square().mean()

    def train(communicator, module):
        sgd = {"type": "SGD", "params": {"lr": 0.1}}
        engine = engine_for(module, make_config(1, accumulation=accumulation, optimizer=sgd))
        for micro in range(accumulation):
            engine.backward(loss_fn(engine, 0, micro, 0))
            engine.step()
        return snapshot(engine.module)

    plain = train_plainly(
        1, 1, accumulation=accumulation, build=build, loss_fn=loss_fn, groups=lambda module: module.parameters(),
        make_optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
    )  # fmt: skip
    assert_close(on_threads(1, train, build)[0], plain.params, 1e-14)


@stages
def test_destroy_leaves_a_module_that_goes_on_alone(stage):
    def leave(communicator, module):
        engine = engine_for(module, make_config(stage, zero=SMALL))
        engine.backward(parity_loss(engine, 0, 0, communicator.rank))
        engine.step()
        engine.backward(parity_loss(engine, 1, 0, communicator.rank))  # gradients under way at the end
        before = snapshot(engine.module)
        engine.destroy()
        engine.destroy()
        assert_bitwise(snapshot(module), before)
        storages = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        assert len(storages) == len(list(module.parameters()))
        parity_loss(module, 2, 0, communicator.rank).backward()
        assert module.wide.weight.grad is not None
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        assert not torch.equal(module.wide.weight, before["wide.weight"])

    on_threads(2, leave, parity_model)


def test_a_module_can_be_given_to_another_engine():
    def again(communicator, module):
        for stage in (2, 0, 1):
            engine = engine_for(module, make_config(stage, zero=SMALL))
            engine.backward(parity_loss(engine, stage, 0, communicator.rank))
            engine.step()
            engine.destroy()
        return snapshot(module)

    first, second = on_threads(2, again, parity_model)
    assert_bitwise(second, first)


def test_train_and_eval_batches():
    data = torch.utils.data.TensorDataset(*batch(0, 0, 0, size=24))

    def train(communicator, module):
        engine, _, loader, _ = polyaccel.initialize(
            model=module, training_data=data, config=make_config(2, accumulation=2)
        )
        assert isinstance(loader, ShardedDataLoader)
        assert loader is engine.training_dataloader
        losses = [engine.train_batch().item() for _ in range(4)]  # 16 samples a step, 24 in an epoch
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (4, 8, 64)
        assert engine.metrics.loss == pytest.approx(losses[-1])
        assert losses[-1] < losses[0]
        engine.train(False)
        before = snapshot(engine.module)
        held_out = engine.eval_batch(iter([batch(9, 0, 0)]))
        assert not engine.training
        assert not held_out.requires_grad
        assert held_out.item() == parity_loss(engine.module, 9, 0, 0).item()
        assert_bitwise(snapshot(engine.module), before)

    on_threads(2, train, parity_model)


@pytest.mark.parametrize("form", ["tuple", "mapping", "attribute", "only one"])
def test_losses_are_found_in_whatever_a_module_returns(form):
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = parity_model()

        def forward(self, tokens, targets):
            loss = self.inner(tokens, targets)
            shapes = {
                "tuple": (loss, "logits"),
                "mapping": {"logits": 1, "loss": loss},
                "attribute": SimpleNamespace(loss=loss),
                "only one": loss,
            }
            return shapes[form]

    def train(communicator, module):
        engine = engine_for(module, make_config(0))
        tokens, targets = batch(0, 0, 0)
        wanted = parity_loss(module.inner, 0, 0, 0).item()
        assert engine.train_batch(iter([{"tokens": tokens, "targets": targets}])).item() == wanted

    on_threads(1, train, Wrapped)


def test_the_engine_stands_for_its_module():
    def ask(communicator, module):
        engine = engine_for(module, make_config(1))
        assert engine.module is module
        assert engine.embed is module.embed
        assert {name for name, _ in engine.named_parameters()} == {
            f"module.{name}" for name, _ in module.named_parameters()
        }
        assert engine.eval().training is module.training is False
        assert engine.train().training is module.wide.training is True
        with pytest.raises(AttributeError) as caught:
            engine.no_such_thing  # noqa: B018
        assert "no_such_thing" in str(caught.value)
        groups = engine.optimizer.param_groups
        members = [id(p) for group in groups for p in group["params"]]
        assert members == [id(p) for p in module.parameters()], "frozen ones too, as in torch"

    on_threads(1, ask, parity_model)


def test_parameters_keep_their_shape_and_a_gradient_goes_with_its_step():
    """Nobody sees a shard or a bucket."""

    def look(communicator, module):
        engine = engine_for(module, make_config(2))
        shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
        engine.backward(parity_loss(engine, 0, 0, 0))
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        assert all(parameter.grad is None or parameter.grad.shape == parameter.shape for parameter in trained)
        assert any(parameter.grad is not None for parameter in trained)
        engine.step()
        assert all(parameter.grad is None for parameter in module.parameters())
        assert {name: tensor.shape for name, tensor in module.state_dict().items()} == shapes
        assert module.embed.weight is module.head.weight
        assert module.embed.weight.shape == (VOCAB, 6)

    on_threads(2, look, parity_model)


def test_a_process_that_trains_on_the_host_keeps_what_steps_free(monkeypatch):
    kept = []
    monkeypatch.setattr("polyaccel.engine.runtime.keep_freed_memory", lambda: kept.append("once an engine"))
    on_threads(1, lambda communicator, module: engine_for(module, make_config(2, zero=SMALL)), parity_model)
    assert kept == ["once an engine"]


def test_the_phases_of_a_step_add_up_to_it_and_evaluation_is_in_none():
    def train(communicator, module):
        engine = engine_for(module, make_config(1, accumulation=2, zero=SMALL))
        for step in range(2):
            began_s = time.perf_counter()
            for micro in range(2):
                engine.backward(parity_loss(engine, step, micro, communicator.rank))
                engine.step()
            took_s = time.perf_counter() - began_s
            metrics = engine.metrics
            assert sum(metrics.phase_s.values()) == pytest.approx(metrics.step_time_s)
            assert min(metrics.phase_s.values()) >= 0
            assert metrics.step_time_s < took_s + 0.5
            slow = module.register_forward_pre_hook(lambda *_: time.sleep(1.0))
            with torch.no_grad():
                parity_loss(engine, step, 0, communicator.rank)
            slow.remove()

    on_threads(2, train, parity_model)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (1, 3, 1)])
def test_ranks_with_other_micro_batches_are_named_once(sizes, caplog):
    def work(communicator, module):
        config = make_config(1) | {"train_micro_batch_size_per_gpu": sizes[communicator.rank]}
        config.pop("train_batch_size", None)
        engine = engine_for(module, config)
        engine.destroy()

    on_threads(len(sizes), work, parity_model)
    warned = [record for record in caplog.records if "train_micro_batch_size_per_gpu" in record.getMessage()]
    assert len(warned) == (len(set(sizes)) > 1)


@pytest.mark.parametrize(
    "make", [lambda data: DataLoader(data, 2), lambda data: ShardedDataLoader(data, micro_batch_size=2)]
)
def test_a_loader_as_training_data_is_refused_before_the_model_is_touched(make):
    def work(communicator, module):
        data = TensorDataset(torch.ones(8, 2))
        before = [parameter.data_ptr() for parameter in module.parameters()]
        with pytest.raises(ConfigError) as refused:
            engine_for(module, make_config(1), training_data=make(data))
        assert refused.value.problems[0].value == type(make(data)).__name__
        assert before == [parameter.data_ptr() for parameter in module.parameters()]

    on_threads(1, work, parity_model)
