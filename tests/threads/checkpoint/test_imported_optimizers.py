"""An import under any optimizer of torch goes on with the peer's own next losses, or is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_runs import AFTER, BEFORE, Make, PlainRun, importing, next_losses, two_groups
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from polyaccel.checkpoint import open_checkpoint
from polyaccel.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

OPTIMIZERS: Mapping[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.005, momentum=0.9, maximize=True),
}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 0.5}},
    "Adam": {"type": "Adam", "params": {"lr": 0.5, "adam_w_mode": False}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 0.5}},
    "Adamax": {"type": "Adamax", "params": {"lr": 0.5}},
    "SGD": {"type": "SGD", "params": {"lr": 0.5}},
    "momentum": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
    "nesterov": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
}
"""Learning rates that are wrong: those of the checkpoint count."""


def saved(run: PlainRun, folder: Path, layout: str) -> Path:
    """`run` in one of the layouts that are about."""
    flat = layout in ("flat", "titan", "root")
    states = get_optimizer_state_dict(
        run.model, run.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    weights = get_model_state_dict(run.model)
    content: dict[str, Any] = {"model": weights, "optimizer": states}
    if layout == "root":
        content = {**weights, "optimizer": states}
    elif layout == "titan":
        content = {**weights, "optimizer": states, "train_state": {"step": torch.tensor(BEFORE), "seen": torch.ones(2)}}
        content["dataloader"] = {"dp_rank_0": b"bytes"}
    elif layout == "tutorial":
        content = {"app": {"model": weights, "optim": states}}
    elif layout == "numbers":
        content = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    dcp.save(content, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def peer(name: str, folder: Path, layout: str, groups: Any = nn.Module.parameters) -> tuple[Path, list[float]]:
    """What plain torch saved, and its next losses."""
    run = PlainRun(OPTIMIZERS[name], groups)
    run.losses(range(BEFORE))
    source = saved(run, folder, layout)
    return source, run.losses(range(BEFORE, BEFORE + AFTER))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_object_goes_on_from_a_dcp(name: str, tmp_path: Path) -> None:
    index = [*OPTIMIZERS].index(name)
    layout = ["nested", "flat", "numbers", "tutorial", "titan"][index % 5]
    ranks, stage = [(1, 0), (2, 1), (3, 2), (2, 3)][index % 4]
    source, wanted = peer(name, tmp_path, layout)
    assert importing(source, tmp_path / "c", "dcp") == 0
    found = next_losses(tmp_path / "c", OPTIMIZERS[name], ranks=ranks, stage=stage)
    assert found == pytest.approx(wanted, rel=2e-6)


@pytest.mark.parametrize("layout", ["nested", "flat", "root", "titan", "tutorial", "numbers"])
@pytest.mark.parametrize("name", ["AdamW", "momentum"])
def test_every_layout_is_read(layout: str, name: str, tmp_path: Path) -> None:
    source, wanted = peer(name, tmp_path, layout)
    assert importing(source, tmp_path / "c", "dcp") == 0
    assert next_losses(tmp_path / "c", section=CONFIGS[name]) == pytest.approx(wanted, rel=2e-6)
    assert open_checkpoint(tmp_path / "c").scalars["counters"]["global_steps"] == (BEFORE if layout == "titan" else 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_optimizer_of_the_config_goes_on_from_a_dcp(name: str, tmp_path: Path) -> None:
    index = [*CONFIGS].index(name)
    source, wanted = peer(name, tmp_path, ["nested", "flat", "tutorial"][index % 3])
    assert importing(source, tmp_path / "c", "dcp") == 0
    ranks, stage = [(2, 1), (3, 3), (1, 2)][index % 3]
    found = next_losses(tmp_path / "c", section=CONFIGS[name], ranks=ranks, stage=stage)
    assert found == pytest.approx(wanted, rel=2e-6)


@pytest.mark.parametrize("layout", ["nested", "flat", "numbers"])
def test_groups_keep_their_own_hyperparameters(layout: str, tmp_path: Path) -> None:
    source, wanted = peer("AdamW", tmp_path, layout, two_groups)
    assert importing(source, tmp_path / "c", "dcp") == 0
    found = next_losses(tmp_path / "c", OPTIMIZERS["AdamW"], groups=two_groups, ranks=2, stage=3)
    assert found == pytest.approx(wanted, rel=2e-6)
    if layout != "numbers":  # by name, the order of groups is of no account

        def turned(model: nn.Module) -> Any:
            return two_groups(model)[::-1]

        found = next_losses(tmp_path / "c", section=CONFIGS["AdamW"], groups=turned, ranks=2)
        assert found == pytest.approx(wanted, rel=2e-6)
    with pytest.raises((CheckpointError, ValueError)):
        next_losses(tmp_path / "c", OPTIMIZERS["AdamW"])


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        *[("AdamW", "Lion"), ("momentum", "AdamW"), ("RAdam", "AdamW"), ("amsgrad", "AdamW"), ("maximize", "SGD")],
        *[("AdamW", "Lamb"), ("Adagrad", "SGD"), ("RMSprop", "Adagrad")],
    ],
)
def test_another_optimizer_of_the_config_is_refused_by_name(saved_by: str, loaded_by: str, tmp_path: Path) -> None:
    source, _ = peer(saved_by, tmp_path, "nested")
    assert importing(source, tmp_path / "c", "dcp") == 0
    section = {"type": loaded_by, "params": {"lr": 0.01}}
    with pytest.raises(CheckpointError) as caught:
        next_losses(tmp_path / "c", section=section)
    assert caught.value.hint is not None
    assert len(next_losses(tmp_path / "c", section=section, load_optimizer_states=False)) == AFTER


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), [("AdamW", "NAdam"), ("RAdam", "Adam"), ("AdamW", "amsgrad"), ("SGD", "RMSprop")]
)
def test_another_optimizer_object_is_refused_by_name(saved_by: str, loaded_by: str, tmp_path: Path) -> None:
    source, wanted = peer(saved_by, tmp_path, "nested")
    assert importing(source, tmp_path / "c", "dcp") == 0
    if loaded_by == "amsgrad":  # as torch's load_state_dict: the saved settings count
        assert next_losses(tmp_path / "c", OPTIMIZERS[loaded_by]) == pytest.approx(wanted, rel=2e-6)
        return
    with pytest.raises(CheckpointError):
        next_losses(tmp_path / "c", OPTIMIZERS[loaded_by])


class OwnSGD(torch.optim.Optimizer):
    """A script's own optimizer, with a state of its own."""

    def __init__(self, params: Any, lr: float = 0.01, rest: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "rest": rest})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if "memory" not in state:
                        state["memory"], state["count"] = torch.zeros_like(param), 0
                    state["memory"].mul_(group["rest"]).add_(param.grad)
                    state["count"] += 1
                    param.add_(state["memory"], alpha=-group["lr"] / state["count"])


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_of_a_script_goes_on_from_one_with_the_same_settings(stage: int, tmp_path: Path) -> None:
    run = PlainRun(OwnSGD)
    run.losses(range(BEFORE))
    source = saved(run, tmp_path, "nested")
    wanted = run.losses(range(BEFORE, BEFORE + AFTER))
    assert importing(source, tmp_path / "c", "dcp") == 0
    allowed = {"zero_allow_untested_optimizer": True}
    found = next_losses(tmp_path / "c", OwnSGD, ranks=2, stage=stage, more=allowed)
    assert found == pytest.approx(wanted, rel=2e-6)
    with pytest.raises(CheckpointError):
        next_losses(tmp_path / "c", OPTIMIZERS["momentum"])


def test_a_tied_weight_is_known_by_both_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    import polyaccel

    model = Tied()
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert importing(tmp_path / "dcp", tmp_path / "c", "dcp") == 0
    engine = polyaccel.initialize(model=Tied(), config={"train_batch_size": 1})[0]
    engine.load_checkpoint(str(tmp_path / "c"), load_module_only=True)
    assert torch.equal(engine.module_state_dict()["head.weight"], model.head.weight)
    engine.destroy()


def test_a_state_without_a_group_fails_unless_weights_are_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = PlainRun(OPTIMIZERS["AdamW"])
    run.losses(range(2))
    content = {"model": run.model.state_dict(), "optimizer": {"moments": {"a": torch.ones(3)}, "state": {}}}
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert importing(tmp_path / "dcp", tmp_path / "c", "dcp") == 1
    assert "optimizer.moments" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
    assert importing(tmp_path / "dcp", tmp_path / "c", "dcp", "--weights-only") == 0
    assert "optimizer.moments" in capsys.readouterr().out
    assert len(next_losses(tmp_path / "c", section=CONFIGS["AdamW"])) == AFTER


SCHEDULES = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones=[2, 5]),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.5), torch.optim.lr_scheduler.ExponentialLR(o, 0.8)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on(name: str, tmp_path: Path) -> None:
    run = PlainRun(OPTIMIZERS["momentum"])
    run.schedule = SCHEDULES[name](run.optimizer)
    run.losses(range(BEFORE))
    states = get_optimizer_state_dict(run.model, run.optimizer)
    content = {"model": get_model_state_dict(run.model), "optimizer": states, "lr_scheduler": run.schedule.state_dict()}
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    wanted = run.losses(range(BEFORE, BEFORE + AFTER))
    assert importing(tmp_path / "dcp", tmp_path / "c", "dcp") == 0
    found = next_losses(tmp_path / "c", OPTIMIZERS["momentum"], schedule=SCHEDULES[name], ranks=2)
    assert found == pytest.approx(wanted, rel=2e-6)
    other = SCHEDULES["cosine" if name != "cosine" else "lambda"]
    with pytest.raises(CheckpointError):
        next_losses(tmp_path / "c", OPTIMIZERS["momentum"], schedule=other)
    warmup = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}
    with pytest.raises(CheckpointError):
        next_losses(tmp_path / "c", section=CONFIGS["momentum"], more=warmup)
