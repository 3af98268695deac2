"""`load_checkpoint(custom_load_fn=...)`, renaming by pattern, and bytes in a client state: what is asked for is taken
over to the bit, what is wrong is said at once, and a refused load changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import on_threads
from torch import nn

import polyaccel
from polyaccel.errors import CheckpointError


class Net(nn.Module):
    """A tied weight, a buffer, a frozen layer; its parameters are called `body.*` where it is wrapped."""

    def __init__(self, rows: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 6)
        self.up = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.frozen = nn.Linear(10, 6).requires_grad_(False)
        self.head = nn.Linear(6, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        return self.head(hidden + self.frozen(self.norm(torch.relu(self.up(hidden)))))


class Wrapped(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.body = Net(**arguments)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def engine_of(model: nn.Module, stage: int, **changes: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        **changes,
    }
    return polyaccel.initialize(model=model, config=config)[0]


def steps(engine: Any, count: int) -> list[float]:
    losses = []
    for step in range(engine.global_steps, engine.global_steps + count):
        x = (torch.arange(3) * 5 + step + engine.communicator.rank) % 12
        loss = nn.functional.cross_entropy(engine(x), (x * 7) % 12)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def masters(engine: Any) -> dict[tuple[str, str, int], bytes]:
    """Of this rank: parameters in full precision, and optimizer states."""
    return {
        (slot.param.fqn.removeprefix("body."), kind, start): buffer.to_bytes()
        for slot, kind, start, buffer in engine.zero.local_shards()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A run in bf16 on two ranks, saved after two steps: the folder, and per rank its states and its next losses."""
    folder = tmp_path_factory.mktemp("saved")

    def work(communicator: Any, model: nn.Module) -> Any:
        engine = engine_of(model, 2, bf16={"enabled": True})
        steps(engine, 2)
        engine.save_checkpoint(str(folder), client_state={"epoch": 1})
        held = masters(engine)
        return held, steps(engine, 2)

    torch.manual_seed(0)
    return folder, on_threads(2, work, Net)


def seeded(make: Any, **arguments: Any) -> Any:
    """Another model of the kind."""

    def build() -> nn.Module:
        torch.manual_seed(5)
        return make(**arguments)

    return build


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("how", ["names", "patterns"])
def test_what_a_function_or_patterns_take_over_is_the_run_to_the_bit(how: str, stage: int, saved: Any) -> None:
    """Under other names, with masters that are more precise than what the module shows."""
    folder, told = saved

    def copy_all(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        dst.load_state_dict({f"body.{name}": value for name, value in src.items()})

    def work(communicator: Any, model: nn.Module) -> None:
        engine = engine_of(model, stage, bf16={"enabled": True})
        names: Any = {r"^body\.(.*)": r"\1"}
        custom = copy_all if how == "names" else None
        path, client_state = engine.load_checkpoint(str(folder), name_map=names, custom_load_fn=custom)
        assert (path, client_state) == (f"{folder}/global_step2", {"epoch": 1})
        held, losses = told[communicator.rank]
        if stage == 2:
            assert masters(engine) == held
            assert steps(engine, 2) == losses
        else:
            assert steps(engine, 2) == pytest.approx(losses, rel=1e-2)
        if how == "patterns" or stage == 2:
            running = engine.module.body.norm.running_mean
            assert running.abs().sum() > 0

    on_threads(2, work, seeded(Wrapped))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_function_may_resize_and_leave_alone(stage: int, saved: Any) -> None:
    """A larger vocabulary takes the saved rows, what is not touched stays, and states of other shapes begin anew."""
    folder, _ = saved

    def grow(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        assert dst.body.embed.weight.shape == (16, 6)
        assert dst.body.embed.weight.dtype is torch.float32
        with torch.no_grad():
            dst.body.embed.weight[:12].copy_(src["embed.weight"])
            dst.body.up.weight.copy_(src["up.weight"])

    def work(communicator: Any, model: nn.Module) -> None:
        engine = engine_of(model, stage)
        before = {name: value.clone() for name, value in engine.module_state_dict().items()}
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(str(folder), name_map={"^body[.]": ""}, custom_load_fn=grow)
        assert caught.value.value == (1,)
        assert all(part in str(caught.value) for part in ("'exp_avg'", "'body.embed.weight'"))
        after = engine.module_state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        engine.load_checkpoint(str(folder), load_optimizer_states=False, custom_load_fn=grow)
        after = engine.module_state_dict()
        saved_weights = polyaccel.checkpoint.open_checkpoint(folder)
        assert saved_weights.has("embed.weight", "param")
        assert torch.equal(after["body.embed.weight"][12:], before["body.embed.weight"][12:])
        assert not torch.equal(after["body.embed.weight"][:12], before["body.embed.weight"][:12])
        assert after["body.head.weight"].equal(after["body.embed.weight"])
        assert torch.equal(after["body.up.bias"], before["body.up.bias"])
        assert engine.global_steps == 2
        steps(engine, 1)

    on_threads(2, work, seeded(Wrapped, rows=16))


def raising(src: Any, dst: Any) -> None:
    with torch.no_grad():
        dst.up.weight.fill_(7.0)
    raise KeyError("up.wait")


def reshaping(src: Any, dst: Any) -> None:
    dst.up.weight = nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (raising, "KeyError: 'up.wait'"),
        (reshaping, "{'up.weight': ((2, 2), (10, 6))}"),
    ],
    ids=["raises", "reshapes"],
)
def test_a_function_that_fails_on_one_rank_changes_nothing_on_any(function: Any, named: str, saved: Any) -> None:
    def work(communicator: Any, model: nn.Module) -> None:
        engine = engine_of(model, 3)
        before = {name: value.clone() for name, value in engine.module_state_dict().items()}
        mine = function if communicator.rank else lambda src, dst: dst.load_state_dict(src)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(str(saved[0]), custom_load_fn=mine)
        assert caught.value.value == (1,)
        assert named in str(caught.value)
        after = engine.module_state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert engine.global_steps == 0
        steps(engine, 1)

    on_threads(2, work, seeded(Net))


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        (
            {"^body": "a", r"weight$": "b"},
            "'^body'",
        ),
        ({r"^body\.(up|norm)\.": "x."}, "'body.norm.weight'"),
        ({"(": "x"}, "'x'"),
        ({"^body": r"\3"}, "'^body'"),
    ],
    ids=["ambiguous", "colliding", "no pattern", "no group"],
)
def test_renames_that_cannot_be_meant_are_listed_in_one_error(patterns: Any, named: str, saved: Any) -> None:
    engine = engine_of(seeded(Wrapped)(), 1)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(str(saved[0]), name_map=patterns)
    assert named in str(caught.value)
    assert caught.value.value == (0,)
    assert caught.value.hint
    if "^body" in patterns and "a" in patterns.values():
        assert str(caught.value).count("(by 'weight$')") == 4  # embed, frozen, norm and up, all at once
    steps(engine, 1)


def test_bytes_in_a_client_state_are_asked_for(tmp_path: Path) -> None:
    state = {"sampler": {"states": [1, b"\0\xff"]}}
    engine = engine_of(seeded(Net)(), 0)
    for given in (state, {**state, "best": torch.ones(2)}):
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(str(tmp_path), client_state=given)
        assert caught.value.value == "client_state.sampler.states[1]"
        assert '"allow_bytes": true' in caught.value.hint
    assert not list(tmp_path.iterdir())
    open_to_bytes = engine_of(seeded(Net)(), 0, checkpoint={"allow_bytes": True})
    open_to_bytes.save_checkpoint(str(tmp_path), client_state=state)
    assert engine.load_checkpoint(str(tmp_path))[1] == state
