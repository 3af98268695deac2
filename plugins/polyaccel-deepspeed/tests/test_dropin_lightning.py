"""Lightning's DeepSpeed strategies over the drop-in: Lightning refuses CPUs; without its two questions they train there
as plain torch does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "clients"))
from client_runs import CLIENTS, TIMEOUT_S, close, result, run, torchrun

JOB = str(CLIENTS / "lightning_job.py")
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_the_strategies_take_no_cpu(kind: str, tmp_path: Path) -> None:
    """When this fails, Lightning has changed: the jobs below need no separate strategy any longer."""
    job = [sys.executable, *torchrun(), JOB, f"{kind}-refused", "2", str(tmp_path)]
    done = subprocess.run(job, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode != 0
    assert "The DeepSpeed strategy is only supported on CUDA GPUs but `CPUAccelerator` is used" in done.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("trainer", "fabric")}
    for kind, folder in folders.items():
        run(JOB, kind, "-1", str(folder))
    return folders


@pytest.mark.parametrize("stage", [2, 3])
def test_the_trainer(stage: int, tmp_path: Path, plain: dict[str, Path]) -> None:
    """Training, clipping, a schedule, the summary, checkpoints of a callback, resuming, and the conversion to one file;
    stage 3 with everything in host memory, on a model that `configure_model` builds."""
    run(*torchrun(), JOB, "trainer", str(stage), str(tmp_path))
    found, expected = result(tmp_path), result(plain["trainer"])
    for key in ("losses", "resumed", "norms"):
        close(found[key], expected[key])
    close([found["score"]], [min(expected["losses"][2], expected["losses"][5])])


@pytest.mark.parametrize("stage", [2, 3])
def test_fabric(stage: int, tmp_path: Path, plain: dict[str, Path]) -> None:
    """`init_module`, `setup`, `backward`, `save` and `load` in a loop by hand."""
    run(*torchrun(), JOB, "fabric", str(stage), str(tmp_path))
    close(result(tmp_path)["losses"], result(plain["fabric"])["losses"])
