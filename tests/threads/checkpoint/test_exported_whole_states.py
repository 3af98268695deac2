"""States of optimizers on whole parameters go out with the weights, and torch trains on; else an error says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import drawn_from
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import polyaccel
from polyaccel.cli.main import main
from polyaccel.testkit.ranks.threads import run_threads

Make = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "Muon": lambda parameters: torch.optim.Muon(parameters, lr=0.01),
}


def built() -> nn.Module:
    with drawn_from(0):
        return nn.Sequential(nn.Linear(4, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False))


def inputs(step: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(step))


def save(folder: Path, make: Make | None, **changes: Any) -> dict[str, Tensor]:
    """Train five steps on two ranks, and save after three."""

    def job(_: Any) -> dict[str, Tensor]:
        model = built()
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, **changes}
        made = None if make is None else make(model.parameters())
        engine, *_ = polyaccel.initialize(model=model, optimizer=made, config=config)
        for step in range(5):
            engine.backward(engine(inputs(step)).square().mean())
            engine.step()
            if step == 2:
                engine.save_checkpoint(str(folder))
        return {name: value.detach().clone() for name, value in engine.module_state_dict().items()}

    found: dict[str, Tensor] = run_threads(2, job)[0]
    return found


def exported(folder: Path, out: Path, *options: str) -> dict[str, Any]:
    assert main(["ckpt", "export", str(folder), str(out), "--format", "dcp", *options]) == 0
    dcp_to_torch_save(str(out), str(out / "all.pt"))
    return torch.load(out / "all.pt", weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_torch_trains_on_from_a_dcp(kind: str, tmp_path: Path) -> None:
    wanted = save(tmp_path / "saved", KINDS[kind])
    found = exported(tmp_path / "saved", tmp_path / "out")
    model = built()
    model.load_state_dict(found["model"])
    optimizer = KINDS[kind](model.parameters())
    names = [name for name, _ in model.named_parameters()]
    states = {at: found["optimizer"]["state"][name] for at, name in enumerate(names)}
    groups = [{**group, "params": [0, 1]} for group in found["optimizer"]["param_groups"]]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    for step in range(3, 5):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6 if kind == "Adafactor" else 1e-4)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_settings_of_another_optimizer_of_that_name_stay(tmp_path: Path) -> None:
    save(tmp_path / "saved", None, optimizer={"type": "Muon", "params": {"lr": 0.01}})
    found = exported(tmp_path / "saved", tmp_path / "out")["optimizer"]
    assert [group["use_muon"] for group in found["param_groups"]] == [True]
    assert "ns_coefficients" not in found["param_groups"][0]
    assert sorted(found["state"]) == ["0.weight", "2.weight"]
    assert all(set(state) == {"momentum_buffer", "step"} for state in found["state"].values())


@pytest.mark.parametrize("form", ["deepspeed-universal", "orbax"])
def test_a_format_without_a_place_for_them_is_refused(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("polyaccel_deepspeed" if form.startswith("deepspeed") else "orbax.checkpoint")
    save(tmp_path / "saved", KINDS["Adafactor"])
    assert main(["ckpt", "export", str(tmp_path / "saved"), str(tmp_path / "out"), "--format", form]) == 1
    assert "weight'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
