"""A real DeepSpeed loads the universal checkpoints that polyaccel exports, at every stage; its next losses are ours.
Its layers of experts choose, drop and train what those of the drop-in do.

`make test-deepspeed` makes an environment with DeepSpeed 0.19.8 and names its interpreter in DEEPSPEED_PYTHON; without
one these tests are skipped, and `tests/unit/dropin/test_deepspeed_export.py` holds the layout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed_runs import GOLDEN, TOLD, exported, next_losses

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("DEEPSPEED_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="DEEPSPEED_PYTHON names no interpreter: make test-deepspeed")
RELATIVE = {"bf16": 3e-3, "fp16": 3e-4}
CASES = [
    ("zero1", 1, 2),
    ("zero1", 2, 3),
    ("zero3", 3, 3),
    ("bf16", 2, 3),
    ("bf16-zero3", 3, 2),
    ("fp16", 1, 2),
    ("fp16-zero3", 3, 2),
]
"""Variants, and the stage and ranks that DeepSpeed goes on with. At stage 3 all its groups move one counter of updates,
so that there all parameters are in one."""


def deepspeed_goes_on(folder: Path, place: Path, ranks: int, **settings: Any) -> dict[str, Any]:
    """What a real DeepSpeed on so many ranks found at `place`, and its next losses."""
    (folder / "settings.json").write_text(json.dumps(settings))
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for name in ("PYTHONPATH", "MASTER_PORT"):
        environ.pop(name, None)
    launch = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(GOLDEN / "go_on.py"), str(place), str(folder / "settings.json"), str(folder / "found.json")]
    done = subprocess.run([*launch, *script], capture_output=True, text=True, timeout=300, env=environ, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.parametrize(("variant", "stage", "ranks"), CASES)
def test_deepspeed_goes_on_with_our_losses(variant: str, stage: int, ranks: int, tmp_path: Path) -> None:
    one_group = stage == 3
    place, skipped = exported(variant, tmp_path, one_group=one_group)
    settings = {"variant": variant, "stage": stage, "steps": [4, 8], "states": True, "one_group": one_group}
    found = deepspeed_goes_on(tmp_path, place, ranks, **settings)
    losses, scale = next_losses(variant, tmp_path, ranks, one_group=one_group)
    assert found.pop("losses") == pytest.approx(losses, rel=RELATIVE.get(variant.partition("-")[0], 2e-6))
    assert found == {
        "global_steps": 4,
        "global_samples": 24,
        "skipped_steps": skipped,
        "lr": pytest.approx([1e-2 * (3 - skipped) / 6] * (1 if one_group else 2)),
        "loss_scale": scale,
        "weight_decay": [0.1] if one_group else [0.1, 0.0],
        "epoch": 3,
    }
    if not one_group:  # both go on as DeepSpeed itself did
        assert losses == pytest.approx(TOLD[variant]["losses"][4:], rel=RELATIVE.get(variant.partition("-")[0], 2e-6))


def test_deepspeed_takes_weights_alone(tmp_path: Path) -> None:
    place, _ = exported("zero1", tmp_path, "param", "buffer")
    settings = {"variant": "zero1", "stage": 2, "steps": [4, 5], "states": False, "one_group": False}
    found = deepspeed_goes_on(tmp_path, place, 2, **settings)
    losses, _ = next_losses("zero1", tmp_path, 2)
    assert found["losses"][0] == pytest.approx(losses[0], rel=2e-6)


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (3, 3)])
def test_a_clients_schedule_goes_on(stage: int, ranks: int, tmp_path: Path) -> None:
    one_group = stage == 3
    place, _ = exported("zero1", tmp_path, one_group=one_group, decays=True)
    settings = {
        "variant": "zero1",
        "stage": stage,
        "steps": [4, 8],
        "states": True,
        "one_group": one_group,
        "decays": True,
    }
    found = deepspeed_goes_on(tmp_path, place, ranks, **settings)
    losses, _ = next_losses("zero1", tmp_path, ranks, one_group=one_group, decays=True)
    assert found["losses"] == pytest.approx(losses, rel=2e-6)
    assert found["lr"] == pytest.approx([found["lr"][0]] * (1 if one_group else 2))
    assert 0 < found["lr"][0] == pytest.approx(TOLD["zero1"]["config"]["optimizer"]["params"]["lr"] / 5)


@pytest.mark.timeout(600)
def test_mixtures_train_as_ours_do(tmp_path: Path) -> None:
    """Two ranks, every gate, with experts shared and not: tokens an expert alike, those that are drawn too."""
    found = []
    for python, path in ((PYTHON, ""), (sys.executable, str(ROOT / "plugins" / "polyaccel-deepspeed"))):
        environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        environ.pop("MASTER_PORT", None)
        out = tmp_path / f"{len(found)}.json"
        launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = str(ROOT / "tests" / "support" / "dropin_mixtures.py")
        done = subprocess.run(
            [*launch, script, str(out)], capture_output=True, text=True, timeout=290, env=environ, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found.append(json.loads(out.read_text()))
    theirs, ours = found
    assert theirs.keys() == ours.keys()
    for case, ranks in theirs.items():
        for their, our in zip(ranks, ours[case], strict=True):
            assert their["counts"] == our["counts"], case
            assert their["losses"] == pytest.approx(our["losses"], rel=1e-6), case
            if "stage 0" not in case:
                assert their["norms"] == pytest.approx(our["norms"], rel=1e-6), case
