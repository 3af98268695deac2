"""Universal checkpoints of DeepSpeed in `load_checkpoint`: what ds_to_universal wrote trains on as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.checkpoint.ds_to_universal import main, parse_arguments

from polyaccel.errors import CheckpointError

CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
}


def trained(steps: int, engine: Any = None, **checkpoint: Any) -> Any:
    if engine is None:
        torch.manual_seed(1)
        engine = deepspeed.initialize(model=torch.nn.Linear(3, 2), config={**CONFIG, "checkpoint": checkpoint})[0]
    for _ in range(steps):
        engine.backward(engine(torch.ones(4, 3)).square().sum())
        engine.step()
    return engine


@pytest.mark.parametrize("named", [True, False])
def test_a_universal_checkpoint_is_loaded(tmp_path: Path, named: bool) -> None:
    engine = trained(2)
    engine.save_checkpoint(str(tmp_path), "one", {UNIVERSAL_CHECKPOINT_INFO: {}, "iteration": 7})
    main(parse_arguments(["--input_folder", str(tmp_path / "one"), "--output_folder", str(tmp_path / "one_universal")]))
    wanted = {name: value.clone() for name, value in trained(1, engine).module.state_dict().items()}
    engine.destroy()
    resumed = trained(0, load_universal=True)
    before = sorted(path.name for path in tmp_path.iterdir())
    _, client_state = resumed.load_checkpoint(str(tmp_path), "one_universal" if named else None)
    assert client_state["iteration"] == 7
    assert resumed.global_steps == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    found = trained(1, resumed).module.state_dict()
    assert all(torch.allclose(found[name], value, rtol=1e-6) for name, value in wanted.items())
    resumed.destroy()


def test_a_universal_checkpoint_without_a_file_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken" / "zero").mkdir(parents=True)
    engine = trained(0, load_universal=True)
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(str(tmp_path), "broken")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
    engine.destroy()
