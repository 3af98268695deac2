"""Replica groups that train apart and meet (DiLoCo), against the papers' algorithm in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from replica_models import Config, Model, Outer, batch, make_config, run_steps, train_plainly, weights_of
from torch import Tensor, nn

import polyaccel
from polyaccel.errors import ConfigError, ShardingError
from polyaccel.testkit.ranks.threads import run_threads

Statement = Callable[[Any], Any]


def nothing(engine: Any) -> None:
    return None


def on_groups(world: int, work: Callable[[Any], Any]) -> list[Any]:
    """`work(model)` on every rank. The models of ranks begin with different weights; rank 0's are those of `build`."""
    models = []
    for rank in range(world):
        torch.manual_seed(3 if rank == 0 else 50 + rank)
        models.append(Model())
    return run_threads(world, lambda communicator: work(models[communicator.rank]))


def train(groups: int, ranks: int, steps: int, config: Config, before: Statement = nothing) -> list[Any]:
    """The weights of every rank after some steps, and what `before` finds out of the engine."""

    def work(model: nn.Module) -> tuple[dict[str, Tensor], Any]:
        engine, *_ = polyaccel.initialize(model=model, config=deepcopy(config))
        found = before(engine)
        run_steps(engine, 1, steps)
        state = weights_of(engine)
        engine.destroy()
        return state, found

    return on_groups(groups * ranks, work)


def compare(groups: int, ranks: int, steps: int, outer: Outer, stage: int, **more: Any) -> None:
    def fragments_of(engine: Any) -> dict[str, int]:
        shards, count = list(engine.zero.shards), outer.fragments
        starts = [len(shards) * index // count for index in range(count)]
        return {
            slot.param.fqn: max(part for part in range(count) if starts[part] <= index)
            for index, shard in enumerate(shards)
            for slot in shard.bucket.slots
        }

    found = train(groups, ranks, steps, make_config(stage, groups, outer.section, **more), fragments_of)
    expected = train_plainly(groups, ranks, steps, outer, found[0][1])
    assert set(found[0][1].values()) == set(range(outer.fragments))
    for rank, (weights, _) in enumerate(found):
        for name, value in expected[rank // ranks].items():
            torch.testing.assert_close(weights[name], value, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("groups", "ranks", "stage"), [(2, 1, 1), (2, 2, 2), (2, 2, 3), (3, 1, 3), (2, 3, 3)])
def test_outer_steps_are_those_of_the_paper(groups, ranks, stage):
    compare(groups, ranks, 7, Outer(), stage)


@pytest.mark.parametrize(
    "outer",
    [
        Outer(every=1),
        Outer(every=2, lr=1.0, momentum=0.0),
        Outer(every=2, nesterov=False),
        Outer(every=3, delay=2),
        Outer(every=3, delay=1, alpha=0.5),
        Outer(every=4, fragments=2, delay=1, alpha=0.25),
    ],
)
def test_settings_of_outer_steps(outer):
    compare(2, 2, 9, outer, 2)


def test_the_first_step_is_compared_with_plain_torch(monkeypatch):
    monkeypatch.delenv("POLYACCEL_VERIFY")
    compare(2, 2, 4, Outer(every=1), 2, verify="always")


@pytest.mark.parametrize("stage", [2, 3])
def test_an_own_optimizer_and_averages(stage):
    """A client's AdamW with an exponential moving average: outer states are the engine's own."""

    def work(model: nn.Module) -> dict[str, Tensor]:
        config = make_config(stage, 2, Outer().section, ema={"decay": 0.5})
        del config["optimizer"]
        config["zero_allow_untested_optimizer"] = True
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 0.02, weight_decay=0.1)
        engine, *_ = polyaccel.initialize(model=model, optimizer=optimizer, config=config)
        run_steps(engine, 1, 7)
        state = weights_of(engine)
        with engine.averaged_weights():
            assert any(not torch.equal(value, state[name]) for name, value in weights_of(engine).items())
        assert all(torch.equal(value, state[name]) for name, value in weights_of(engine).items())
        engine.destroy()
        return state

    expected = train_plainly(2, 2, 7, Outer())
    for rank, weights in enumerate(on_groups(4, work)):
        for name, value in expected[rank // 2].items():
            torch.testing.assert_close(weights[name], value, rtol=2e-5, atol=2e-6)


def rounded(values: Tensor, bits: int) -> Tensor:
    """What codes of blocks of 256 stand for, by the formula in float64."""
    most = 127 if bits == 8 else 7
    parts = []
    for block in values.double().split(256):
        scale = (block.abs().max() / most).float().double()
        parts.append(block if scale == 0 else (block / scale).round().clamp(-most, most) * scale)
    return torch.cat(parts)


CPU = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("bits", "stage", "zero", "more"),
    [
        (4, 1, {}, {}),
        (8, 1, {}, {}),
        (8, 3, {}, {"bf16": {"enabled": True}}),
        (32, 2, CPU, {"fp16": {"enabled": True, "loss_scale": 16}}),
        (32, 3, CPU | {"offload_param": {"device": "cpu"}}, {"bf16": {"enabled": True}}),
    ],
)
def test_what_rounding_leaves_out_is_sent_later(bits, stage, zero, more):
    """Each exchange of weights that were moved by hand is the formula in float64, with the rest of the one before.
    Master weights may stand apart from parameters, and in host memory."""
    exchanges = 3
    dtype = torch.float16 if "fp16" in more else torch.bfloat16 if "bf16" in more else torch.float32

    def state(shard: Any, name: str) -> Tensor:
        return shard.states[name].raw.clone() if name in shard.states else torch.zeros(shard.master.numel)

    def work(model: nn.Module) -> list[list[tuple[Tensor, ...]]]:
        section = Outer(every=1, lr=1.0, momentum=0.0).section | {"quantization_bits": bits}
        config = make_config(stage, 2, section, **more)
        config["zero_optimization"] |= zero
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
        engine, *_ = polyaccel.initialize(model=model, config=config)
        generator = torch.Generator().manual_seed(polyaccel.comm.get_rank())
        found = []
        for number in range(exchanges):
            moved = []
            for shard in engine.zero.shards:
                for piece in shard.slices:
                    window = slice(piece.shard_offset, piece.shard_offset + piece.length)
                    shard.master.raw[window] += torch.randn(piece.length, generator=generator)
                moved.append((state(shard, "outer_weights"), shard.master.raw.clone(), state(shard, "outer_error")))
            value = batch(number, polyaccel.comm.get_rank()).to(dtype)
            engine.backward((engine(value) - value[:, :3]).square().mean())
            engine.step()
            for index, shard in enumerate(engine.zero.shards):
                after = state(shard, "outer_weights"), state(shard, "outer_error"), shard.master.raw.clone()
                moved[index] = (*moved[index], *after)
            found.append(moved)
        weights = engine.module_state_dict()
        for shard in engine.zero.shards:
            for piece in shard.slices:
                part = shard.master.raw[piece.shard_offset : piece.shard_offset + piece.length].to(dtype)
                seen = weights[piece.fqn].flatten()[piece.start : piece.start + piece.length]
                assert torch.equal(seen, part), piece
        engine.destroy()
        return found

    groups = on_groups(2, work)
    for number in range(exchanges):
        for ours in zip(*(group[number] for group in groups), strict=True):
            wanted = [(outer - master).double() + rest.double() for outer, master, rest, *_ in ours]
            sent = wanted if bits == 32 else [rounded(one, bits) for one in wanted]
            for (outer, _, _, after, rest, master), want, gives in zip(ours, wanted, sent, strict=True):
                new = outer.double() - torch.stack(sent).mean(0)
                torch.testing.assert_close(after.double(), new, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(rest.double(), want - gives, rtol=1e-4, atol=1e-5)
                assert torch.equal(master, after)


@pytest.mark.parametrize("more", [{}, {"fragment_sync_delay": 2, "fragments": 2, "quantization_bits": 8}])
def test_a_run_resumes_between_outer_steps_with_the_same_bits(more, tmp_path):
    """Saved while an exchange is under way, where there is a delay."""
    config = make_config(3, 2, Outer(every=4).section | more)
    whole = train(2, 2, 11, config)

    def stop(model: nn.Module) -> None:
        engine, *_ = polyaccel.initialize(model=model, config=deepcopy(config))
        run_steps(engine, 1, 5)
        engine.save_checkpoint(str(tmp_path))
        run_steps(engine, 6, 7)  # which do not count
        engine.destroy()

    def resume(model: nn.Module) -> dict[str, Tensor]:
        engine, *_ = polyaccel.initialize(model=model, config=deepcopy(config))
        run_steps(engine, 1, 4)  # an exchange of which is under way
        engine.load_checkpoint(str(tmp_path))
        run_steps(engine, 6, 11)
        state = weights_of(engine)
        engine.destroy()
        return state

    on_groups(4, stop)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["replica-group-0", "replica-group-1"]
    for rank, weights in enumerate(on_groups(4, resume)):
        assert all(torch.equal(value, whole[rank][0][name]) for name, value in weights.items())


def test_a_run_goes_on_with_more_groups_and_from_a_run_without(tmp_path):
    """New groups begin as the first one, and outer weights at the weights."""

    def save(model: nn.Module) -> dict[str, Tensor]:
        config = make_config(2, 2, {})
        del config["diloco"]
        engine, *_ = polyaccel.initialize(model=model, config=config)
        run_steps(engine, 1, 2)
        engine.save_checkpoint(str(tmp_path))
        state = weights_of(engine)
        engine.destroy()
        return state

    def go_on(model: nn.Module) -> tuple[dict[str, Tensor], list[bool]]:
        engine, *_ = polyaccel.initialize(model=model, config=make_config(2, 2, Outer(every=2).section))
        engine.load_checkpoint(str(tmp_path))
        state = weights_of(engine)
        begins = [torch.equal(one.states["outer_weights"].raw, one.master.raw) for one in engine.zero.shards]
        run_steps(engine, 3, 6)
        engine.destroy()
        return state, begins

    saved = on_groups(1, save)[0]
    for weights, begins in on_groups(4, go_on):
        assert all(torch.equal(value, saved[name]) for name, value in weights.items())
        assert all(begins)


def test_groups_train_on_different_samples_and_export_apart(tmp_path):
    def work(model: nn.Module) -> list[int]:
        config = make_config(1, 2, Outer(every=2).section)
        data = [(torch.full((5,), float(index)), index) for index in range(24)]
        engine, _, loader, _ = polyaccel.initialize(model=model, config=config, training_data=data)
        seen = [int(number) for _, numbers in loader for number in numbers]
        engine.save_16bit_model(str(tmp_path))
        engine.destroy()
        return seen

    seen = on_groups(4, work)
    assert sorted(number for each in seen for number in each) == list(range(24))
    assert {each.parent.name for each in tmp_path.rglob("*.bin")} == {"replica-group-0", "replica-group-1"}


def test_groups_with_other_outer_weights_are_an_error():
    def work(model: nn.Module) -> type[BaseException] | None:
        engine, *_ = polyaccel.initialize(model=model, config=make_config(1, 2, Outer(every=2).section))
        if polyaccel.comm.get_rank() == 1:
            engine.zero.shards[0].states["outer_weights"].raw[0] += 1.0
        with pytest.raises(ShardingError) as raised:
            run_steps(engine, 1, 2)
        return raised.value.value

    assert on_groups(2, work) == [[1], [1]]


def test_weights_that_are_not_finite_are_an_error_on_all_groups():
    def work(model: nn.Module) -> Any:
        engine, *_ = polyaccel.initialize(model=model, config=make_config(2, 2, Outer(every=2).section))
        if polyaccel.comm.get_rank() == 3:
            engine.zero.shards[0].master.raw[0] = float("nan")
        with pytest.raises(ShardingError) as raised:
            run_steps(engine, 1, 2)
        return raised.value.value

    assert on_groups(4, work) == [[1]] * 4


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ({"diloco": {"replica_groups": 3}}, ["diloco.replica_groups"]),
        ({"zero_optimization": {"stage": 0}}, ["zero_optimization.stage"]),
        ({"diloco": {"sync_every": 2, "fragments": 3}}, ["diloco.fragments"]),
        ({"diloco": {"sync_every": 2, "fragment_sync_delay": 2}}, ["diloco.fragment_sync_delay"]),
        ({"diloco": {"fragment_update_alpha": 0.5}}, ["diloco.fragment_update_alpha"]),
        ({"mesh": {"tensor": 2}}, ["mesh.tensor"]),
        ({"checkpoint": {"in_memory": True}}, ["checkpoint.in_memory"]),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}},
            ["zero_optimization.offload_optimizer.device"],
        ),
    ],
)
def test_settings_that_do_not_fit(more, keys):
    def work(model: nn.Module) -> list[str]:
        with pytest.raises(ConfigError) as refused:
            polyaccel.initialize(model=model, config=make_config(1, 2, {}) | more)
        return [problem.key for problem in refused.value.problems]

    assert on_groups(2, work) == [keys] * 2
