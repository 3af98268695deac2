"""Lightning's Trainer and Fabric over polyaccel on two gloo ranks, next to plain torch in one process."""

from __future__ import annotations

import json
from pathlib import Path

import accelerate_job
import pytest
import torch
from test_accelerate import run

JOB = Path(__file__).parent / "lightning_job.py"


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_losses_and_weights_are_those_of_one_process(kind: str, stage: int, accumulation: int, tmp_path: Path) -> None:
    """Clipping, a schedule, a resumed run, and weights that the module has again."""
    run(JOB, kind, str(stage), str(accumulation), str(tmp_path))
    losses, weights = accelerate_job.reference(accumulation)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["losses"] == pytest.approx(losses, rel=1e-6)
    if kind == "fabric":
        assert found["again"] == found["losses"][3:]
    else:
        model = accelerate_job.build()
        model.load_state_dict(weights)
        samples = accelerate_job.samples(accumulation)
        assert found["checked"] == pytest.approx(accelerate_job.loss_of(model(samples)).item(), rel=1e-5)
    saved = torch.load(tmp_path / "weights.pt")
    assert saved.keys() == weights.keys()
    for name, one in weights.items():
        torch.testing.assert_close(saved[name], one, rtol=1e-5, atol=1e-6)
